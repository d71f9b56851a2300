"""Perplexity by the size of the state, ours and the paper's: rows of a YAML like peps/carried.yaml."""

from pathlib import Path
from typing import Any, NamedTuple

from flags import read_yaml
from tables import markdown, read_csv, write_csv

from fairseq_fwp.cli.plot_style import COLOURS, PUBLISHED, load_pyplot, use_log_scale
from fairseq_fwp.cli.plot_style import save as save_picture
from reports.files import read_run, save, show

# (trained, evaluated) that differ: in the table, but not in the picture.
MIXED = {("carried", "window"), ("segments", "carried")}
# Model, colour, marker.
STYLES = {
    "Delta Network": (COLOURS["delta"], "o"),
    "Linear Transformer": (COLOURS["sum"], "s"),
    "Linear Transformer, no normalisation": (COLOURS["sum"], "D"),
    "Transformer-XL": (COLOURS["xl"], "v"),
}


class Outcome(NamedTuple):
    """A run under one protocol: state in numbers, perplexities per token; None: not run."""

    state: int | None = None
    valid: float | None = None
    test: float | None = None
    parameters: int | None = None
    updates: int | None = None
    hours: float | None = None
    diverged: str = ""  # where, in words


class Row(NamedTuple):
    """A row of the table: ours, and the paper's numbers (None: it has none).

    The paper's state is in millions of numbers; a perplexity of the paper may be a bound like "> 260".
    """

    run: str
    row: str
    trained: str
    evaluated: str
    paper: dict[str, Any]
    ours: Outcome


def read_outcome(out: Path, row: dict[str, Any]) -> Outcome:
    """Return the outcome in the files of a run; one that is neither trained nor diverged counts as not run."""
    found = read_run(out / "carried" / row["run"])
    results = {split: found.result(f"{split} {row['evaluated']}") for split in ("valid", "test")}
    state = row.get("numbers", results["test"]["state_size"]) if results["test"] else None
    valid, test = (results[split].get("perplexity") for split in ("valid", "test"))
    return Outcome(state, valid, test, *found[1:])


def read_results(path: Path, rows: list[dict[str, Any]]) -> list[Row]:
    """Return the rows with their numbers in a CSV of this report."""
    kinds = {"state": int, "valid": float, "test": float, "parameters": int, "updates": int, "hours": float}
    outcomes = {
        (line["run"], line["evaluated"]): Outcome(
            **{name: kind(line[name]) for name, kind in kinds.items() if line[name]}, diverged=line["diverged"]
        )
        for line in read_csv(path)
    }
    found = []
    for row in rows:
        ours = outcomes.get((row["run"], row["evaluated"]), Outcome())
        paper = {key: row.get(key) for key in ("state", "valid", "test")}
        found.append(Row(row["run"], row["row"], row["trained"], row["evaluated"], paper, ours))
    return found


def write(table: Path, out: Path, folder: Path) -> None:
    """Write carried.csv, table.md and carried.png of the runs in out/carried/RUN."""
    rows = read_yaml(table, plain=False)
    outcomes = [
        {"run": row["run"], "evaluated": row["evaluated"], **outcome._asdict()}
        for row in rows
        if (outcome := read_outcome(out, row)) != Outcome()
    ]
    if not outcomes:
        return
    write_csv(folder / "carried.csv", outcomes)
    found = read_results(folder / "carried.csv", rows)
    draw(found, folder / "carried.png")
    save(folder, "carried", outcomes, lines(found), "carried.png")


def lines(rows: list[Row]) -> list[str]:
    """Return one table, and below it the numbers of the trainings."""
    heads = ["model", "trained", "evaluated", "state", "valid", "test", "paper state (M)", "paper valid", "paper test"]
    cells = []
    for row in rows:
        ours = [show(ppl, 1, "diverged" if row.ours.diverged else "not run") for ppl in (row.ours.valid, row.ours.test)]
        paper = ["-" if value is None else str(value) for value in row.paper.values()]
        cells.append([row.row, row.trained, row.evaluated, show(row.ours.state, 0), *ours, *paper, f"{row.run}.yaml"])
    found = [*markdown([*heads, "conf/carried/"], cells, left=3), ""]
    for run, ours in {row.run: row.ours for row in rows if row.ours != Outcome()}.items():
        if ours.diverged:
            found.append(f"- {run} diverged: {ours.diverged}")
        else:
            found.append(f"- {run}: {ours.parameters:,} parameters, {ours.updates:,} updates, {ours.hours:.3f} hours")
    return found


def bound(value: float | str) -> tuple[float, bool]:
    """Return a perplexity, and whether it is a lower bound."""
    return (float(value.lstrip("> ")), True) if isinstance(value, str) else (value, False)


def draw(rows: list[Row], path: Path) -> None:
    """Draw two panels, ours and the paper's: models evaluated as trained. Lower and further left is better."""
    pyplot = load_pyplot()
    ours = [(row, row.ours.state, row.ours.test) for row in rows if (row.trained, row.evaluated) not in MIXED]
    papers = [(row, row.paper["state"] and row.paper["state"] * 1e6, row.paper["test"]) for row in rows]
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.4))
    titles = "Here: small models", "Schlag et al. 2021, Table 4: WikiText-103, medium"
    units = "BPE token", "word"
    for axes, points, title, unit in zip(panels, (ours, papers), titles, units, strict=True):
        points = [(state / 1000, *bound(ppl), row) for row, state, ppl in points if None not in (state, ppl)]
        memories = [point[:2] for point in points if point[-1].row == "Transformer-XL"]
        axes.plot([state for state, _ in memories], [ppl for _, ppl in memories], color=COLOURS["xl"], lw=1)
        for state, ppl, is_bound, row in points:
            colour, marker = STYLES[row.row]
            face, size = ("none", 10) if row.evaluated == "window" else (colour, 6)  # a ring stays visible around a dot
            axes.plot(state, ppl, "^" if is_bound else marker, color=colour, markerfacecolor=face, markersize=size)
            if is_bound:
                words = f"> {ppl:g}{row.row.removeprefix('Linear Transformer')}"
                axes.annotate(words, (state, ppl), xytext=(7, -3), textcoords="offset points", fontsize=8)
            if axes is panels[0] and row.row == "Transformer-XL":  # other memories than the paper's
                words = row.evaluated.removeprefix("memory ")
                where = {"xytext": (0, -14), "textcoords": "offset points", "ha": "center", "fontsize": 8}
                axes.annotate(words, (state, ppl), **where)
        if points:  # a logarithmic axis cannot be empty
            axes.margins(x=0.15, y=0.1)
            use_log_scale(axes.xaxis, (1, 3))
            use_log_scale(axes.yaxis)
        axes.set(
            title=title, xlabel="state (thousands of numbers kept of a sequence)", ylabel=f"test perplexity per {unit}"
        )
    handles = [pyplot.Line2D([], [], color=c, marker=m, ls="", label=name) for name, (c, m) in STYLES.items()]
    handles[-1].set_label("Transformer-XL, memory + segment")
    ring = {
        "color": PUBLISHED,
        "markerfacecolor": "none",
        "markersize": 10,
        "label": "empty: trained and evaluated without carried state",
    }
    handles.append(pyplot.Line2D([], [], marker="o", ls="", **ring))
    handles.append(pyplot.Line2D([], [], marker="^", ls="", color=PUBLISHED, label="lower bound"))
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    save_picture(figure, path)
