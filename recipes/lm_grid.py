"""Hold a grid of language models against the tables of the papers it is of: GRID is a YAML like peps/grid.yaml.

    python recipes/lm_grid.py names GRID                  # the runs it names, each once
    python recipes/lm_grid.py csv OUT GRID                # the numbers of the runs OUT/grid/NAME that there are
    python recipes/lm_grid.py table CSV GRID              # these numbers -> Markdown
    python recipes/lm_grid.py picture CSV GRID PNG        # the same, each row relative to the best of its table

A run counts as diverged when fairseq-train stopped at a gradient that is not finite (recipes/lm_comparison.sh then
leaves a file `diverged`), or when its last validation is not finite or worse than `FAR` times its best one.
"""

import csv
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lm_results import read_log, read_training

FAR = 1.5
# Okabe and Ito's blue and vermilion, which stay distinct for colour-blind readers.
OURS, PAPER = "#0072B2", "#D55E00"


class Outcome(NamedTuple):
    """What became of a run: perplexities per token; None = there is none."""

    valid: float | None = None
    test: float | None = None
    parameters: int | None = None
    updates: int | None = None
    hours: float | None = None
    diverged: str = ""  # where, in words

    @property
    def said(self) -> str:
        """What stands in place of a perplexity."""
        return "diverged" if self.diverged else "not run"


class Row(NamedTuple):
    """A row of a table: ours, and the paper's (a perplexity, "diverged", or None = the paper has no such number)."""

    name: str
    run: str
    ours: Outcome
    valid: float | str | None
    test: float | str | None


class Place(NamedTuple):
    """Where a perplexity stands among those of its table."""

    relative: float | None  # to the lowest
    said: str  # the rank, or what became of the run


class Table(NamedTuple):
    """A table of a paper; `split` is the one that it is ordered by: test where the paper has it."""

    title: str
    split: str
    rows: list[Row]

    def columns(self) -> tuple[list[Place], list[Place]]:
        """Our places and the paper's; a row without a number or a word of the paper has none."""
        papers = [getattr(row, self.split) for row in self.rows]
        ours = [getattr(row.ours, self.split) or row.ours.said for row in self.rows]
        ours = [None if paper is None else our for our, paper in zip(ours, papers, strict=True)]
        return places(ours), places(papers)


def places(values: list[float | str | None]) -> list[Place]:
    """Equal perplexities share a rank; what is none stays the word it is, None a dash."""
    known = [x for x in values if isinstance(x, float)]
    return [
        Place(x / min(known), str(1 + sum(y < x for y in known))) if isinstance(x, float) else Place(None, x or "-")
        for x in values
    ]


def read_grid(path: Path) -> list[dict[str, Any]]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def names(grid: list[dict[str, Any]]) -> list[str]:
    """The runs, each once, in the order of the tables."""
    return list(dict.fromkeys(f"grid/{row['run']}" for table in grid for row in table["rows"]))


def read_outcome(folder: Path) -> Outcome:
    """What the files of a run say; a run that is neither finished nor diverged has not been run."""
    stopped = folder / "diverged"
    if not stopped.exists() and not (folder / "trained").exists():
        return Outcome()
    training = read_training(folder / "train.log")
    outcome = Outcome(parameters=training.parameters, updates=training.updates, hours=training.hours)
    if stopped.exists():
        return outcome._replace(diverged=stopped.read_text(encoding="utf-8").strip())
    last, best = training.validations[-1][1], min(ppl for _, ppl in training.validations)
    if not last <= FAR * best:
        return outcome._replace(diverged=f"ended at a validation perplexity of {last:.1f}, its best was {best:.1f}")
    logs = (folder / f"{split}.ppl.log" for split in ("valid", "test"))
    found = [2 ** read_log(log)[2] if log.exists() else None for log in logs]
    return outcome._replace(valid=found[0], test=found[1])


def write_csv(out: Path, grid: list[dict[str, Any]]) -> None:
    """A line for each run that has come to an end."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["run", *Outcome._fields])
    for name in names(grid):
        outcome = read_outcome(out / name)
        if outcome != Outcome():
            writer.writerow([name.removeprefix("grid/"), *outcome])


def read_csv(path: Path) -> dict[str, Outcome]:
    """The outcome of each run in a file that `write_csv` wrote; columns beside its own are left alone."""
    kinds = {"valid": float, "test": float, "parameters": int, "updates": int, "hours": float}
    with path.open(encoding="utf-8", newline="") as file:
        return {
            row["run"]: Outcome(
                **{name: kind(row[name]) for name, kind in kinds.items() if row[name]}, diverged=row["diverged"]
            )
            for row in csv.DictReader(file)
        }


def read_tables(outcomes: dict[str, Outcome], grid: list[dict[str, Any]]) -> list[Table]:
    found = []
    for table in grid:
        rows = [
            Row(row["row"], row["run"], outcomes.get(row["run"], Outcome()), row.get("valid"), row.get("test"))
            for row in table["rows"]
        ]
        found.append(Table(table["table"], "valid" if all(row.test is None for row in rows) else "test", rows))
    return found


def cell(value: float | str | None, digits: int = 1) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:,.{digits}f}"


def markdown(tables: list[Table]) -> list[str]:
    """A table of Markdown for each of the papers' tables."""
    heads = ["row", "conf/grid/", "valid", "test", "rank", "paper valid", "paper test", "paper rank"]
    heads += ["parameters", "updates", "hours"]
    lines = []
    for table in tables:
        ours, papers = table.columns()
        ranked = f", ranked by {table.split}" if any(place.relative for place in papers) else ""
        lines += ["", f"**{table.title}**{ranked}", "", "| " + " | ".join(heads) + " |"]
        lines.append("| --- | --- |" + " ---: |" * (len(heads) - 2))
        for row, our, paper in zip(table.rows, ours, papers, strict=True):
            found = [row.ours.said if x is None else cell(x) for x in (row.ours.valid, row.ours.test)]
            size = [cell(row.ours.parameters, 0), cell(row.ours.updates, 0), cell(row.ours.hours, 3)]
            cells = [row.name, row.run, *found, our.said, cell(row.valid), cell(row.test), paper.said, *size]
            lines.append("| " + " | ".join(cells) + " |")
    diverged = {row.run: row.ours.diverged for table in tables for row in table.rows if row.ours.diverged}
    lines += ["", *(f"- {run} diverged: {where}" for run, where in diverged.items())]
    return lines[1:]


def draw(tables: list[Table], path: Path) -> None:
    """Two circles a row, ours full, the paper's empty: multiples of the best row of its table, in the paper's order."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("drawing needs matplotlib: pip install 'fairseq_fwp[plots]'.") from error
    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    tables = [table for table in tables if any(row.valid is not None for row in table.rows)]
    figure, axes = pyplot.subplots(
        figsize=(8.4, 0.9 + 0.25 * sum(len(table.rows) + 2 for table in tables)), layout="constrained"
    )
    y, ticks = 0.0, {}
    beside = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8.5}
    for table in tables:
        axes.text(0, y, table.title, weight="bold", **beside)
        ours, papers = table.columns()
        for i in sorted(range(len(table.rows)), key=lambda i: papers[i].relative or math.inf):
            y -= 1
            ticks[y] = table.rows[i].name
            pair = (ours[i], OURS, OURS, 1.02), (papers[i], PAPER, "none", 1.15)
            if ours[i].relative and papers[i].relative:
                axes.plot([place.relative for place, *_ in pair], [y, y], color="0.8", lw=1.2, zorder=1)
            for place, colour, face, column in pair:
                if place.relative:
                    axes.plot(place.relative, y, "o", color=colour, markerfacecolor=face, markersize=7, zorder=2)
                axes.text(column, y, place.said, color=colour, **beside)
        y -= 2
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8.5)
    axes.set_xlim(left=0.98)
    for column, said, colour in ((1.02, "rank here", OURS), (1.15, "paper", PAPER)):
        axes.text(column, 1.0, said, transform=axes.transAxes, color=colour, va="bottom", fontsize=8.5)
    axes.set_ylim(y + 1.4, 0.7)
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.set_xlabel("perplexity, as a multiple of the best row of the same table")
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.plot([], [], "o", color=OURS, label="here")
    axes.plot([], [], "o", color=PAPER, markerfacecolor="none", label="paper")
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str]) -> None:
    match arguments:
        case ["names", grid]:
            print(*names(read_grid(Path(grid))))
        case ["csv", out, grid]:
            write_csv(Path(out), read_grid(Path(grid)))
        case ["table", file, grid]:
            print("\n".join(markdown(read_tables(read_csv(Path(file)), read_grid(Path(grid))))))
        case ["picture", file, grid, png]:
            draw(read_tables(read_csv(Path(file)), read_grid(Path(grid))), Path(png))
        case _:
            sys.exit("usage: lm_grid.py names GRID | csv OUT GRID | table CSV GRID | picture CSV GRID PNG")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"lm_grid.py: {error}")
