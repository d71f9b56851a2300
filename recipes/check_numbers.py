"""Check that numbers in the tables of the ledgers have a record: `python recipes/check_numbers.py` prints the others.

The numbers of a row must stand, to their last digit, in lines of the recipe's CSVs that belong together. Such lines
share one or two entries, for example a model's name and a rate. A number stands there as a value, in another unit
(`UNITS`), or as the mean, deviation or median of lines that differ in numbers only, as seeds do. Other numbers follow
from those of a table by a rule of `RULES`. Not checked are the first column, which names the row, cells of words,
columns of a paper, which has its own table, and `SETTINGS`, which were chosen. The CSVs are those in results/, without
curves, and those of other recipes that the ledger links.
"""

import csv
import math
import re
import statistics
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

RECIPES = Path(__file__).resolve().parent
NUMBER = r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*[a-z])"
MEASURED = re.compile(rf"(\*\*|[<>]=? )?{NUMBER}(?! cores| core)")
SETTINGS = re.compile(
    r"paper|published|^goal$|step$|^state \(M\)$|^features|^evaluation|rate$|^tokens$|^threads$|commit|hardware"
)
# Factors between numbers of a CSV and of a table, where a word of the line has this name: ms and us, and %.
UNITS: Mapping[str, tuple[float, ...]] = {"seconds": (1e3, 1e6), "share of": (1e2,)}
# Recipes whose CSVs name their lines as the tables do: a row's numbers stand in lines of its label, if there are such.
NAMED = ("benchmarks",)


class Table(NamedTuple):
    """A table of a ledger: the heads of its columns, rows of as many cells, and the tables above it."""

    heads: list[str]
    rows: list[list[str]]
    above: list["Table"]

    def number(self, row: int | str, column: int | str) -> float:
        """Return the first number of a row, by its place or label, in a column, by its place or how its head begins."""
        cells = self.rows[row] if isinstance(row, int) else next(cells for cells in self.rows if cells[0] == row)
        if isinstance(column, str):
            column = next(place for place, head in enumerate(self.heads) if head.startswith(column))
        return value(re.findall(NUMBER, cells[column])[0])


class Row(NamedTuple):
    """A row of a table, its place, and its numbers in the order of their columns: (head, number)."""

    table: Table
    place: int
    numbers: list[tuple[str, str]]

    @property
    def label(self) -> str:
        return self.table.rows[self.place][0]


def value(number: str) -> float:
    return float(number.replace(",", ""))


# Rules: what a number may be, from its row.

Rule = Callable[[Row], list[float]]


def share(head: str) -> Rule:
    """The number of the table's first row in a column, in % of this row's."""
    return lambda row: [100 * row.table.number(0, head) / row.table.number(row.place, head)]


def behind(*heads: str) -> Rule:
    """How far the numbers of these columns are below those of the table's first row."""
    return lambda row: [row.table.number(0, head) - row.table.number(row.place, head) for head in heads]


def above(row: Row) -> list[float]:
    """The numbers of the tables above."""
    cells = (cell for table in row.table.above for cells in table.rows for cell in cells[1:])
    return [value(number) for cell in cells for number in re.findall(NUMBER, cell)]


def of_likelihood(row: Row) -> list[float]:
    """The share of the source's perplexity, from losses in nats."""
    loss = "loss of a token"
    return [100 * math.exp(row.table.number(0, loss) - row.table.number(row.place, loss))]


def sentences_a_second(row: Row) -> list[float]:
    """The sentences of both cases divided by their seconds."""
    return [count / row.table.number(row.place, f"seconds for {count:,} ") for count in (1000, 100)]


def time_of_layers(row: Row) -> list[float]:
    """The time of fast weight layers, by SGD's and by RMS': the inverse of the tokens a second above."""
    table = row.table.above[0 if row.label.startswith("local") else 1]
    layers = "FWLs, gradients at carried weights" if "carried" in row.label else "FWLs"
    rules = ("Dynamic evaluation, SGD", "Dynamic evaluation, RMS")
    return [table.number(rule, "tokens/s") / table.number(layers, "tokens/s") for rule in rules]


# By recipe: a pattern of "head; label", and its rule.
RULES: Mapping[str, Mapping[str, Rule]] = {
    "decay_finetune": {
        "^of the source, valid": share("then the distribution"),
        "^of the source;": share("valid 0"),
        r"\(above\)": above,
    },
    "fwl": {"^(SGD|RMS);": time_of_layers},
    "multi30k": {
        "^behind.*; (?!FAVOR|DPFP|ELU)": behind("valid", "test"),
        "^behind": behind("after both: valid", "after both: test"),
        "above|^rows self|^linear in all": above,
        "^sentences a second": sentences_a_second,
    },
    "recurrent": {"^of the source": of_likelihood},
    "sequence_problems": {"; a guess": lambda row: [0, 17, 100 / 60, 100 / 2, 100 / 6, 100 / 16]},
}


# Tables and records.


def tables(ledger: Path) -> list[Table]:
    """Return the tables of a ledger."""
    found: list[Table] = []
    lines: list[list[str]] = []
    for line in [*ledger.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")])
        elif lines:
            found.append(Table(lines[0], lines[2:], found[:]))
            lines = []
    return found


def rows(table: Table) -> Iterator[Row]:
    """Yield the rows of a table with the numbers that are checked."""
    for place, cells in enumerate(table.rows):
        measured = zip(table.heads[1:], cells[1:], strict=True)
        measured = [(head, cell) for head, cell in measured if MEASURED.match(cell) and not SETTINGS.search(head)]
        yield Row(table, place, [(head, number) for head, cell in measured for number in re.findall(NUMBER, cell)])


class Line(NamedTuple):
    """A line of a CSV: its words, which seeds of one run share, its values by column, and all numbers in it."""

    words: tuple[str, ...]
    values: dict[str, float]
    numbers: set[float]


class Records:
    """The numbers of a ledger's CSVs, in groups of lines that belong together, the smallest first."""

    def __init__(self, ledger: Path) -> None:
        links = re.findall(r"\((\.\./[\w./]+\.csv)\)", ledger.read_text(encoding="utf-8"))
        paths = {*(ledger.parent / "results").glob("*.csv"), *((ledger.parent / link).resolve() for link in links)}
        self.lines: list[Line] = []
        self.are_named = ledger.parent.name in NAMED
        groups: dict[tuple[tuple[str, str], ...], list[int]] = defaultdict(list)  # of places in `lines`
        for path in sorted(path for path in paths if not path.stem.endswith("curves")):
            with path.open(encoding="utf-8", newline="") as file:
                entries = [*csv.DictReader(file)]
            columns = {head: [entry[head] for entry in entries] for head in entries[0]}
            shared = [head for head, cells in columns.items() if is_shared(cells) and head != "seed"]
            for entry in entries:
                values = {head: value(cell) for head, cell in entry.items() if re.fullmatch(NUMBER, cell)}
                words = (path.name, *(cell for head, cell in entry.items() if head not in values))
                found = {value(number) for cell in entry.values() for number in re.findall(NUMBER, cell)}
                self.lines.append(Line(words, values, in_units(found, words)))
                keys = [(head, entry[head]) for head in shared if entry[head]]
                for key in [*((key,) for key in keys), *combinations(keys, 2)]:
                    groups[key].append(len(self.lines) - 1)
        self.groups = {frozenset(places): self.numbers(places) for places in groups.values()}

    def numbers(self, places: Iterable[int]) -> list[float]:
        """Return the numbers of lines, and mean, deviation and median of those with the same words, in order."""
        lines = [self.lines[place] for place in sorted(places)]
        found = {number for line in lines for number in line.numbers}
        alike: dict[tuple[str, ...], list[Line]] = defaultdict(list)
        for line in lines:
            alike[line.words].append(line)
        for same in alike.values():
            for head in same[0].values if len(same) > 1 else ():
                values = [line.values[head] for line in same if head in line.values]
                if len(values) > 1:
                    mean = sum(values) / len(values)
                    deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
                    found |= in_units({mean, deviation, statistics.median(values)}, same[0].words)
        return sorted(found)

    def have(self, row: Row, numbers: list[str]) -> bool:
        """Return whether lines that belong together, of its label if there are such, have all of these numbers."""
        named = re.compile(re.escape(row.label) + r"\b")
        lines = enumerate(self.lines) if self.are_named and row.label else []
        of_label = frozenset(place for place, line in lines if any(map(named.match, line.words)))
        groups = [found for places, found in self.groups.items() if not of_label or places <= of_label]
        groups.append(self.numbers(of_label))
        return not numbers or any(all(stands(number, group) for number in numbers) for group in groups)


def in_units(numbers: set[float], words: Iterable[str]) -> set[float]:
    """Return the numbers of a line with these words, also in the units of a table."""
    units = [unit for name, factors in UNITS.items() if any(name in word for word in words) for unit in factors]
    return numbers | {unit * x for unit in units for x in numbers}


def is_shared(cells: list[str]) -> bool:
    """Return whether lines with equal entries in a column belong together: these are words, or numbers that repeat."""
    return len({*cells}) < len(cells) or not all(re.fullmatch(f"{NUMBER}|nan|inf|", cell) for cell in cells)


def stands(number: str, found: list[float]) -> bool:
    """Return whether a number is one of those found, in order, rounded to its digits."""
    mantissa, _, power = number.partition("e")
    half = 0.500001 * 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
    place = bisect_left(found, value(number) - half)
    return place < len(found) and found[place] <= value(number) + half


def rule_of(recipe: str, row: Row, head: str) -> Rule | None:
    """Return the rule for the numbers of a column in a row; None: they have a record."""
    rules = RULES.get(recipe, {})
    return next((rule for pattern, rule in rules.items() if re.search(pattern, f"{head}; {row.label}")), None)


def wrong(ledger: Path) -> list[str]:
    """Return a sentence for each row of a ledger with numbers that have no record and follow by no rule."""
    found, recipe, records = [], ledger.parent.name, Records(ledger)
    for row in (row for table in tables(ledger) for row in rows(table)):
        ruled = [(head, number, rule_of(recipe, row, head)) for head, number in row.numbers]
        for head, number, rule in ruled:
            if rule and not stands(number, sorted(rule(row))):
                found.append(f"{recipe}: {number} in {head!r}, row {row.label!r}: not what its rule gives")
        plain = [number for _, number, rule in ruled if not rule]
        if not records.have(row, plain):
            found.append(f"{recipe}: {', '.join(plain)} in row {row.label!r}: no record has them together")
    return found


if __name__ == "__main__":
    missing = [sentence for ledger in sorted(RECIPES.glob("*/RESULTS.md")) for sentence in wrong(ledger)]
    print(*missing, sep="\n")
    sys.exit(bool(missing))
