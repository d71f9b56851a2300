"""Read the files of a run, and show their numbers."""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from commands import write
from log import read_json, read_training
from tables import write_csv


class Run(NamedTuple):
    """The result of a training. updates: None if neither trained nor diverged; diverged: the place, in words."""

    folder: Path
    parameters: int | None = None
    updates: int | None = None
    hours: float | None = None
    diverged: str = ""

    @property
    def said(self) -> str:
        """The words for a missing result."""
        return "diverged" if self.diverged else "not run"

    def result(self, name: str) -> dict[str, Any]:
        """Return the result of an evaluation; empty without one."""
        return {} if self.updates is None or self.diverged else read_json(self.folder / f"{name}.json")


def read_run(folder: Path) -> Run:
    stopped = folder / "diverged"
    if not stopped.exists() and not (folder / "trained").exists():
        return Run(folder)
    training = read_training(folder / "train.log")
    said = stopped.read_text(encoding="utf-8").strip() if stopped.exists() else ""
    return Run(folder, training.parameters, training.updates, training.hours, said)


def show(value: float | str | None, digits: int = 2, none: str = "-") -> str:
    """Return a number as text for a table; words stay as they are."""
    if value is None or value == "":
        return none
    return value if isinstance(value, str) else f"{value:,.{digits}f}"


def provenance() -> str:
    """Return a line about a run: command, commit, day, machine and PyTorch."""
    import torch

    root = Path(__file__).resolve().parents[3]
    recipe, given = Path("recipe"), sys.argv[1:]
    if "--recipe" in given:
        recipe = Path(given[given.index("--recipe") + 1]).resolve()
        recipe = recipe.relative_to(root) if recipe.is_relative_to(root) else recipe
    words = ["bash", str(recipe / "run.sh"), *given[given.index("--") + 1 if "--" in given else len(given) :]]
    git = subprocess.run(
        ["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores, {processor()}"
    commit = git.stdout.strip() or "unknown"
    return f"`{shlex.join(words)}` at {commit}, {date.today()}, {machine}, torch {torch.__version__}."


def processor() -> str:
    info = Path("/proc/cpuinfo")
    found = (
        re.search(r"^model name\s*: (.*)$", info.read_text(encoding="utf-8"), re.MULTILINE) if info.exists() else None
    )
    return found[1] if found else platform.machine()


def save(folder: Path, name: str, rows: Sequence[dict[str, Any]], lines: Sequence[str], *pictures: str) -> None:
    """Write the numbers into NAME.csv and the table with its provenance into table.md, and print the table."""
    write_csv(folder / f"{name}.csv", rows)
    lines = [*lines, "", provenance()]
    write(folder / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines))
    also = "".join(f", a picture in {folder / picture}" for picture in pictures)
    print(f"The same is in {folder / 'table.md'}, its numbers in {folder / f'{name}.csv'}{also}.")
