"""Synthetic associative retrieval: grids of small trainings, and the paper's Figures 2 to 5 of their results."""

import contextlib
import itertools
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import grid
from arguments import ROOT
from commands import RecipeError
from flags import as_flags, read_yaml, refusal
from grid import Training

# An interrupted training repeats at most 5 epochs.
SAVING = ["--save-interval", "5", "--no-epoch-checkpoints"]
LOGGING = ["--log-format", "json", "--log-interval", "1000000"]


class Point(NamedTuple):
    """One training: its flags, and its seconds for each key on one core."""

    flags: dict[str, str]
    seconds_per_key: float

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
        folder = out / self.name
        flags = [*SAVING, *as_flags(common | self.flags), *LOGGING]
        return Training(self.name, folder, flags, self.seconds_per_key * self.size)


def read_points(paths: list[Path]) -> list[Point]:
    """Return the points of grids, in the order of training: every combination of the lists of an entry.

    Raises RecipeError for a file or an entry without points.
    """
    points: dict[str, Point] = {}  # by name, so that a point of two grids is trained once
    for path in paths:
        for index, entry in enumerate(read_entries(path), 1):
            try:
                points.update((point.name, point) for point in combinations(entry))
            except ValueError as error:
                raise RecipeError(f"{path}, entry {index}: {error}") from None
    return list(points.values())


def read_entries(path: Path) -> list[Any]:
    entries = read_yaml(path)
    if not isinstance(entries, list) or not entries:
        kind = "a mapping" if isinstance(entries, dict) else "one value" if entries else "nothing"
        raise RecipeError(f"{path} must be a list of entries, as in conf/quick.yaml, got {kind}.")
    return entries


def combinations(entry: Any) -> list[Point]:
    """Return the points of an entry. Raises ValueError unless every flag has a value or a list of values."""
    if not isinstance(entry, dict):
        raise ValueError(f"it must have flags and their values, got {entry!r}")
    for flag in ("arch", "num-keys", "seconds-per-key"):
        if flag not in entry:
            raise ValueError(f"it must have {flag}, got only {', '.join(entry)}")
    flags = {flag: value if isinstance(value, list) else [value] for flag, value in entry.items()}
    for flag, values in flags.items():
        if not values or not all(isinstance(value, str) and value for value in values):
            raise ValueError(f"{flag} must be a value or a list of values, got {entry[flag]!r}")
    flags["num-keys"] = [
        str(number("num-keys", value, int)) for value in flags.pop("num-keys")
    ]  # last: sizes vary fastest
    (rate, *others) = flags.pop("seconds-per-key")
    if others:
        raise ValueError(f"seconds-per-key must be one value, got {entry['seconds-per-key']!r}")
    seconds = number("seconds-per-key", rate, float)
    return [Point(dict(zip(flags, values, strict=True)), seconds) for values in itertools.product(*flags.values())]


def number(flag: str, value: str, kind: type[int] | type[float]) -> float:
    """Return the positive number in a text. Raises ValueError for anything else."""
    with contextlib.suppress(ValueError):
        if 0 < (found := kind(value)) < math.inf:
            return found
    raise ValueError(f"{flag} must be a positive {'integer' if kind is int else 'number'}, got {value!r}")


def check(points: list[Point], common: dict[str, str], out: Path) -> None:
    """Parse flags as fairseq-train does, each set of flags once. Raises RecipeError for flags that it refuses."""
    seen: set[tuple[str, str]] = set()
    for point in points:
        flags = {(flag, value) for flag, value in point.flags.items() if flag != "num-keys"}
        if flags <= seen:
            continue
        seen |= flags
        if reason := refusal(point.training(common, out).command[1:]):
            raise RecipeError(f"{point.name}: fairseq-train refuses its flags: {reason}")


def main(arguments: list[str]) -> None:
    from reports import retrieval as report  # imported here: --help must work without the package

    parser = grid.parser(lambda parser: parser.add_argument(
        "--conf", type=Path, action="append", metavar="YAML", help="grid; may be repeated (default: conf/quick.yaml)"
    ))  # fmt: skip
    args = parser.parse(arguments)
    out = args.out or ROOT / "runs" / args.recipe.name
    points = read_points(args.conf or [args.recipe / "conf" / "quick.yaml"])
    common = read_yaml(args.recipe / "conf" / "common.yaml")
    trainings = [point.training(common, out) for point in points]

    def check_points() -> None:
        check(points, common, out)

    grid.stages(args, trainings, out, check_points)
    if args.stage in ("report", "all"):
        report.write(args.recipe, points, common, out)
