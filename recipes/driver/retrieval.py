"""Synthetic associative retrieval: grids of small trainings, and the paper's Figures 2 to 5 of their results."""

import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

import grid
from commands import RecipeError
from flags import as_flags, read_yaml
from training import Training

# An interrupted training repeats at most 5 epochs.
SAVING = ["--save-interval", "5", "--no-epoch-checkpoints"]
LOGGING = ["--log-format", "json", "--log-interval", "1000000"]


class Point(NamedTuple):
    """One training, by its flags."""

    flags: dict[str, str]

    @property
    def name(self) -> str:
        """A folder's name, without spaces and slashes."""
        others = (f"{flag}={value}" for flag, value in self.flags.items() if flag != "arch")
        return re.sub(r"[\s/]+", "_", ",".join([self.flags["arch"], *others]))

    @property
    def size(self) -> int:
        """S, the number of keys."""
        return int(self.flags["num-keys"])

    def training(self, common: dict[str, str], out: Path) -> Training:
        flags = [*SAVING, *as_flags(common | self.flags), *LOGGING]
        return Training(self.name, out / self.name, flags)


def read_points(paths: list[Path]) -> list[Point]:
    """Return the points of grids, in the order of training: every combination of the lists of an entry.

    Raises RecipeError for a file or an entry without points.
    """
    points: dict[str, Point] = {}  # by name, so that a point of two grids is trained once
    for path in paths:
        entries = read_yaml(path)
        if not isinstance(entries, list) or not entries:
            kind = "a mapping" if isinstance(entries, dict) else "one value" if entries else "nothing"
            raise RecipeError(f"{path} must be a list of entries, as in conf/quick.yaml, got {kind}.")
        for index, entry in enumerate(entries, 1):
            try:
                points.update((point.name, point) for point in combinations(entry))
            except ValueError as error:
                raise RecipeError(f"{path}, entry {index}: {error}") from None
    return list(points.values())


def combinations(entry: Any) -> list[Point]:
    """Return the points of an entry. Raises ValueError unless every flag has a value or a list of values."""
    if not isinstance(entry, dict):
        raise ValueError(f"it must have flags and their values, got {entry!r}")
    for flag in ("arch", "num-keys"):
        if flag not in entry:
            raise ValueError(f"it must have {flag}, got only {', '.join(entry)}")
    flags = {flag: value if isinstance(value, list) else [value] for flag, value in entry.items()}
    for flag, values in flags.items():
        if not values or not all(isinstance(value, str) and value for value in values):
            raise ValueError(f"{flag} must be a value or a list of values, got {entry[flag]!r}")
    sizes = flags.pop("num-keys")
    for size in sizes:
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"num-keys must be a positive integer, got {size!r}")
    flags["num-keys"] = sizes  # last: sizes vary fastest
    return [Point(dict(zip(flags, values, strict=True))) for values in itertools.product(*flags.values())]


def read(confs: list[Path], recipe: Path, out: Path) -> grid.Grid:
    """Return the grid of files."""
    from reports import retrieval  # imported here: it imports this module

    points, common = read_points(confs), read_yaml(recipe / "conf" / "common.yaml")
    trainings = [point.training(common, out) for point in points]
    return grid.Grid(trainings, lambda: retrieval.write(recipe, points, common, out))


def main(arguments: list[str]) -> None:
    grid.main(arguments, read, action="append", help="grid; may be repeated (default: conf/quick.yaml)")
