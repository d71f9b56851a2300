"""Tables of results: CSV, Markdown, mean and deviation, and the numbers of a run in its files."""

import csv
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from arguments import ROOT
from commands import whole, write
from log import check_unchanged, read_json, read_outcome, read_training

Row = dict[str, Any]  # of a CSV, by its columns
T = TypeVar("T")


def write_csv(path: Path, rows: Sequence[dict[str, Any]], heads: Sequence[str] | None = None) -> None:
    """Write rows of the same columns; heads: the columns, needed if there may be no row."""
    with whole(path) as work, work.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, heads or list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """Return the lines of a table, its first `left` columns aligned to the left."""
    align = ["---"] * left + ["---:"] * (len(heads) - left)
    return ["| " + " | ".join(map(str, cells)) + " |" for cells in (heads, align, *rows)]


def show(value: float | str | None, digits: int = 2, none: str = "-") -> str:
    """Return a number as text for a table; words stay as they are."""
    if value is None or value == "":
        return none
    return value if isinstance(value, str) else f"{value:,.{digits}f}"


def mean(values: Sequence[Any], digits: int = 2, none: str = "-") -> str:
    """Return the mean of those that are numbers, with the standard deviation of one run if there are several."""
    known = [float(value) for value in values if value != ""]
    deviation = f" ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else ""
    return show(statistics.mean(known), digits) + deviation if known else none


def group(rows: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Return the rows by a key, in their order."""
    groups = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return dict(groups)


def named(name: str, seeds: Sequence[object]) -> str:
    return f"{name}, {len(seeds)} seeds" if len(seeds) > 1 else name


def by_model(rows: Iterable[Row], columns: dict[str, str], none: str = "-") -> list[str]:
    """Return a table with a line for each model, mean and deviation of its seeds; columns of the rows, by head."""
    lines = []
    for name, seeds in group(rows, itemgetter("model")).items():
        found = [
            mean([row[column] for row in seeds], 1 if "per word" in head else 2, none)
            for head, column in columns.items()
        ]
        size, updates, hours = seeds[0]["parameters"], seeds[0]["updates"], sum(row["hours"] for row in seeds)
        lines.append([named(name, seeds), f"{size:,}", *found, f"{updates:,}", f"{hours:,.2f}"])
    return markdown(["model", "parameters", *columns, "updates", "hours"], lines)


class Run(NamedTuple):
    """The result of a training. updates: None if neither trained nor diverged; diverged: the place, in words.

    best: the lowest perplexity of its validations; test: that of the test text then, if they had it too.
    """

    folder: Path
    parameters: int | None = None
    updates: int | None = None
    hours: float | None = None
    diverged: str = ""
    best: float | None = None
    test: float | None = None

    def result(self, name: str) -> dict[str, Any]:
        """Return the result of an evaluation; empty without one."""
        return {} if self.updates is None or self.diverged else read_json(self.folder / f"{name}.json")


def read_run(folder: Path) -> Run:
    outcome = read_outcome(folder)
    if outcome is None:
        return Run(folder)
    if not outcome.diverged:
        check_unchanged(folder)
    log = read_training(folder / "train.log")
    diverged = outcome.words if outcome.diverged else ""
    return Run(folder, log.parameters, log.updates, log.hours, diverged, log.best(), log.test)


def row_of(model: Any, run: Run, scores: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a model of a recipe, for `by_model`."""
    row = {"model": model.name, "seed": "" if model.seed is None else model.seed, "parameters": run.parameters}
    return row | scores | {"updates": run.updates, "hours": run.hours}


def provenance() -> str:
    """Return a line about a run: command, commit, day, machine and PyTorch."""
    import torch

    recipe, given = Path("recipe"), sys.argv[1:]
    if "--recipe" in given:
        recipe = Path(given[given.index("--recipe") + 1]).resolve()
        recipe = recipe.relative_to(ROOT) if recipe.is_relative_to(ROOT) else recipe
    words = ["bash", str(recipe / "run.sh"), *given[given.index("--") + 1 if "--" in given else len(given) :]]
    git = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    named = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    machine = f"{os.cpu_count()} cores, {named[1] if named else platform.machine()}"
    if torch.cuda.is_available():
        machine = torch.cuda.get_device_name()
    commit = git.stdout.strip() or "unknown"
    return f"`{shlex.join(words)}` at {commit}, {date.today()}, {machine}, torch {torch.__version__}."


def save(folder: Path, name: str, rows: Sequence[dict[str, Any]], lines: Sequence[str], *pictures: str) -> None:
    """Write the numbers into NAME.csv and the table with its provenance into table.md, and print the table."""
    write_csv(folder / f"{name}.csv", rows)
    lines = [*lines, "", provenance()]
    write(folder / "table.md", "\n".join(lines) + "\n")
    print("\n".join(lines))
    also = "".join(f", a picture in {folder / picture}" for picture in pictures)
    print(f"The same is in {folder / 'table.md'}, its numbers in {folder / f'{name}.csv'}{also}.")
