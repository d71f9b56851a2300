"""A grid of language models compared with the tables of its papers: rows of a YAML like peps/grid.yaml.

A run counts as diverged if fairseq-train stopped at a non-finite gradient, or if its last validation is not finite or
worse than `FAR` times its best one.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from flags import read_yaml
from log import read_training
from recipe import runs
from tables import markdown, read_csv, write_csv

from fairseq_fwp.cli.plot_style import COLOURS, load_pyplot
from fairseq_fwp.cli.plot_style import save as save_picture
from reports.files import read_run, save, show

FAR = 1.5
OURS, PAPER = COLOURS["delta"], COLOURS["sum"]


class Outcome(NamedTuple):
    """The result of a run: perplexities per token, None = missing."""

    valid: float | None = None
    test: float | None = None
    parameters: int | None = None
    updates: int | None = None
    hours: float | None = None
    diverged: str = ""  # where, in words

    @property
    def said(self) -> str:
        """The words for a missing perplexity."""
        return "diverged" if self.diverged else "not run"


class Row(NamedTuple):
    """A row of a table: ours, and the paper's (a perplexity, "diverged", or None = the paper has no such number)."""

    name: str
    run: str
    ours: Outcome
    valid: float | str | None
    test: float | str | None


class Place(NamedTuple):
    """The place of a perplexity among those of its table."""

    relative: float | None  # to the lowest
    said: str  # the rank, or words instead


class Table(NamedTuple):
    """A table of a paper, ordered by `split`: test if the paper has it."""

    title: str
    split: str
    rows: list[Row]

    def columns(self) -> tuple[list[Place], list[Place]]:
        """Return our places and the paper's; None for a row without an entry in the paper."""
        papers = [getattr(row, self.split) for row in self.rows]
        ours = [getattr(row.ours, self.split) or row.ours.said for row in self.rows]
        ours = [None if paper is None else our for our, paper in zip(ours, papers, strict=True)]
        return places(ours), places(papers)


def places(values: list[float | str | None]) -> list[Place]:
    """Return the places of perplexities; equal ones share a rank, words stay words, and None is a dash."""
    known = [x for x in values if isinstance(x, float)]
    return [
        Place(x / min(known), str(1 + sum(y < x for y in known))) if isinstance(x, float) else Place(None, x or "-")
        for x in values
    ]


def read_outcome(folder: Path) -> Outcome:
    """Return the outcome in the files of a run; one that is neither finished nor diverged counts as not run."""
    found = read_run(folder)
    outcome = Outcome(None, None, *found[1:])
    if found.updates is None or found.diverged:
        return outcome
    training = read_training(folder / "train.log")
    last, best = training.curve()[-1][1], training.best()
    if not last <= FAR * best:
        return outcome._replace(diverged=f"ended at a validation perplexity of {last:.1f}, its best was {best:.1f}")
    valid, test = (found.result(split).get("perplexity") for split in ("valid", "test"))
    return outcome._replace(valid=valid, test=test)


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Return the outcome of each run in a CSV of this report; other columns are ignored."""
    kinds = {"valid": float, "test": float, "parameters": int, "updates": int, "hours": float}
    return {
        row["run"]: Outcome(
            **{name: kind(row[name]) for name, kind in kinds.items() if row[name]}, diverged=row["diverged"]
        )
        for row in read_csv(path)
    }


def write(tables: Path, out: Path, folder: Path) -> None:
    """Write grid.csv, table.md and grid.png of the runs in out/grid/RUN."""
    grid = read_yaml(tables, plain=False)
    outcomes = {run: read_outcome(out / "grid" / run) for run in runs(grid)}
    rows = [{"run": run, **outcome._asdict()} for run, outcome in outcomes.items() if outcome != Outcome()]
    if not rows:
        return
    write_csv(folder / "grid.csv", rows)
    found = read_tables(read_outcomes(folder / "grid.csv"), grid)
    draw(found, folder / "grid.png")
    save(folder, "grid", rows, lines(found), "grid.png")


def read_tables(outcomes: dict[str, Outcome], grid: list[dict[str, Any]]) -> list[Table]:
    found = []
    for table in grid:
        rows = [
            Row(row["row"], row["run"], outcomes.get(row["run"], Outcome()), row.get("valid"), row.get("test"))
            for row in table["rows"]
        ]
        found.append(Table(table["table"], "valid" if all(row.test is None for row in rows) else "test", rows))
    return found


def lines(tables: list[Table]) -> list[str]:
    """Return a table of Markdown for each of the papers' tables; one without numbers of a paper has no ranks."""
    heads = ["row", "conf/grid/", "valid", "test", "rank", "paper valid", "paper test", "paper rank"]
    found = []
    for table in tables:
        ours, papers = table.columns()
        ranked = any(place.relative for place in papers)
        cells = []
        for row, our, paper in zip(table.rows, ours, papers, strict=True):
            ppl = [show(x, 1, row.ours.said) for x in (row.ours.valid, row.ours.test)]
            cells.append([row.name, row.run, *ppl, our.said, show(row.valid, 1), show(row.test, 1), paper.said])
        width = len(heads) if ranked else 4
        title = f"**{table.title}**" + (f", ranked by {table.split}" if ranked else "")
        found += ["", title, "", *markdown(heads[:width], [row[:width] for row in cells], left=2)]
    diverged = {row.run: row.ours.diverged for table in tables for row in table.rows if row.ours.diverged}
    found += ["", *(f"- {run} diverged: {where}" for run, where in diverged.items())]
    return found[1:]


def draw(tables: list[Table], path: Path) -> None:
    """Draw two circles a row, ours full, the paper's empty: multiples of the best row of the table."""
    pyplot = load_pyplot()
    from matplotlib import ticker

    tables = [table for table in tables if any(row.valid is not None for row in table.rows)]
    height = 0.9 + 0.25 * sum(len(table.rows) + 2 for table in tables)
    figure, axes = pyplot.subplots(figsize=(8.4, height))
    y, ticks = 0.0, {}
    centred = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8.5}
    for table in tables:
        axes.text(0, y, table.title, weight="bold", **centred)
        ours, papers = table.columns()
        for i in sorted(range(len(table.rows)), key=lambda i: papers[i].relative or math.inf):
            y -= 1
            ticks[y] = table.rows[i].name
            pair = (ours[i], OURS, OURS, 1.02), (papers[i], PAPER, "none", 1.16)
            if ours[i].relative and papers[i].relative:
                axes.plot([place.relative for place, *_ in pair], [y, y], color="0.8", lw=1.2, zorder=1)
            for place, colour, face, column in pair:
                if place.relative:
                    axes.plot(place.relative, y, "o", color=colour, markerfacecolor=face, markersize=7, zorder=2)
                axes.text(column, y, place.said, color=colour, **centred)
        y -= 2
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8.5)
    axes.set_xlim(left=0.98)
    for column, said, colour in ((1.02, "rank here", OURS), (1.16, "paper", PAPER)):
        axes.text(column, 1.0, said, transform=axes.transAxes, color=colour, va="bottom", fontsize=8.5)
    axes.set_ylim(y + 1.4, 0.7)
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.set_xlabel("perplexity, as a multiple of the best row of the same table")
    axes.grid(visible=False, axis="y")
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    axes.plot([], [], "o", color=OURS, label="here")
    axes.plot([], [], "o", color=PAPER, markerfacecolor="none", label="paper")
    figure.legend(loc="outside upper left", ncols=2)
    save_picture(figure, path)
