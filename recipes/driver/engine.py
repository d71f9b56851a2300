"""The trainings of a recipe by fairseq-train: one at a time with its progress, or many small ones at once.

The folder of a training gets settings.txt (the flags), train.log and checkpoints. At its end it gets the file
`trained`, with a summary of the log, or `diverged`, with the reason. An interrupted training is resumed, an ended one
is not repeated.
"""

import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from arguments import ROOT
from commands import LOCKS, RecipeError, check_same, lock, show, write
from data.prepare import known_as
from flags import value_of
from log import Outcome, Progress, check_unchanged, find_log, read_outcome

# Otherwise glibc gives the freed memory of an update on a CPU back to the system, and the next update fetches it again,
# page by page. torch asks for large pages.
MEMORY = {"MALLOC_TRIM_THRESHOLD_": "8589934592", "MALLOC_MMAP_MAX_": "0", "THP_MEM_ALLOC_ENABLE": "1"}
PLUGIN = ["--user-dir", str(ROOT / "fairseq_fwp")]
CODE = "user_dir.txt"  # what the files of a plug-in were when the training began
SAVING = ["--no-epoch-checkpoints", "--keep-interval-updates", "1", "--log-format", "json"]


class Training(NamedTuple):
    """A training: its name in messages, its folder, and the flags of fairseq-train that define it.

    data: the output of fairseq-preprocess. A training without it is small: its task makes the data, its flags say how
    it is saved, and at its end its checkpoints are removed. about: the entries of its grid, for the report.
    """

    name: str
    folder: Path
    flags: list[str]
    data: Path | None = None
    about: Mapping[str, Any] = MappingProxyType({})

    @property
    def command(self) -> list[str]:
        """The command; flags that come later override others."""
        data, saving = ([str(self.data)], SAVING) if self.data else ([], [])
        plugin = [] if "--user-dir" in self.flags else PLUGIN
        return ["fairseq-train", *data, "--save-dir", str(self.folder), *saving, *plugin, *self.flags]

    @property
    def settings(self) -> str:
        return shlex.join(self.flags)

    def outcome(self) -> Outcome | None:
        """Return how it ended; None if it has not. Raises RecipeError if it was begun with other settings."""
        ended = read_outcome(self.folder)
        if ended or (self.folder / "checkpoint_last.pt").exists():
            check_same(self.folder / "settings.txt", self.settings)
            if (noted := self.folder / CODE).exists() and noted.read_text(encoding="utf-8") != self.code:
                print(f"{self.name}: files of its --user-dir have changed: remove {self.folder} to train it again.")
        return ended

    @property
    def code(self) -> str:
        """What identifies the Python files of --user-dir that can be read; empty without one."""
        plugin = value_of(self.flags, "--user-dir")
        files = sorted(Path(plugin).rglob("*.py")) if plugin else []
        return known_as(*(file for file in files if file.is_file() and os.access(file, os.R_OK)))

    def write_settings(self) -> None:
        write(self.folder / "settings.txt", self.settings + "\n")
        if (code := self.code) and not (self.folder / "checkpoint_last.pt").exists():
            write(self.folder / CODE, code)

    def end(self, succeeded: bool) -> Outcome | None:
        """Mark it as trained or diverged; None if it failed for another reason: then it can be tried again."""
        log = find_log(self.folder)
        if log and (log.not_finite or (succeeded and log.divergence)):
            outcome = Outcome("diverged", log.divergence)
        elif succeeded and (self.data or (log and log.validations)):  # the report of a small one reads validations
            outcome = Outcome("trained", log.summary if log else "")
        else:
            return None
        for checkpoint in self.folder.glob("*.pt") if not self.data else ():
            checkpoint.unlink()
        write(self.folder / outcome.mark, f"{outcome.words}\n" if outcome.words else "")
        return outcome

    def become(self) -> None:
        """Become fairseq-train, in a process of its own, whose output goes to train.log."""
        from fairseq_cli.train import cli_main

        for interruption in (signal.SIGINT, signal.SIGTERM):  # without a traceback
            signal.signal(interruption, signal.SIG_DFL)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_settings()
        descriptor = os.open(self.folder / "train.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = self.command
        print("+", shlex.join(sys.argv), flush=True)
        cli_main()


# One training, with its progress.


def train(training: Training) -> None:
    """Train a model, unless it has ended. Raises RecipeError if training fails without diverging."""
    name, files = training.name, f"{training.folder / 'checkpoint_best.pt'}, train.log"
    if before := training.outcome():
        words = f"diverged before: {before.words}." if before.diverged else f"is trained already: {files}."
        print(f"{name} {words}")
        return
    lock(training.folder)
    training.write_settings()
    log = training.folder / "train.log"
    outcome = training.end(run(training.command, log, name))
    if outcome is None:
        raise RecipeError(f"the training of {name} failed: see {log}.")
    # A divergence is a result: the other models are trained.
    print(f"{name} diverged: {outcome.words}." if outcome.diverged else f"{name} is trained: {files}.")


def run(command: list[str], log: Path, label: str) -> bool:
    """Run fairseq-train, with $LAUNCH (torchrun, srun, ...) before it if set; append to its log; return its success."""
    if launch := os.environ.get("LAUNCH"):
        program, *flags = command
        command = [*shlex.split(launch), shutil.which(program) or program, *flags]
    show(command)
    progress, locks = Progress(label), {"pass_fds": [*LOCKS.values()]}
    with log.open("a", encoding="utf-8") as file:
        file.write("+ " + shlex.join(command) + "\n")
        file.flush()
        # The training writes the log itself: if this process is killed, the training may go on, and its log too.
        to = {"stdout": file, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, env=MEMORY | os.environ, **to, **locks) as process:
            try:
                for line in follow(log, file.tell(), process):
                    progress.read(line)
            except BaseException:
                process.send_signal(signal.SIGTERM)
                process.wait()
                raise
    if process.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)[-15:]
        stopped = f"{label}: the training stopped early; its last lines are above."
        print(f"{progress.start}{''.join(last)}{stopped}", flush=True)
    return process.returncode == 0


def follow(log: Path, start: int, process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the lines that a process adds to a log after its first `start` bytes, until it ends."""
    with log.open("rb") as file:
        file.seek(start)
        unfinished, ended = b"", False
        while not ended:
            ended = process.poll() is not None  # asked before the last lines are read
            *lines, unfinished = (unfinished + file.read()).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)
            if not ended:
                time.sleep(0.1)


# Many small trainings.


def has_ended(training: Training) -> bool:
    """Return whether a small training has ended. Raises RecipeError for other settings, and for a changed log."""
    ended = training.outcome()
    if ended:
        check_unchanged(training.folder)
    return ended is not None


def train_all(trainings: list[Training], workers: int) -> list[str]:
    """Train all, `workers` at once, each in a process since fairseq changes global state; return those that failed."""
    from tqdm import tqdm

    waiting, running, failed = trainings[::-1], {}, []
    try:
        with tqdm(total=len(trainings), unit="training", smoothing=0) as bar:
            while waiting or running:
                while waiting and len(running) < workers:
                    training = waiting.pop()
                    process = multiprocessing.get_context("fork").Process(target=training.become)
                    process.start()
                    running[process.sentinel] = (process, training)
                for sentinel in wait(list(running)):
                    process, training = running.pop(sentinel)
                    process.join()
                    bar.update()
                    if outcome := training.end(process.exitcode == 0):
                        bar.write(f"{training.name}: {outcome.words}")
                    else:
                        failed.append(training.name)
    finally:
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()
    return failed
