"""Perplexity against the size of the state, next to the paper's: ROWS is a YAML like peps/carried.yaml.

python recipes/lm_state.py names ROWS                 # the runs it names, each once
python recipes/lm_state.py protocols ROWS RUN         # how a run is evaluated: a label, a tab, flags of fwp-eval-lm
python recipes/lm_state.py csv OUT ROWS               # the numbers of the runs OUT/carried/RUN that there are
python recipes/lm_state.py table CSV ROWS             # these numbers -> Markdown
python recipes/lm_state.py picture CSV ROWS PNG       # test perplexity against state size, ours and the paper's
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lm_results import read_training

from fairseq_fwp.cli.plot_style import COLOURS, PUBLISHED, load_pyplot, save, use_log_scale

# Evaluated otherwise than trained: in the table, not in the picture.
MIXED = {("carried", "window"), ("segments", "carried")}
# Model, colour, marker.
STYLES = {
    "Delta Network": (COLOURS["delta"], "o"),
    "Linear Transformer": (COLOURS["sum"], "o"),
    "Linear Transformer, no normalisation": (COLOURS["sum"], "s"),
    "Transformer-XL": (COLOURS["xl"], "o"),
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


def read_rows(path: Path) -> list[dict[str, Any]]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def names(rows: list[dict[str, Any]]) -> list[str]:
    """The runs, each once, in the order of the rows."""
    return list(dict.fromkeys(f"carried/{row['run']}" for row in rows))


def protocols(rows: list[dict[str, Any]], run: str) -> list[str]:
    """`label<tab>flags` of each evaluation of a run."""
    return [f"{row['evaluated']}\t{row['flags']}" for row in rows if f"carried/{row['run']}" == run]


def read_outcome(out: Path, row: dict[str, Any]) -> Outcome:
    """What the files of a run say; a run that is neither trained nor diverged has not been run."""
    folder = out / "carried" / row["run"]
    stopped = folder / "diverged"
    if not stopped.exists() and not (folder / "trained").exists():
        return Outcome()
    training = read_training(folder / "train.log")
    outcome = Outcome(None, None, None, training.parameters, training.updates, training.hours)
    if stopped.exists():
        return outcome._replace(diverged=stopped.read_text(encoding="utf-8").strip())
    files = {split: folder / f"{split} {row['evaluated']}.json" for split in ("valid", "test")}
    results = {split: json.loads(file.read_text()) for split, file in files.items() if file.exists()}
    if "test" in results:
        outcome = outcome._replace(state=row.get("numbers", results["test"]["state_size"]))
    return outcome._replace(**{split: result["perplexity"] for split, result in results.items()})


def write_csv(out: Path, rows: list[dict[str, Any]]) -> None:
    """A line for each run under each of its protocols, unless it has not been run."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["run", "evaluated", *Outcome._fields])
    for row in rows:
        outcome = read_outcome(out, row)
        if outcome != Outcome():
            writer.writerow([row["run"], row["evaluated"], *outcome])


def read_results(path: Path, rows: list[dict[str, Any]]) -> list[Row]:
    """The rows with their numbers in a file that `write_csv` wrote."""
    kinds = {"state": int, "valid": float, "test": float, "parameters": int, "updates": int, "hours": float}
    with path.open(encoding="utf-8", newline="") as file:
        outcomes = {
            (line["run"], line["evaluated"]): Outcome(
                **{name: kind(line[name]) for name, kind in kinds.items() if line[name]}, diverged=line["diverged"]
            )
            for line in csv.DictReader(file)
        }
    found = []
    for row in rows:
        ours = outcomes.get((row["run"], row["evaluated"]), Outcome())
        paper = {key: row.get(key) for key in ("state", "valid", "test")}
        found.append(Row(row["run"], row["row"], row["trained"], row["evaluated"], paper, ours))
    return found


def markdown(rows: list[Row]) -> list[str]:
    """One table; numbers of the trainings under it."""
    heads = ["model", "trained", "evaluated", "state", "valid", "test", "paper state (M)", "paper valid", "paper test"]
    lines = ["| " + " | ".join([*heads, "conf/carried/"]) + " |", "| --- | --- | --- |" + " ---: |" * 6 + " --- |"]
    for row in rows:
        said = "diverged" if row.ours.diverged else "not run"
        ours = [said if ppl is None else f"{ppl:,.1f}" for ppl in (row.ours.valid, row.ours.test)]
        paper = ["-" if value is None else str(value) for value in row.paper.values()]
        state = "-" if row.ours.state is None else f"{row.ours.state:,}"
        lines.append(
            "| " + " | ".join([row.row, row.trained, row.evaluated, state, *ours, *paper, f"{row.run}.yaml"]) + " |"
        )
    lines.append("")
    for run, ours in {row.run: row.ours for row in rows if row.ours != Outcome()}.items():
        if ours.diverged:
            lines.append(f"- {run} diverged: {ours.diverged}")
        else:
            lines.append(f"- {run}: {ours.parameters:,} parameters, {ours.updates:,} updates, {ours.hours:.3f} hours")
    return lines


def bound(value: float | str) -> tuple[float, bool]:
    """A perplexity, and whether it is a lower bound."""
    return (float(value.lstrip("> ")), True) if isinstance(value, str) else (value, False)


def draw(rows: list[Row], path: Path) -> None:
    """Two panels, ours and the paper's: models evaluated as they were trained. Further down and left is better."""
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
            if axes is panels[0] and row.row == "Transformer-XL":  # the paper's memories are others
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
        "label": "trained and evaluated without carried state",
    }
    handles.append(pyplot.Line2D([], [], marker="o", ls="", **ring))
    handles.append(pyplot.Line2D([], [], marker="^", ls="", color=PUBLISHED, label="lower bound"))
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    save(figure, path)


def main(arguments: list[str]) -> None:
    match arguments:
        case ["names", rows]:
            print(*names(read_rows(Path(rows))))
        case ["protocols", rows, run]:
            print("\n".join(protocols(read_rows(Path(rows)), run)))
        case ["csv", out, rows]:
            write_csv(Path(out), read_rows(Path(rows)))
        case ["table", file, rows]:
            print("\n".join(markdown(read_results(Path(file), read_rows(Path(rows))))))
        case ["picture", file, rows, png]:
            draw(read_results(Path(file), read_rows(Path(rows))), Path(png))
        case _:
            sys.exit(
                "usage: lm_state.py names ROWS | protocols ROWS RUN | csv OUT ROWS | table CSV ROWS | "
                "picture CSV ROWS PNG"
            )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"lm_state.py: {error}")
