"""Recipes of many small trainings: plan, train several at once, and report."""

import os

# One core each: more threads would only wait for each other. Set before torch reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fcntl
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from arguments import ROOT, Parser, whole_number
from commands import RecipeError
from flags import refusal
from training import Training, import_fairseq, train_all

STAGES = {
    "plan": "print the trainings that are not finished",
    "train": "run these trainings",
    "report": "write the tables and pictures of the finished trainings",
    "all": "train and report",
}


class Grid(NamedTuple):
    """A recipe's trainings, and the function that reports them."""

    trainings: list[Training]
    report: Callable[[], None]


def main(arguments: list[str], read: Callable[[list[Path], Path, Path], Grid], **conf: Any) -> None:
    """Run a recipe. read(files, recipe, out) returns its grid; conf: how argparse reads --conf."""
    parser = Parser(STAGES, "")
    parser.add_argument("--conf", type=Path, metavar="YAML", **conf)
    parser.add_argument(
        "--workers",
        type=whole_number,
        default=os.cpu_count(),
        metavar="N",
        help="number of trainings at the same time (default: number of cores)",
    )
    args = parser.parse(arguments)
    if args.extra:
        raise RecipeError(f"flags must be those of --help, got {args.extra[0]}.")
    out = args.out or ROOT / "runs" / args.recipe.name
    confs = args.conf or args.recipe / "conf" / "quick.yaml"
    grid = read(confs if isinstance(confs, list) else [confs], args.recipe, out)
    if args.stage != "report":
        train(grid.trainings, out, args.workers, only_plan=args.stage == "plan")
    if args.stage in ("report", "all"):
        grid.report()


def train(trainings: list[Training], out: Path, workers: int, only_plan: bool) -> None:
    """Plan or train. Raises RecipeError if a training failed."""
    if not only_plan:
        lock(out)
    import_fairseq()
    check(trainings)
    left = [training for training in trainings if not training.is_finished()]
    if only_plan:
        print(*(training.name for training in left), sep="\n")
    print(f"{len(left)} to train ({len(trainings) - len(left)} finished).", flush=True)
    if not only_plan and (failed := train_all(left, workers)):
        raise RecipeError(
            f"failed, see train.log in their folders in {out}: {'; '.join(failed)}. Give the same command to try them "
            "again, or the stage report to see the others."
        )


def check(trainings: list[Training]) -> None:
    """Parse flags as fairseq-train does, those with a value that none before had. Raises RecipeError if it refuses."""
    seen: set[tuple[str, str]] = set()
    for training in trainings:
        pairs = set(pairwise(training.flags))
        if not pairs <= seen and (reason := refusal(training.command[1:])):
            raise RecipeError(f"{training.name}: fairseq-train refuses its flags: {reason}")
        seen |= pairs


def lock(out: Path) -> None:
    """Lock a folder against other grids while this process or one of its trainings runs; RecipeError if it is."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecipeError(f"another grid runs in {out}: wait for its end, or give another --out.") from None
