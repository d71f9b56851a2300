"""Synthetic associative retrieval: grids of small trainings, and the paper's Figures 2 to 5 of their results."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import figures
from commands import RecipeError
from flags import as_flags, read_yaml
from grid import Grid, Training

# An interrupted training repeats at most 5 epochs.
SAVING = ["--save-interval", "5", "--no-epoch-checkpoints"]
LOGGING = ["--log-format", "json", "--log-interval", "1000000"]


class Retrieval(Grid):
    def read(self, conf: Path) -> Iterator[Training]:
        """Yield a training for every combination of the lists of an entry."""
        common, entries = read_yaml(self.recipe / "conf" / "common.yaml"), read_yaml(conf)
        if not isinstance(entries, list) or not entries:
            kind = "a mapping" if isinstance(entries, dict) else "one value" if entries else "nothing"
            raise RecipeError(f"{conf} must be a list of entries, as in conf/quick.yaml, got {kind}.")
        for index, entry in enumerate(entries, 1):
            try:
                for point in combinations(entry):
                    name = name_of(point)
                    flags = [*SAVING, *as_flags(common | point), *LOGGING]
                    yield Training(name, self.out / name, flags, point)
            except ValueError as error:
                raise RecipeError(f"{conf}, entry {index}: {error}") from None

    def report(self, finished: list[Training]) -> None:
        figures.write(finished, read_yaml(self.recipe / "published.yaml", plain=False), self.out)


def name_of(point: dict[str, str]) -> str:
    """Return a folder's name, without spaces and slashes."""
    others = (f"{flag}={value}" for flag, value in point.items() if flag != "arch")
    return re.sub(r"[\s/]+", "_", ",".join([point["arch"], *others]))


def combinations(entry: Any) -> list[dict[str, str]]:
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
    flags["num-keys"] = flags.pop("num-keys")  # last: sizes vary fastest
    for size in flags["num-keys"]:
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"num-keys must be a positive integer, got {size!r}")
    return [dict(zip(flags, values, strict=True)) for values in itertools.product(*flags.values())]
