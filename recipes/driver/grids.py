"""Recipes of many small trainings: plan, train several at once, and report.

They are grids of associative retrieval, with the paper's Figures 2 to 5, and problems of state tracking and recall.
"""

import os

# One core each: more threads would only wait for each other. Set before torch reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import figures
import pictures
from arguments import ROOT, Parser, positive
from commands import RecipeError, lock
from engine import Training, has_ended, train_all
from flags import as_flags, read_yaml, refusal, shaped
from log import read_training
from tables import markdown, save, show

STAGES = {
    "plan": "print the trainings that are not finished",
    "train": "run these trainings",
    "report": "write the tables and pictures of the finished trainings",
    "all": "train and report",
}
# An interrupted training repeats at most 5 epochs.
SAVING = ["--save-interval", "5", "--no-epoch-checkpoints"]
LOGGING = ["--log-format", "json", "--log-interval", "1000000"]
ALWAYS = {
    "task": "fwp_sequence_problems",
    "criterion": "label_smoothed_cross_entropy",
    "report-accuracy": True,
    "num-workers": 0,
    "no-save": True,
    "log-format": "json",
    "log-interval": 100,
}
# (file of a grid, recipe, out) -> its trainings, in their order. Raises RecipeError for another file.
Read = Callable[[Path, Path, Path], Iterable[Training]]
# Write the tables and pictures of finished trainings of a recipe into the folder out: (finished, recipe, out).
Report = Callable[[list[Training], Path, Path], None]


class Grid(NamedTuple):
    """The trainings of a grid, and what is asked of it."""

    stage: str
    recipe: Path
    out: Path
    workers: int
    trainings: Sequence[Training]
    report: Report

    def run(self) -> None:
        """Run the stage that is asked for, or all."""
        if self.stage != "report":
            self.train(only_plan=self.stage == "plan")
        if self.stage in ("report", "all"):
            finished = [training for training in self.trainings if has_ended(training)]
            if not finished:
                raise RecipeError(f"{self.out} must have a finished training, got none: run the stage train first.")
            self.report(finished, self.recipe, self.out)
            if left := len(self.trainings) - len(finished):
                print(f"{left} of {len(self.trainings)} trainings are not finished; the stage plan names them.")

    def train(self, only_plan: bool) -> None:
        """Plan or train. Raises RecipeError if a training failed."""
        if not only_plan:
            lock(self.out)
        # Once, before processes start: it takes as long as some trainings; the format of the logs is its own.
        import fairseq_cli.train  # noqa: F401

        check(self.trainings)
        left = [training for training in self.trainings if not has_ended(training)]
        if only_plan:
            print(*(training.name for training in left), sep="\n")
        print(f"{len(left)} to train ({len(self.trainings) - len(left)} finished).", flush=True)
        if not only_plan and (failed := train_all(left, self.workers)):
            raise RecipeError(
                f"failed, see train.log in their folders in {self.out}: {'; '.join(failed)}. Give the same command to "
                "try them again, or the stage report to see the others."
            )


def compose(read: Read, report: Report, arguments: list[str]) -> Grid:
    """Return the grid that a command line asks for, of a kind that reads and reports trainings."""
    parser = Parser(STAGES, "")
    grid = "file of a grid; may be repeated (default: conf/quick.yaml)"
    parser.add_argument("--conf", type=Path, metavar="YAML", action="append", help=grid)
    workers = "number of trainings at the same time (default: number of cores)"
    parser.add_argument("--workers", type=positive, default=os.cpu_count(), metavar="N", help=workers)
    args = parser.parse(arguments)
    if args.extra:
        raise RecipeError(f"flags must be those of --help, got {args.extra[0]}.")
    out = args.out or ROOT / "runs" / args.recipe.name
    confs = args.conf or [args.recipe / "conf" / "quick.yaml"]
    # By name, so that a training of two grids is done once.
    trainings = {training.name: training for conf in confs for training in read(conf, args.recipe, out)}
    return Grid(args.stage, args.recipe, out, args.workers, [*trainings.values()], report)


def check(trainings: Sequence[Training]) -> None:
    """Parse flags as fairseq-train does, those with a value that none before had. Raises RecipeError if it refuses."""
    seen: set[tuple[str, str]] = set()
    for training in trainings:
        pairs = set(pairwise(training.flags))
        if not pairs <= seen and (reason := refusal(training.command[1:])):
            raise RecipeError(f"{training.name}: fairseq-train refuses its flags: {reason}")
        seen |= pairs


# Associative retrieval.


def read_retrieval(conf: Path, recipe: Path, out: Path) -> Iterator[Training]:
    """Yield a training for every combination of the lists of an entry."""
    common, entries = read_yaml(recipe / "conf" / "common.yaml"), read_yaml(conf)
    if not isinstance(entries, list) or not entries:
        kind = "a mapping" if isinstance(entries, dict) else "one value" if entries else "nothing"
        raise RecipeError(f"{conf} must be a list of entries, as in conf/quick.yaml, got {kind}.")
    for index, entry in enumerate(entries, 1):
        try:
            for point in combinations(entry):
                others = (f"{flag}={value}" for flag, value in point.items() if flag != "arch")
                name = re.sub(r"[\s/]+", "_", ",".join([point["arch"], *others]))  # of a folder
                flags = [*SAVING, *as_flags(common | point), *LOGGING]
                yield Training(name, out / name, flags, about=point)
        except ValueError as error:
            raise RecipeError(f"{conf}, entry {index}: {error}") from None


def combinations(entry: Any) -> list[dict[str, str]]:
    """Return the points of an entry. Raises ValueError unless every flag has a value or a list of values."""
    if not isinstance(entry, dict):
        raise ValueError(f"it must have flags and their values, got {entry!r}")
    for flag in ("arch", "num-keys"):
        if flag not in entry:
            raise ValueError(f"it must have {flag}, got only {', '.join(entry)}")
    flags = {flag: value if isinstance(value, list) else [value] for flag, value in entry.items()}
    for flag, values in flags.items():
        if not values or not all(isinstance(value, str) and value for value in values):
            raise ValueError(f"{flag} must be a value or a list of values, got {entry[flag]!r}")
    flags["num-keys"] = flags.pop("num-keys")  # last: sizes vary fastest
    for size in flags["num-keys"]:
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"num-keys must be a positive integer, got {size!r}")
    return [dict(zip(flags, values, strict=True)) for values in product(*flags.values())]


# Small problems of state tracking and recall.


def read_problems(conf: Path, recipe: Path, out: Path) -> Iterator[Training]:
    """Yield the trainings of models on problems.

    chance of a problem: right answers of a guess, in %. measure: "accuracy", of answers, the default; or "whole", of
    sequences with no wrong one, for which the criterion must be fwp_answers.
    """
    plan = read_yaml(conf, plain=False)
    with shaped(conf, "conf/quick.yaml"):
        for problem, asked in plan["problems"].items():
            for model, seed in product(asked["models"], plan["seeds"]):
                name = "/".join(re.sub(r"[^\w.]+", "_", part) for part in (problem, f"{model}-{seed}"))
                flags = ALWAYS | plan["common"] | asked["flags"] | plan["models"][model] | {"seed": seed}
                about = {"problem": problem, "model": model, "seed": seed, "chance": asked["chance"]}
                about["measure"] = asked.get("measure", "accuracy")
                yield Training(name, out / name, as_flags(flags), about=about)


def report_problems(finished: list[Training], recipe: Path, out: Path) -> None:
    """Write all evaluations, and a table and a picture of the means of the last ones."""
    rows, last = [], {}
    for training in finished:
        about = {head: training.about[head] for head in ("problem", "model", "seed")}
        validations = read_training(training.folder / "train.log").validations
        for found in validations:
            shares = {share: found.get(share, "") for share in ("accuracy", "whole")}
            rows.append(about | {"updates": int(found["num_updates"]), **shares})
        measured = validations[-1][training.about["measure"]]
        last.setdefault((about["problem"], about["model"]), []).append(measured)
    asked = {training.about["problem"]: training.about for training in finished}
    heads = [problem if about["measure"] == "accuracy" else f"{problem}, whole" for problem, about in asked.items()]
    names = list(dict.fromkeys(training.about["model"] for training in finished))
    rules = [name.partition(",")[0] for name in names]
    # A rule and its options together.
    names.sort(key=lambda name: (rules.index(name.partition(",")[0]), name))
    shares = {"a guess": [about["chance"] for about in asked.values()]}
    for name in names:
        shares[name] = [mean(last[problem, name]) if (problem, name) in last else None for problem in asked]
    lines = markdown(["model", *heads], [[name, *(show(share, 1) for share in row)] for name, row in shares.items()])
    pictures.draw_shares(heads, shares, out / "accuracy.png")
    save(out, "accuracy", rows, lines, "accuracy.png")


retrieval = partial(compose, read_retrieval, figures.write)
problems = partial(compose, read_problems, report_problems)
