"""Trainings by fairseq-train, each in a process: interrupted ones are resumed, finished ones are not repeated.

A folder gets settings.txt (the flags), train.log and checkpoints. At its end a model gets the file `trained`, or
`diverged` with the place of a non-finite gradient. A small training, of which only the log is needed, gets `finished`
with a summary of the log, and its checkpoints are removed.
"""

import argparse
import logging
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from arguments import ROOT
from commands import RecipeError, check_same, show, write
from log import Log, Progress, find_log

# Otherwise glibc gives the freed memory of an update on a CPU back to the system, and the next update fetches it again,
# page by page. torch asks for large pages.
MEMORY = {"MALLOC_TRIM_THRESHOLD_": "8589934592", "MALLOC_MMAP_MAX_": "0", "THP_MEM_ALLOC_ENABLE": "1"}
PLUGIN = ["--user-dir", str(ROOT / "fairseq_fwp")]
SAVING = ["--no-epoch-checkpoints", "--keep-interval-updates", "1", "--log-format", "json"]


# A model.


def train(folder: Path, data: Path, flags: list[str]) -> None:
    """Train a model on the output of fairseq-preprocess. Raises RecipeError if training fails without diverging."""
    name = folder.name if not folder.name.startswith("seed_") else f"{folder.parent.name}, {folder.name}"
    ended = next((mark for mark in ("diverged", "trained") if (folder / mark).exists()), "")
    if ended or (folder / "checkpoint_last.pt").exists():
        check_same(folder / "settings.txt", shlex.join(flags))
    trained = f"{folder / 'checkpoint_best.pt'}, train.log"
    if ended == "diverged":
        print(f"{name} diverged before: {(folder / ended).read_text(encoding='utf-8').strip()}.")
    elif ended:
        print(f"{name} is trained already: {trained}.")
    if ended:
        return
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "settings.txt", shlex.join(flags) + "\n")
    # Flags of the command line come last, and so override others.
    command = [str(data), "--save-dir", str(folder), *SAVING, *(() if "--user-dir" in flags else PLUGIN), *flags]
    if fairseq_train(command, folder / "train.log", name):
        (folder / "trained").touch()
        print(f"{name} is trained: {trained}.")
    elif (found := find_log(folder)) and found.not_finite:
        write(folder / "diverged", found.divergence + "\n")  # a result: the other models are trained
        print(f"{name} diverged: {found.divergence}.")
    else:
        raise RecipeError(f"the training of {name} failed: see {folder / 'train.log'}.")


def fairseq_train(flags: list[str], log: Path, label: str) -> bool:
    """Run fairseq-train, with $LAUNCH (torchrun, srun, ...) before it if set; append to its log; return its success."""
    command = ["fairseq-train", *flags]
    if launch := os.environ.get("LAUNCH"):
        command = [*shlex.split(launch), shutil.which("fairseq-train") or "fairseq-train", *flags]
    show(command)
    progress, pipe = Progress(label), {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with log.open("a", encoding="utf-8") as file:
        file.write("+ " + shlex.join(command) + "\n")
        file.flush()
        with subprocess.Popen(command, env=MEMORY | os.environ, **pipe, encoding="utf-8", errors="replace") as process:
            try:
                for line in process.stdout or ():
                    file.write(line)
                    file.flush()
                    progress.read(line)
            except BaseException:
                process.send_signal(signal.SIGTERM)
                process.wait()
                raise
    progress.end()
    return process.returncode == 0


# Many small trainings.


class Training(NamedTuple):
    """A small training: name, folder, flags of fairseq-train."""

    name: str
    folder: Path
    flags: list[str]

    @property
    def command(self) -> list[str]:
        return ["fairseq-train", *PLUGIN, "--save-dir", str(self.folder), *self.flags]

    def is_finished(self) -> bool:
        """Return whether it is finished. Raises RecipeError for a changed log, and for other settings."""
        path, settings = self.folder / "finished", self.folder / "settings.txt"
        if not path.exists():
            return False
        told = path.read_text(encoding="utf-8").strip()
        if told.startswith("fairseq-train "):  # as earlier versions left it
            return told == shlex.join(self.command)
        if settings.exists():
            check_same(settings, shlex.join(self.flags))
        has = summary(find_log(self.folder))
        if not has or told not in ("", has):  # empty: as earlier versions left it
            raise RecipeError(
                f"train.log in {self.folder} has changed since the training finished: the result was "
                f"{told or 'not recorded'}, and now it is {has or 'no result'}; remove the folder to train it again."
            )
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
        """Mark it as finished, without its checkpoints; return the summary, empty if it failed."""
        found = find_log(self.folder)
        said = summary(found)
        if not said or (status and not (found and found.not_finite)):
            return ""
        for checkpoint in self.folder.glob("*.pt"):
            checkpoint.unlink()
        write(self.folder / "finished", said + "\n")
        return said


def summary(found: Log | None) -> str:
    """Return the best loss and the updates of a log, in words; empty if no finished training can have this log."""
    if found is None or not (found.validations or found.not_finite):
        return ""
    curve = found.curve("loss")
    return f"best loss {found.best('loss')}, {curve[-1][0] if curve else 0} updates"


def import_fairseq() -> None:
    """Import fairseq once, before processes start: it takes as long as some trainings."""
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # advises a package that is not needed
    import fairseq_cli.train  # noqa: F401  (before all of fairseq: the format of the logs is its own)
    from fairseq.utils import import_user_module

    # Every training uses this path: fairseq refuses a second one, such as that in site-packages.
    import_user_module(argparse.Namespace(user_dir=PLUGIN[1]))


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
        children = multiprocessing.active_children()
        for child in children:
            child.terminate()
        for child in children:
            child.join()
    return failed
