"""Tables of results: CSV, Markdown, mean and deviation."""

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from commands import whole


def write_csv(path: Path, rows: Sequence[dict[str, Any]], heads: Sequence[str] | None = None) -> None:
    """Write rows of the same columns; heads: the columns, needed if there may be no row."""
    with whole(path) as work, work.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, heads or list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """Return the lines of a table, its first `left` columns aligned to the left."""
    align = ["---"] * left + ["---:"] * (len(heads) - left)
    return ["| " + " | ".join(map(str, cells)) + " |" for cells in (heads, align, *rows)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean, with the standard deviation of one run if there are several."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):,.{digits}f}{deviation}"
