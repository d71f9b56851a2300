"""Train models on small problems of state tracking and recall, and report how many answers are right.

A run, of a problem, a model and a seed, has a folder OUT/PROBLEM/MODEL_SEED with its `train.log` and, at its end, its
command in `finished`, with which it is not run again. The report is accuracy.csv, accuracy.png and a table.
"""

import argparse
import csv
import json
import math
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import yaml
from tqdm import tqdm

from fairseq_fwp.cli.plot_style import PUBLISHED, colours, load_pyplot, save

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


class Run(NamedTuple):
    """One training: of a problem, by a model, from a seed, in its folder. chance: right answers of a guess, in %."""

    problem: str
    model: str
    seed: int
    chance: float
    flags: dict[str, Any]
    folder: Path

    @property
    def command(self) -> list[str]:
        words = ["fairseq-train"]
        for flag, value in self.flags.items():
            words += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
        return words

    @property
    def finished(self) -> bool:
        path = self.folder / "finished"
        return path.exists() and path.read_text(encoding="utf-8") == shlex.join(self.command)

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """The updates and the percentage of right answers of every evaluation."""
        log = (self.folder / "train.log").read_text(encoding="utf-8")
        found = map(json.loads, re.findall(r"\| valid \| (\{.*\})$", log, re.MULTILINE))
        return [(int(values["valid_num_updates"]), float(values["valid_accuracy"])) for values in found]


def read_runs(conf: Path, out: Path) -> list[Run]:
    """The runs that a file asks for. Raises ValueError where it cannot be read or a problem names an unknown model."""
    try:
        plan = yaml.safe_load(conf.read_text(encoding="utf-8"))
        runs = []
        for problem, asked in plan["problems"].items():
            for model in asked["models"]:
                for seed in plan["seeds"]:
                    folder = out / problem / re.sub(r"[^\w.]+", "_", f"{model}-{seed}")
                    flags = ALWAYS | plan["common"] | asked["flags"] | plan["models"][model]
                    flags |= {"seed": seed, "save-dir": str(folder)}
                    runs.append(Run(problem, model, seed, asked["chance"], flags, folder))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{conf} must be like {HERE}/conf/quick.yaml, got {why}") from error
    return runs


def train(run: Run) -> None:
    """Train one model, unless that is done. Raises ValueError with the log's last line where it fails."""
    if run.finished:
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    tqdm.write("+ " + shlex.join(run.command), file=sys.stderr)
    path, finished = run.folder / "train.log", run.folder / "finished"
    finished.unlink(missing_ok=True)  # that of other flags
    with path.open("w", encoding="utf-8") as log:
        done = subprocess.run(run.command, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        last = path.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"{run.problem}, {run.model}: fairseq-train failed, see {path}: {last}")
    finished.write_text(shlex.join(run.command), encoding="utf-8")


def report(runs: list[Run], out: Path) -> None:
    """Write the evaluations of all finished runs, draw the last ones, and print them as Markdown."""
    runs = [run for run in runs if run.finished]
    if not runs:
        raise ValueError(f"no run has finished in {out}: begin with the stage train.")
    with (out / "accuracy.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["problem", "model", "seed", "updates", "accuracy"])
        writer.writerows([*run[:3], *evaluation] for run in runs for evaluation in run.evaluations)
    chances = {run.problem: run.chance for run in runs}
    last = [(run[:2], run.evaluations[-1][1]) for run in runs]
    found = {key: mean(value for other, value in last if other == key) for key, _ in last}
    names = list(dict.fromkeys(run.model for run in runs))
    rules = list(dict.fromkeys(map(rule_of, names)))
    models = sorted(names, key=lambda name: (rules.index(rule_of(name)), name))  # a rule and its options together
    draw(chances, models, found, out / "accuracy.png")
    print("| model |", " | ".join(chances), "|\n| --- |" + " ---: |" * len(chances))
    print("| a guess |", " | ".join(f"{chance:.1f}" for chance in chances.values()), "|")
    for model in models:
        cells = (f"{found[problem, model]:.1f}" if (problem, model) in found else "-" for problem in chances)
        print(f"| {model} |", " | ".join(cells), "|")


def rule_of(model: str) -> str:
    return model.partition(",")[0]


def draw(chances: dict[str, float], models: list[str], found: dict[tuple[str, str], float], picture: Path) -> None:
    """A panel for each problem: a bar for each model that it was given to, and a line at what a guess gets."""
    plt = load_pyplot()
    colour = colours(dict.fromkeys(map(rule_of, models)))
    models = models[::-1]  # the first above
    size = (2 + 2.6 * len(chances), 1 + 0.27 * len(models))
    figure, panels = plt.subplots(1, len(chances), figsize=size, squeeze=False, sharey=True)
    for panel, (problem, chance) in zip(panels[0], chances.items(), strict=True):
        values = [found.get((problem, model), math.nan) for model in models]
        bars = panel.barh(models, values, color=[colour[rule_of(model)] for model in models])
        panel.bar_label(bars, ["" if math.isnan(value) else f"{value:.0f}" for value in values], padding=2, fontsize=8)
        panel.axvline(chance, color=PUBLISHED, linestyle="--")
        panel.set(title=f"{problem} (dashed: a guess)", xlabel="right answers (%)", xlim=(0, 112))
        panel.grid(visible=False, axis="y")
    save(figure, picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="?", choices=["plan", "train", "report", "all"], default="all")
    parser.add_argument("--conf", type=Path, default=HERE / "conf" / "quick.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "sequence_problems")
    parser.add_argument("--workers", type=int, default=2, help="runs at once, each on one core (2)")
    args = parser.parse_args()
    try:
        if args.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {args.workers}.")
        runs = read_runs(args.conf, args.out)
        if args.stage == "plan":
            print("\n".join(shlex.join(run.command) for run in runs if not run.finished))
        if args.stage in ("train", "all"):
            with ThreadPoolExecutor(args.workers) as workers:
                list(tqdm(workers.map(train, runs), total=len(runs), desc="runs", disable=None))
        if args.stage in ("report", "all"):
            report(runs, args.out)
    except ValueError as error:
        sys.exit(f"problems.py: {error}")


if __name__ == "__main__":
    main()
