"""Run commands: each is printed first, and its files are complete or do not exist."""

import contextlib
import fcntl
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Otherwise a log file gets thousands of progress bars.
os.environ.setdefault("TQDM_MININTERVAL", "5")  # seconds


# Locked folders: the programs that run in them get the locks too, and keep them if this process is killed.
LOCKS: dict[Path, int] = {}


class RecipeError(Exception):
    """The reason why a recipe stops, in one sentence."""


class CommandError(RecipeError):
    """A command failed."""


def show(words: list[str]) -> None:
    """Print a command as for a shell."""
    print("+ " + shlex.join(words), file=sys.stderr, flush=True)


def run(*words: object, log: Path | None = None) -> None:
    """Print a command and run it; its output goes to `log` if given. Raises CommandError if it fails."""
    command = [str(word) for word in words]
    show(command)
    sys.stdout.flush()
    with open(log, "wb") if log else contextlib.nullcontext() as output:
        to = {"stdout": output, "stderr": output and subprocess.STDOUT}
        code = subprocess.run(command, **to, check=False, pass_fds=[*LOCKS.values()]).returncode
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2] if log else ""
        where = f": see {log}, which ends with {last!r}" if log else ""
        raise CommandError(f"{command[0]} failed (exit status {code}){where}.")


def lock(folder: Path) -> None:
    """Lock a folder while this process or a program that it has started runs; RecipeError if another one has it."""
    if folder in LOCKS:
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        other = f"another run, or a program that it has left behind, works in {folder}"
        raise RecipeError(f"{other}: wait for its end, or give another --out.") from None
    LOCKS[folder] = descriptor


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a path next to `path` and rename it to `path` at the end, so that `path` is always complete."""
    work = path.with_name(path.name + ".unfinished")
    if work.is_dir():
        shutil.rmtree(work)
    path.parent.mkdir(parents=True, exist_ok=True)
    yield work
    work.replace(path)


def write(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    with whole(path) as work:
        work.write_text(text, encoding="utf-8")


def check_same(file: Path, settings: str) -> None:
    """Check that the files next to `file` were made with these settings; raise RecipeError otherwise."""
    before, now = (_flags(text) for text in (file.read_text(encoding="utf-8"), settings))
    if differing := sorted(flag for flag in before.keys() | now.keys() if before.get(flag) != now.get(flag)):
        those = f", which differ in {', '.join(filter(None, differing))}" if any(differing) else ""
        raise RecipeError(
            f"{file.parent} was made with other settings (see {file}){those}: give another --out, or the same settings."
        )


def _flags(settings: str) -> dict[str, list[float | str]]:
    """Return the values of each flag, the last ones if it is given twice; words before all flags belong to "".

    Numbers are compared as such: 2e-5 equals 0.00002.
    """
    try:
        words = shlex.split(settings)
    except ValueError:  # an apostrophe in a path
        words = settings.split()
    values: list[float | str] = []
    found = {"": values}
    for word in words:
        if word.startswith("--"):
            values = found[word] = []
            continue
        values.append(word)
        with contextlib.suppress(ValueError):
            if math.isfinite(number := float(word)):
                values[-1] = number
    return found
