"""Run commands: each is printed first, and what it makes counts only once it is whole."""

import contextlib
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# A log file would get thousands of progress bars.
os.environ.setdefault("TQDM_MININTERVAL", "5")  # seconds


class RecipeError(Exception):
    """Why a recipe stops, in one sentence."""


def show(words: list[str]) -> None:
    """Print a command as it could be typed."""
    print("+ " + shlex.join(words), file=sys.stderr, flush=True)


def run(*words: object, log: Path | None = None) -> None:
    """Print a command and run it. What it says goes to `log`, if that is given. Raises RecipeError where it fails."""
    command = [str(word) for word in words]
    show(command)
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("wb"))
        code = subprocess.run(command, stdout=output, stderr=output and subprocess.STDOUT, check=False).returncode
    if code:
        last = "" if log is None else f": see {log}, which ends with {last_line(log)!r}"
        raise RecipeError(f"{command[0]} failed (exit status {code}){last}.")


def last_line(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a place next to `path`, and rename it to `path` at the end: what is half-made never counts."""
    work = path.with_name(path.name + ".unfinished")
    if work.is_dir():
        shutil.rmtree(work)
    path.parent.mkdir(parents=True, exist_ok=True)
    yield work
    work.replace(path)


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with whole(path) as work:
        work.write_text(text, encoding="utf-8")


def check_same(file: Path, settings: str) -> None:
    """Check that what lies next to `file` was made with these settings, numbers by their value. Raises RecipeError."""
    made = file.read_text(encoding="utf-8")
    if made.strip() != settings.strip() and _values(made) != _values(settings):
        raise RecipeError(f"{file.parent} was made with other settings (see {file}): give another --out.")


def _values(settings: str) -> list[float | str]:
    try:
        words = shlex.split(settings)
    except ValueError:  # an apostrophe in a path
        words = settings.split()
    return [_value(word) for word in words]


def _value(word: str) -> float | str:
    """2e-5 is 0.00002."""
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(word)):
            return number
    return word
