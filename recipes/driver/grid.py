"""Recipes of many small trainings: plan, train several at once, and report.

The folder of a training gets settings.txt (the flags) and train.log. At its end it gets `finished`, a summary of the
log, and its checkpoints are removed.
"""

import os

# One core each: more threads would only wait for each other. Set before torch reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing
import shlex
import signal
import sys
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from arguments import ROOT, Parser, whole_number
from commands import RecipeError, check_same, lock, write
from flags import refusal
from log import check_unchanged, find_log
from training import PLUGIN

STAGES = {
    "plan": "print the trainings that are not finished",
    "train": "run these trainings",
    "report": "write the tables and pictures of the finished trainings",
    "all": "train and report",
}


class Training(NamedTuple):
    """A small training: name, folder, flags of fairseq-train, and the entries of its grid, for the report."""

    name: str
    folder: Path
    flags: list[str]
    about: dict[str, Any]

    @property
    def command(self) -> list[str]:
        return ["fairseq-train", *PLUGIN, "--save-dir", str(self.folder), *self.flags]

    def is_finished(self) -> bool:
        """Return whether it is finished. Raises RecipeError for a changed log, and for other settings."""
        path = self.folder / "finished"
        if not path.exists():
            return False
        check_same(self.folder / "settings.txt", shlex.join(self.flags))
        check_unchanged(path)
        return True

    def run(self) -> None:
        """Become fairseq-train, whose output goes to train.log."""
        from fairseq_cli.train import cli_main

        for interruption in (signal.SIGINT, signal.SIGTERM):  # without a traceback
            signal.signal(interruption, signal.SIG_DFL)
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder / "settings.txt", shlex.join(self.flags) + "\n")
        descriptor = os.open(self.folder / "train.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = self.command
        print("+", shlex.join(sys.argv), flush=True)
        cli_main()

    def finish(self, status: int | None = 0) -> str:
        """Mark it as finished, without its checkpoints; return the summary of its log, empty if it failed."""
        found = find_log(self.folder)
        if not found or not (found.not_finite or (found.validations and not status)):
            return ""
        for checkpoint in self.folder.glob("*.pt"):
            checkpoint.unlink()
        write(self.folder / "finished", found.summary + "\n")
        return found.summary


class Grid:
    """The stages of a grid. A kind of recipe defines how to read and report trainings:

    read(conf): the trainings of a file, in the order of training. Raises RecipeError for another file.
    report(finished): write tables and pictures of these trainings.
    """

    def __init__(self, arguments: list[str]) -> None:
        parser = Parser(STAGES, "")
        grid = "file of a grid; may be repeated (default: conf/quick.yaml)"
        parser.add_argument("--conf", type=Path, metavar="YAML", action="append", help=grid)
        workers = "number of trainings at the same time (default: number of cores)"
        parser.add_argument("--workers", type=whole_number, default=os.cpu_count(), metavar="N", help=workers)
        args = parser.parse(arguments)
        if args.extra:
            raise RecipeError(f"flags must be those of --help, got {args.extra[0]}.")
        self.recipe, self.stage, self.workers = args.recipe, args.stage, args.workers
        self.out = args.out or ROOT / "runs" / args.recipe.name
        confs = args.conf or [args.recipe / "conf" / "quick.yaml"]
        # By name, so that a training of two grids is done once.
        self.trainings = [*{training.name: training for conf in confs for training in self.read(conf)}.values()]

    def main(self) -> None:
        if self.stage != "report":
            self.train(only_plan=self.stage == "plan")
        if self.stage in ("report", "all"):
            finished = [training for training in self.trainings if training.is_finished()]
            if not finished:
                raise RecipeError(f"{self.out} must have a finished training, got none: run the stage train first.")
            self.report(finished)
            if left := len(self.trainings) - len(finished):
                print(f"{left} of {len(self.trainings)} trainings are not finished; the stage plan names them.")

    def train(self, only_plan: bool) -> None:
        """Plan or train. Raises RecipeError if a training failed."""
        if not only_plan:
            lock(self.out)
        # Once, before processes start: it takes as long as some trainings; the format of the logs is its own.
        import fairseq_cli.train  # noqa: F401

        check(self.trainings)
        left = [training for training in self.trainings if not training.is_finished()]
        if only_plan:
            print(*(training.name for training in left), sep="\n")
        print(f"{len(left)} to train ({len(self.trainings) - len(left)} finished).", flush=True)
        if not only_plan and (failed := train_all(left, self.workers)):
            raise RecipeError(
                f"failed, see train.log in their folders in {self.out}: {'; '.join(failed)}. Give the same command to "
                "try them again, or the stage report to see the others."
            )


def check(trainings: list[Training]) -> None:
    """Parse flags as fairseq-train does, those with a value that none before had. Raises RecipeError if it refuses."""
    seen: set[tuple[str, str]] = set()
    for training in trainings:
        pairs = set(pairwise(training.flags))
        if not pairs <= seen and (reason := refusal(training.command[1:])):
            raise RecipeError(f"{training.name}: fairseq-train refuses its flags: {reason}")
        seen |= pairs


def train_all(trainings: list[Training], workers: int) -> list[str]:
    """Train all, `workers` at once, each in a process since fairseq changes global state; return those that failed."""
    from tqdm import tqdm

    waiting, running, failed = trainings[::-1], {}, []
    try:
        with tqdm(total=len(trainings), unit="training", smoothing=0) as bar:
            while waiting or running:
                while waiting and len(running) < workers:
                    training = waiting.pop()
                    process = multiprocessing.get_context("fork").Process(target=training.run)
                    process.start()
                    running[process.sentinel] = (process, training)
                for sentinel in wait(list(running)):
                    process, training = running.pop(sentinel)
                    process.join()
                    bar.update()
                    if said := training.finish(process.exitcode):
                        bar.write(f"{training.name}: {said}")
                    else:
                        failed.append(training.name)
    finally:
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()
    return failed
