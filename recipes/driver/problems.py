"""Small problems of state tracking and recall: train models, and report the share of right answers."""

import re
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import grid
from commands import RecipeError
from flags import as_flags, read_yaml
from log import read_training
from tables import markdown, save
from training import Training

ALWAYS = {
    "task": "fwp_sequence_problems",
    "criterion": "label_smoothed_cross_entropy",
    "report-accuracy": True,
    "num-workers": 0,
    "no-save": True,
    "log-format": "json",
    "log-interval": 100,
}


class Run(NamedTuple):
    """One training: a model on a problem with a seed. chance: right answers of a guess, in %."""

    problem: str
    model: str
    seed: int
    chance: float
    training: Training

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """The updates and the percentage of right answers of every evaluation."""
        return read_training(self.training.folder / "train.log").curve("accuracy")


def read_runs(conf: Path, out: Path) -> list[Run]:
    """Return the runs of a file. Raises RecipeError if it is damaged or names an unknown model."""
    try:
        plan, runs = read_yaml(conf, plain=False), []
        for problem, asked in plan["problems"].items():
            for model in asked["models"]:
                for seed in plan["seeds"]:
                    name = re.sub(r"[^\w.]+", "_", f"{model}-{seed}")
                    flags = ALWAYS | plan["common"] | asked["flags"] | plan["models"][model] | {"seed": seed}
                    training = Training(f"{problem}/{name}", out / problem / name, as_flags(flags))
                    runs.append(Run(problem, model, seed, asked["chance"], training))
    except (KeyError, TypeError, AttributeError) as error:
        raise RecipeError(f"{conf} must be like conf/quick.yaml, got {type(error).__name__}: {error}.") from error
    return runs


def report(runs: list[Run], out: Path) -> None:
    """Write the evaluations of all finished runs, and a table of the last ones."""
    runs = [run for run in runs if run.training.is_finished()]
    if not runs:
        raise RecipeError(f"{out} must have a finished run, got none: run the stage train first.")
    heads = ("problem", "model", "seed", "updates", "accuracy")
    rows = [dict(zip(heads, (*run[:3], *found), strict=True)) for run in runs for found in run.evaluations]
    chances = {run.problem: run.chance for run in runs}
    last = [(run[:2], run.evaluations[-1][1]) for run in runs]
    found = {key: mean(value for other, value in last if other == key) for key, _ in last}
    names = list(dict.fromkeys(run.model for run in runs))
    rules = list(dict.fromkeys(map(rule_of, names)))
    models = sorted(names, key=lambda name: (rules.index(rule_of(name)), name))  # a rule and its options together
    cells = [["a guess", *(f"{chance:.1f}" for chance in chances.values())]]
    for model in models:
        shown = (f"{found[problem, model]:.1f}" if (problem, model) in found else "-" for problem in chances)
        cells.append([model, *shown])
    save(out, "accuracy", rows, markdown(["model", *chances], cells))


def rule_of(model: str) -> str:
    return model.partition(",")[0]


def read(confs: list[Path], recipe: Path, out: Path) -> grid.Grid:
    """Return the grid of a file."""
    runs = read_runs(confs[0], out)
    return grid.Grid([run.training for run in runs], lambda: report(runs, out))


def main(arguments: list[str]) -> None:
    grid.main(arguments, read, help="file of a grid (default: conf/quick.yaml)")
