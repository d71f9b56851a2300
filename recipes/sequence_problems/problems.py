"""Train models on small problems of state tracking and recall, and report how many answers are right.

    python recipes/sequence_problems/problems.py train|report [--conf YAML] [--out FOLDER] [--workers N]

A run is a problem, a model and a seed, and has a folder OUT/PROBLEM/MODEL-SEED with its `train.log` and, once it is
finished, `finished`. What is finished is not run again. `report` writes OUT/accuracy.csv, an evaluation a row, and
OUT/accuracy.png, and prints a table of the last ones.
"""

import argparse
import csv
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tqdm import tqdm

from fairseq_fwp.cli.plot_style import colours, load_pyplot

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ALWAYS = {
    "user-dir": str(ROOT / "fairseq_fwp"),
    "task": "fwp_sequence_problems",
    "criterion": "label_smoothed_cross_entropy",
    "report-accuracy": True,
    "num-workers": 0,
    "no-save": True,
    "log-format": "json",
    "log-interval": 100,
}
EVALUATION = re.compile(r'"valid_accuracy": "([\d.]+)".*?"valid_num_updates": "(\d+)"')


class Run(NamedTuple):
    """One training: of a problem, by a model, from a seed, in its folder."""

    problem: str
    model: str
    seed: int
    flags: dict[str, Any]
    folder: Path

    @property
    def command(self) -> list[str]:
        words = ["fairseq-train"]
        for flag, value in self.flags.items():
            if value is not False:
                words += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
        return words

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """The updates and the percentage of right answers of every evaluation."""
        found = EVALUATION.findall((self.folder / "train.log").read_text(encoding="utf-8"))
        return [(int(updates), float(accuracy)) for accuracy, updates in found]


def runs(conf: Path, out: Path) -> list[Run]:
    """Return the runs that a file asks for."""
    plan = yaml.safe_load(conf.read_text(encoding="utf-8"))
    found = []
    for problem, of_problem in plan["problems"].items():
        for model in of_problem["models"]:
            if model not in plan["models"]:
                raise SystemExit(f"{conf}: {problem} asks for the model {model!r}, which is not among models")
            flags = ALWAYS | plan["common"] | of_problem["flags"] | plan["models"][model]
            for seed in plan["seeds"]:
                folder = out / problem / re.sub(r"[^\w.]+", "_", f"{model}-{seed}")
                found.append(Run(problem, model, seed, flags | {"seed": seed, "save-dir": str(folder)}, folder))
    return found


def train(run: Run) -> None:
    """Train one model, unless that is done. Raises SystemExit with the log's last lines where it fails."""
    done = run.folder / "finished"
    if done.exists():
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    tqdm.write("+ " + shlex.join(run.command), file=sys.stderr)
    with (run.folder / "train.log").open("w", encoding="utf-8") as log:
        status = subprocess.run(run.command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        last = (run.folder / "train.log").read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        raise SystemExit(
            "\n".join([f"{run.problem}, {run.model}: fairseq-train failed, see {run.folder}/train.log", *last])
        )
    done.touch()


def report(found: list[Run], out: Path) -> None:
    """Write the accuracies of all finished runs, draw them, and print the last ones."""
    finished = [run for run in found if (run.folder / "finished").exists()]
    if not finished:
        raise SystemExit(f"no run has finished in {out}: begin with the stage train")
    with (out / "accuracy.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["problem", "model", "seed", "updates", "accuracy"])
        writer.writerows([*run[:3], *evaluation] for run in finished for evaluation in run.evaluations)
    draw(finished, out / "accuracy.png")
    print("| problem | model | seed | updates | right answers, % |", "| --- | --- | ---: | ---: | ---: |", sep="\n")
    for run in finished:
        updates, accuracy = run.evaluations[-1]
        print(f"| {run.problem} | {run.model} | {run.seed} | {updates:,} | {accuracy:.1f} |")


def draw(finished: list[Run], picture: Path) -> None:
    """A panel for each problem: right answers against updates, a line a run."""
    plt = load_pyplot()
    problems = list(dict.fromkeys(run.problem for run in finished))
    colour = colours(run.model for run in finished)
    figure, panels = plt.subplots(1, len(problems), figsize=(4.6 * len(problems), 3.4), squeeze=False, sharey=True)
    for panel, problem in zip(panels[0], problems, strict=True):
        of_problem = [run for run in finished if run.problem == problem]
        for run in of_problem:
            label = (
                run.model if run.seed == min(other.seed for other in of_problem if other.model == run.model) else None
            )
            panel.plot(*zip(*run.evaluations, strict=True), color=colour[run.model], label=label)
        panel.set_title(problem)
        panel.set_xlabel("updates")
        panel.set_ylim(0, 103)
        panel.legend()
    panels[0][0].set_ylabel("right answers (%)")
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="?", choices=["train", "report", "all"], default="all")
    parser.add_argument("--conf", type=Path, default=HERE / "conf" / "quick.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "sequence_problems")
    parser.add_argument("--workers", type=int, default=2, help="runs at once, each on one core (2)")
    args = parser.parse_args()
    found = runs(args.conf, args.out)
    if args.stage != "report":
        with ThreadPoolExecutor(args.workers) as workers:
            list(tqdm(workers.map(train, found), total=len(found), desc="runs", disable=None))
    if args.stage != "train":
        report(found, args.out)


if __name__ == "__main__":
    main()
