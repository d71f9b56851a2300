"""Language models compared with a paper's tables: rows of a YAML like peps/grid.yaml or peps/carried.yaml.

A run counts as diverged if fairseq-train stopped at a non-finite gradient. In a grid it also does if its last
validation is not finite or worse than `FAR` times its best one.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from flags import read_yaml
from log import read_training
from recipe import runs
from tables import markdown, read_csv, read_run, save, show, write_csv

from fairseq_fwp.cli.plot_style import COLOURS, PUBLISHED, load_pyplot, use_log_scale
from fairseq_fwp.cli.plot_style import save as save_picture

FAR = 1.5
OURS, PAPER = COLOURS["delta"], COLOURS["sum"]


class Outcome(NamedTuple):
    """The result of a run: perplexities per token, numbers of the state; None = missing. diverged: where, in words."""

    valid: float | None = None
    test: float | None = None
    parameters: int | None = None
    updates: int | None = None
    hours: float | None = None
    diverged: str = ""
    state: int | None = None

    @property
    def perplexities(self) -> list[str]:
        """Those of valid and test for a table, or the words for a missing one."""
        return [show(x, 1, self.said) for x in (self.valid, self.test)]

    @property
    def said(self) -> str:
        return "diverged" if self.diverged else "not run"

    def row(self, *heads: str) -> dict[str, Any]:
        return {head: getattr(self, head) for head in heads}


SIZES = ("parameters", "updates", "hours", "diverged")
KINDS = {"state": int, "valid": float, "test": float, "parameters": int, "updates": int, "hours": float}


def read_outcomes(path: Path, *names: str) -> dict[Any, Outcome]:
    """Return the outcome of each run in a CSV of these reports, by its columns `names`; other columns are ignored."""
    found = {}
    for row in read_csv(path):
        numbers = {name: kind(row[name]) for name, kind in KINDS.items() if row.get(name)}
        found[tuple(row[name] for name in names)] = Outcome(**numbers, diverged=row["diverged"])
    return found


# A grid, by rank.


class Place(NamedTuple):
    """The place of a perplexity among those of its table."""

    relative: float | None  # to the lowest
    said: str  # the rank, or words instead


class Table(NamedTuple):
    """A table of a paper, ordered by `split`: test if the paper has it. A row has the paper's numbers, and ours."""

    title: str
    split: str
    rows: list[dict[str, Any]]
    ours: list[Outcome]

    def columns(self) -> tuple[list[Place], list[Place]]:
        """Return our places and the paper's; None for a row without an entry in the paper."""
        papers = [row.get(self.split) for row in self.rows]
        ours = [getattr(our, self.split) or our.said for our in self.ours]
        return places([paper and our for our, paper in zip(ours, papers, strict=True)]), places(papers)


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


def write_grid(tables: Path, out: Path, folder: Path) -> None:
    """Write grid.csv, table.md and grid.png of the runs in out/grid/RUN."""
    grid = read_yaml(tables, plain=False)
    outcomes = {run: read_outcome(out / "grid" / run) for run in runs(grid)}
    rows = [{"run": run, **outcome.row("valid", "test", *SIZES)} for run, outcome in outcomes.items() if any(outcome)]
    if not rows:
        return
    write_csv(folder / "grid.csv", rows)
    found = read_tables(read_outcomes(folder / "grid.csv", "run"), grid)
    draw_grid(found, folder / "grid.png")
    save(folder, "grid", rows, grid_lines(found), "grid.png")


def read_tables(outcomes: dict[Any, Outcome], grid: list[dict[str, Any]]) -> list[Table]:
    found = []
    for table in grid:
        rows = table["rows"]
        split = "test" if any("test" in row for row in rows) else "valid"
        found.append(Table(table["table"], split, rows, [outcomes.get((row["run"],), Outcome()) for row in rows]))
    return found


def grid_lines(tables: list[Table]) -> list[str]:
    """Return a table of Markdown for each of the papers' tables; one without numbers of a paper has no ranks."""
    heads = ["row", "conf/grid/", "valid", "test", "rank", "paper valid", "paper test", "paper rank"]
    found, diverged = [], {}
    for table in tables:
        places, papers = table.columns()
        ranked = any(place.relative for place in papers)
        cells = []
        for row, ours, place, paper in zip(table.rows, table.ours, places, papers, strict=True):
            theirs = [show(row.get("valid"), 1), show(row.get("test"), 1), paper.said]
            cells.append([row["row"], row["run"], *ours.perplexities, place.said, *theirs])
            if ours.diverged:
                diverged[row["run"]] = f"- {row['run']} diverged: {ours.diverged}"
        width = len(heads) if ranked else 4
        title = f"**{table.title}**" + (f", ranked by {table.split}" if ranked else "")
        found += ["", title, "", *markdown(heads[:width], [row[:width] for row in cells], left=2)]
    return [*found[1:], "", *diverged.values()]


def draw_grid(tables: list[Table], path: Path) -> None:
    """Draw two circles a row, ours full, the paper's empty: multiples of the best row of the table."""
    tables = [table for table in tables if any("valid" in row for row in table.rows)]
    height = 0.9 + 0.25 * sum(len(table.rows) + 2 for table in tables)
    figure, axes = load_pyplot().subplots(figsize=(8.4, height))
    y, ticks = 0.0, {}
    centred = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8.5}
    for table in tables:
        axes.text(0, y, table.title, weight="bold", **centred)
        ours, papers = table.columns()
        for i in sorted(range(len(table.rows)), key=lambda i: papers[i].relative or math.inf):
            y -= 1
            ticks[y] = table.rows[i]["row"]
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
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("perplexity, as a multiple of the best row of the same table")
    axes.grid(visible=False, axis="y")
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    axes.plot([], [], "o", color=OURS, label="here")
    axes.plot([], [], "o", color=PAPER, markerfacecolor="none", label="paper")
    figure.legend(loc="outside upper left", ncols=2)
    save_picture(figure, path)


# A carried state, by its size.

# (trained, evaluated) that differ: in the table, but not in the picture.
MIXED = {("carried", "window"), ("segments", "carried")}
# Model, colour, marker.
STYLES = {
    "Delta Network": (COLOURS["delta"], "o"),
    "Linear Transformer": (COLOURS["sum"], "s"),
    "Linear Transformer, no normalisation": (COLOURS["sum"], "D"),
    "Transformer-XL": (COLOURS["xl"], "v"),
}


def write_carried(table: Path, out: Path, folder: Path) -> None:
    """Write carried.csv, table.md and carried.png of the runs in out/carried/RUN.

    A row of the YAML is a run under one protocol. It has the paper's state in millions of numbers, and the paper's
    perplexities, which may be a bound like "> 260".
    """
    rows, found = read_yaml(table, plain=False), []
    for row in rows:
        run = read_run(out / "carried" / row["run"])
        results = {split: run.result(f"{split} {row['evaluated']}") for split in ("valid", "test")}
        state = row.get("numbers", results["test"]["state_size"]) if results["test"] else None
        outcome = Outcome(*(results[split].get("perplexity") for split in results), *run[1:], state)
        if any(outcome):
            cells = outcome.row("state", "valid", "test", *SIZES)
            found.append({"run": row["run"], "evaluated": row["evaluated"], **cells})
    if not found:
        return
    write_csv(folder / "carried.csv", found)
    outcomes = read_outcomes(folder / "carried.csv", "run", "evaluated")
    ours = [(row, outcomes.get((row["run"], row["evaluated"]), Outcome())) for row in rows]
    draw_carried(ours, folder / "carried.png")
    save(folder, "carried", found, carried_lines(ours), "carried.png")


def carried_lines(rows: list[tuple[dict[str, Any], Outcome]]) -> list[str]:
    """Return one table, and below it the numbers of the trainings."""
    heads = ["model", "trained", "evaluated", "state", "valid", "test", "paper state (M)", "paper valid", "paper test"]
    cells, trainings = [], {}
    for row, ours in rows:
        paper = [str(row.get(name, "-")) for name in ("state", "valid", "test")]
        named = [row["row"], row["trained"], row["evaluated"]]
        cells.append([*named, show(ours.state, 0), *ours.perplexities, *paper, f"{row['run']}.yaml"])
        if ours.diverged:
            trainings[row["run"]] = f"- {row['run']} diverged: {ours.diverged}"
        elif any(ours):
            size = f"{ours.parameters:,} parameters, {ours.updates:,} updates, {ours.hours:.3f} hours"
            trainings[row["run"]] = f"- {row['run']}: {size}"
    return [*markdown([*heads, "conf/carried/"], cells, left=3), "", *trainings.values()]


def draw_carried(rows: list[tuple[dict[str, Any], Outcome]], path: Path) -> None:
    """Draw two panels, ours and the paper's: models evaluated as trained. Lower and further left is better."""
    pyplot = load_pyplot()
    kept = [(row, ours) for row, ours in rows if (row["trained"], row["evaluated"]) not in MIXED]
    panels = (
        ("Here: small models", "BPE token", [(row, ours.state, ours.test) for row, ours in kept]),
        (
            "Schlag et al. 2021, Table 4: WikiText-103, medium",
            "word",
            [(row, row.get("state") and row["state"] * 1e6, row.get("test")) for row, _ in rows],
        ),
    )
    figure, all_axes = pyplot.subplots(1, 2, figsize=(10, 4.4))
    for axes, (title, unit, points) in zip(all_axes, panels, strict=True):
        points = [(row, state / 1000, ppl) for row, state, ppl in points if None not in (state, ppl)]
        memories = [point[1:] for point in points if point[0]["row"] == "Transformer-XL"]
        axes.plot([state for state, _ in memories], [ppl for _, ppl in memories], color=COLOURS["xl"], lw=1)
        for row, state, said in points:
            bound = isinstance(said, str)  # "> 260"
            ppl = float(said.lstrip("> ")) if bound else said
            colour, marker = STYLES[row["row"]]
            # A ring stays visible around a dot.
            face, size = ("none", 10) if row["evaluated"] == "window" else (colour, 6)
            axes.plot(state, ppl, "^" if bound else marker, color=colour, markerfacecolor=face, markersize=size)
            near = {"xy": (state, ppl), "textcoords": "offset points", "fontsize": 8}
            if bound:
                axes.annotate(f"> {ppl:g}{row['row'].removeprefix('Linear Transformer')}", xytext=(7, -3), **near)
            if axes is all_axes[0] and row["row"] == "Transformer-XL":  # other memories than the paper's
                axes.annotate(row["evaluated"].removeprefix("memory "), xytext=(0, -14), ha="center", **near)
        if points:  # a logarithmic axis cannot be empty
            axes.margins(x=0.15, y=0.1)
            use_log_scale(axes.xaxis, (1, 3))
            use_log_scale(axes.yaxis)
        axes.set_title(title)
        axes.set(xlabel="state (thousands of numbers kept of a sequence)", ylabel=f"test perplexity per {unit}")
    handles = [pyplot.Line2D([], [], color=c, marker=m, ls="", label=name) for name, (c, m) in STYLES.items()]
    handles[-1].set_label("Transformer-XL, memory + segment")
    grey = {"ls": "", "color": PUBLISHED}
    ring = {"markerfacecolor": "none", "markersize": 10}
    label = "empty: trained and evaluated without carried state"
    handles.append(pyplot.Line2D([], [], marker="o", label=label, **ring, **grey))
    handles.append(pyplot.Line2D([], [], marker="^", label="lower bound", **grey))
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    save_picture(figure, path)
