"""Many small trainings, several at once, each by fairseq-train in a separate process.

Finished trainings are not run again, and interrupted ones continue from their last checkpoint. Each training has a
folder with train.log and, at the end, the file `finished`, a summary of the log.
"""

import os

# One core each: more threads would only wait for each other. Set before torch reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import fcntl
import logging
import math
import multiprocessing
import shlex
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import log
from arguments import Parser, whole_number
from commands import RecipeError, check_same, write
from training import PLUGIN

REMOVE = "remove the folder to train it again."
STAGES = {
    "plan": "print the trainings that are not finished, and how long they take",
    "train": "run these trainings",
    "report": "write the tables and pictures of the finished trainings",
    "all": "train and report",
}


class Training(NamedTuple):
    """One training: its name, folder, flags of fairseq-train, and an upper estimate of its seconds on one core."""

    name: str
    folder: Path
    flags: list[str]
    seconds: float | None = None

    @property
    def command(self) -> list[str]:
        return ["fairseq-train", *PLUGIN, "--save-dir", str(self.folder), *self.flags]


def parser(add_flags: Callable[[argparse.ArgumentParser], object]) -> Parser:
    found = Parser(STAGES, "")
    add_flags(found)
    found.add_argument(
        "--workers",
        type=whole_number,
        default=os.cpu_count(),
        metavar="N",
        help="number of trainings at the same time (default: number of cores)",
    )
    return found


def stages(args: argparse.Namespace, trainings: list[Training], out: Path, check: Callable[[], None]) -> None:
    """Plan or train. Raises RecipeError for unknown flags, and if a training failed."""
    if args.extra:
        raise RecipeError(f"flags must be those of --help, got {args.extra[0]}.")
    if args.stage == "report":
        return
    if args.stage != "plan":
        lock(out)
    import_fairseq()
    check()
    left = [training for training in trainings if not is_finished(training)]
    if args.stage == "plan":
        print(*(training.name for training in left), sep="\n")
    print(plan(left, len(trainings) - len(left), args.workers), flush=True)
    if args.stage != "plan" and (failed := run(left, args.workers)):
        raise RecipeError(
            f"failed, see train.log in their folders in {out}: {'; '.join(failed)}. Give the same command to try them "
            "again, or the stage report to see the others."
        )


def import_fairseq() -> None:
    """Import fairseq once, before processes start: it takes as long as some trainings."""
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(
        logging.WARNING
    )  # recommends a package that is not needed
    import fairseq_cli.train  # noqa: F401  (before all of fairseq: the format of the logs is its own)
    from fairseq.utils import import_user_module

    # Every training uses this path: fairseq refuses a second one, such as that in site-packages.
    import_user_module(argparse.Namespace(user_dir=PLUGIN[1]))


def read_log(folder: Path) -> log.Training | None:
    """Return the content of a log; None if it ends before its model. Raises RecipeError for a damaged one."""
    path = folder / "train.log"
    if not path.exists() or not log.PARAMETERS.search(path.read_text(encoding="utf-8", errors="replace")):
        return None
    return log.read_training(path)


def summary(found: log.Training) -> str:
    """Return the text of the file `finished`."""
    curve = found.curve("loss")
    return f"best loss {found.best('loss')}, {curve[-1][0] if curve else 0} updates"


def counts(found: log.Training | None) -> bool:
    """Return whether a finished training can have this log."""
    return found is not None and (bool(found.validations) or found.not_finite)


def is_finished(training: Training) -> bool:
    """Return whether a training is finished. Raises RecipeError for a changed log, and for other settings."""
    path, settings = training.folder / "finished", training.folder / "settings.txt"
    if not path.exists():
        return False
    told = path.read_text(encoding="utf-8").strip()
    if told.startswith("fairseq-train "):  # as earlier versions left it
        return told == shlex.join(training.command)
    if settings.exists():
        check_same(settings, shlex.join(training.flags))
    found = read_log(training.folder)
    if found is None or not counts(found) or told not in ("", summary(found)):  # empty: as earlier versions left it
        has = summary(found) if found else "no result"
        raise RecipeError(
            f"train.log in {training.folder} has changed since the training finished: the result was "
            f"{told or 'not recorded'}, and now it is {has}; {REMOVE}"
        )
    return True


def train(training: Training) -> None:
    """Run fairseq-train in a separate process, since fairseq changes global state; its output goes to train.log."""
    from fairseq_cli.train import cli_main

    for interruption in (signal.SIGINT, signal.SIGTERM):  # without a traceback
        signal.signal(interruption, signal.SIG_DFL)
    training.folder.mkdir(parents=True, exist_ok=True)
    write(training.folder / "settings.txt", shlex.join(training.flags) + "\n")
    descriptor = os.open(training.folder / "train.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = training.command
    print("+", shlex.join(sys.argv), flush=True)
    cli_main()


def run(trainings: list[Training], workers: int) -> list[str]:
    """Train all, `workers` at once; return the names of those that failed."""
    from tqdm import tqdm

    waiting, running, failed = list(reversed(trainings)), {}, []
    try:
        with tqdm(total=len(trainings), unit="training", smoothing=0) as bar:
            while waiting or running:
                while waiting and len(running) < workers:
                    training = waiting.pop()
                    process = multiprocessing.get_context("fork").Process(target=train, args=(training,))
                    process.start()
                    running[process.sentinel] = (process, training)
                for sentinel in wait(list(running)):
                    process, training = running.pop(sentinel)
                    process.join()
                    bar.update()
                    found = read_log(training.folder)
                    if found and counts(found) and (not process.exitcode or found.not_finite):
                        finish(training.folder, found)
                        bar.write(f"{training.name}: {summary(found)}, {found.seconds:.0f} s")
                    else:
                        failed.append(training.name)
    finally:
        children = multiprocessing.active_children()
        for child in children:
            child.terminate()
        for child in children:
            child.join()
    return failed


def finish(folder: Path, found: log.Training) -> None:
    """Mark a training as finished, and remove its checkpoints: only its log is needed."""
    for checkpoint in folder.glob("*.pt"):
        checkpoint.unlink()
    write(folder / "finished", summary(found) + "\n")


def lock(out: Path) -> None:
    """Lock a folder against other grids while this process or one of its trainings runs.

    Raises RecipeError if another grid runs.
    """
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecipeError(f"another grid runs in {out}: wait for its end, or give another --out.") from None


def plan(left: list[Training], done: int, workers: int) -> str:
    """Return the number of trainings left, and their cost if known, in words."""
    said = f"{len(left)} to train ({done} finished)"
    if None in (training.seconds for training in left):
        return said + "."
    seconds = sum(training.seconds or 0 for training in left)
    return (
        f"{said}: at most about {duration(seconds)} of a core, {duration(seconds / workers)} with {workers} at once, "
        "if seconds-per-key of the grid holds here (conf/: on an AMD EPYC, Zen 4)."
    )


def duration(seconds: float) -> str:
    """Return a time in words."""
    return f"{seconds / 60:,.0f} minutes" if seconds >= 120 else f"{math.ceil(seconds)} s"
