"""A training by fairseq-train: an interrupted one is resumed, a finished one is not repeated.

Its folder gets settings.txt (the flags), train.log and checkpoints. At its end it gets the file `trained`, with a
summary of the log, or `diverged`, with the place of a non-finite gradient.
"""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from arguments import ROOT
from commands import LOCKS, RecipeError, check_same, lock, show, write
from log import Progress, find_log

# Otherwise glibc gives the freed memory of an update on a CPU back to the system, and the next update fetches it again,
# page by page. torch asks for large pages.
MEMORY = {"MALLOC_TRIM_THRESHOLD_": "8589934592", "MALLOC_MMAP_MAX_": "0", "THP_MEM_ALLOC_ENABLE": "1"}
PLUGIN = ["--user-dir", str(ROOT / "fairseq_fwp")]
SAVING = ["--no-epoch-checkpoints", "--keep-interval-updates", "1", "--log-format", "json"]


def train(folder: Path, data: Path, flags: list[str]) -> None:
    """Train a model on the output of fairseq-preprocess. Raises RecipeError if training fails without diverging."""
    name = folder.name if not folder.name.startswith("seed_") else f"{folder.parent.name}, {folder.name}"
    diverged, done = folder / "diverged", folder / "trained"
    if any(path.exists() for path in (diverged, done, folder / "checkpoint_last.pt")):
        check_same(folder / "settings.txt", shlex.join(flags))
    trained = f"{folder / 'checkpoint_best.pt'}, train.log"
    if diverged.exists():
        print(f"{name} diverged before: {diverged.read_text(encoding='utf-8').strip()}.")
        return
    if done.exists():
        print(f"{name} is trained already: {trained}.")
        return
    lock(folder)
    write(folder / "settings.txt", shlex.join(flags) + "\n")
    # Flags of the command line come last, and so override others.
    command = [str(data), "--save-dir", str(folder), *SAVING, *(() if "--user-dir" in flags else PLUGIN), *flags]
    succeeded = fairseq_train(command, folder / "train.log", name)
    found = find_log(folder)
    if succeeded:
        write(done, f"{found.summary}\n" if found else "")
        print(f"{name} is trained: {trained}.")
    elif found and found.not_finite:
        write(diverged, found.divergence + "\n")  # a result: the other models are trained
        print(f"{name} diverged: {found.divergence}.")
    else:
        raise RecipeError(f"the training of {name} failed: see {folder / 'train.log'}.")


def follow(log: Path, start: int, process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the lines that a process adds to a log after its first `start` bytes, until it ends."""
    with log.open("rb") as file:
        file.seek(start)
        rest, ended = b"", False
        while not ended:
            ended = process.poll() is not None  # asked before the last lines are read
            *lines, rest = (rest + file.read()).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)
            if not ended:
                time.sleep(0.1)


def fairseq_train(flags: list[str], log: Path, label: str) -> bool:
    """Run fairseq-train, with $LAUNCH (torchrun, srun, ...) before it if set; append to its log; return its success."""
    command = ["fairseq-train", *flags]
    if launch := os.environ.get("LAUNCH"):
        command = [*shlex.split(launch), shutil.which("fairseq-train") or "fairseq-train", *flags]
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
        said = f"{label}: the training stopped early; its last lines are above."
        print(f"{progress.start}{''.join(last)}{said}", flush=True)
    return process.returncode == 0
