"""Perplexity against the size of the state, beside the paper's: ROWS is a YAML like peps/carried.yaml.

python recipes/lm_state.py names ROWS                 # the runs it names, each once
python recipes/lm_state.py protocols ROWS RUN         # how a run is evaluated: a label, a tab, flags of fwp-eval-lm
python recipes/lm_state.py table OUT ROWS             # the runs OUT/carried/RUN -> Markdown
python recipes/lm_state.py picture OUT ROWS PNG       # test perplexity against state size, ours and the paper's
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lm_results import read_training

# Okabe and Ito's blue, vermilion and green, which stay distinct for colour-blind readers.
COLOURS = {"Delta Network": "#0072B2", "Linear Transformer": "#D55E00", "Transformer-XL": "#009E73"}

# Evaluated otherwise than trained: in the table, not in the picture.
MIXED = {("carried", "window"), ("segments", "carried")}


class Row(NamedTuple):
    """A run under one protocol: what its files say (None: not run), and the paper's numbers (None: it has none).

    state: numbers, in the paper millions; a perplexity of the paper may be a bound like "> 260".
    """

    run: str
    row: str
    trained: str
    evaluated: str
    flags: str
    paper: dict[str, Any]
    state: int | None
    valid: float | None
    test: float | None
    said: str  # in place of a perplexity


def read_rows(path: Path) -> list[dict[str, Any]]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def names(rows: list[dict[str, Any]]) -> list[str]:
    """The runs, each once, in the order of the rows."""
    return list(dict.fromkeys(f"carried/{row['run']}" for row in rows))


def protocols(rows: list[dict[str, Any]], run: str) -> list[str]:
    """`label<tab>flags` of each evaluation of a run."""
    return [f"{row['evaluated']}\t{row['flags']}" for row in rows if f"carried/{row['run']}" == run]


def read_results(out: Path, rows: list[dict[str, Any]]) -> list[Row]:
    """The rows with what the files of their runs say."""
    found = []
    for row in rows:
        folder = out / "carried" / row["run"]
        files = {split: folder / f"{split} {row['evaluated']}.json" for split in ("valid", "test")}
        results = {split: json.loads(file.read_text()) if file.exists() else {} for split, file in files.items()}
        ours = {split: result.get("perplexity") for split, result in results.items()}
        paper = {key: row.get(key) for key in ("state", "valid", "test")}
        words = [row[key] for key in ("run", "row", "trained", "evaluated", "flags")]
        said = "diverged" if (folder / "diverged").exists() else "not run"
        state = results["test"].get("state_size") and row.get("numbers", results["test"]["state_size"])
        found.append(Row(*words, paper, state, ours["valid"], ours["test"], said))
    return found


def markdown(out: Path, rows: list[Row]) -> list[str]:
    """One table; numbers of the trainings under it."""
    heads = ["model", "trained", "evaluated", "state", "valid", "test", "paper state (M)", "paper valid", "paper test"]
    lines = ["| " + " | ".join([*heads, "conf/carried/"]) + " |", "| --- | --- | --- |" + " ---: |" * 6 + " --- |"]
    for row in rows:
        ours = [row.said if ppl is None else f"{ppl:,.1f}" for ppl in (row.valid, row.test)]
        paper = ["-" if value is None else str(value) for value in row.paper.values()]
        state = "-" if row.state is None else f"{row.state:,}"
        lines.append(
            "| " + " | ".join([row.row, row.trained, row.evaluated, state, *ours, *paper, f"{row.run}.yaml"]) + " |"
        )
    lines.append("")
    for run in dict.fromkeys(row.run for row in rows):
        folder = out / "carried" / run
        if (folder / "diverged").exists():
            lines.append(f"- {run} diverged: {(folder / 'diverged').read_text(encoding='utf-8').strip()}")
        elif (folder / "trained").exists():
            training = read_training(folder / "train.log")
            lines.append(
                f"- {run}: {training.parameters:,} parameters, {training.updates:,} updates, {training.hours:.3f} hours"
            )
    return lines


def bound(value: float | str) -> tuple[float, bool]:
    """A perplexity, and whether it is a lower bound."""
    return (float(value.lstrip("> ")), True) if isinstance(value, str) else (value, False)


def draw(rows: list[Row], path: Path) -> None:
    """Two panels, ours and the paper's: models evaluated as they were trained. Further down and left is better."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("drawing needs matplotlib: pip install 'fairseq_fwp[plots]'.") from error
    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    ours = [(row, row.state, row.test) for row in rows if (row.trained, row.evaluated) not in MIXED]
    papers = [(row, row.paper["state"] and row.paper["state"] * 1e6, row.paper["test"]) for row in rows]
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    titles = "here: test set, small models", "Schlag et al. 2021, Table 4: WikiText-103, medium"
    for axes, points, title in zip(panels, (ours, papers), titles, strict=True):
        points = [(state, *bound(ppl), row) for row, state, ppl in points if None not in (state, ppl)]
        for name, colour in COLOURS.items():
            own = [point for point in points if point[-1].row.startswith(name)]
            if name == "Transformer-XL":
                axes.plot([point[0] for point in own], [point[1] for point in own], color=colour, lw=1)
            for state, ppl, is_bound, row in own:
                limited = row.evaluated == "window"
                face = "none" if limited else colour
                axes.plot(state, ppl, "^" if is_bound else "o", color=colour, markerfacecolor=face, markersize=7)
                words = row.evaluated if name == "Transformer-XL" else row.row + limited * ", context limited"
                words += is_bound * f": above {ppl:g}"
                offset = (-6, -14) if name == "Transformer-XL" else (8, 3)
                where = {"xytext": offset, "textcoords": "offset points", "fontsize": 7.5}
                if axes is panels[0] or name != "Transformer-XL":  # memories are others in the paper
                    axes.annotate(words, (state, ppl), color=colour, **where)
            axes.plot([], [], "o", color=colour, label=name)
        if points:  # a logarithmic axis cannot be empty
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.margins(x=0.25)
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_formatter(ticker.NullFormatter())
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("numbers kept of a sequence")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("perplexity")
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str]) -> None:
    match arguments:
        case ["names", rows]:
            print(*names(read_rows(Path(rows))))
        case ["protocols", rows, run]:
            print("\n".join(protocols(read_rows(Path(rows)), run)))
        case ["table", out, rows]:
            print("\n".join(markdown(Path(out), read_results(Path(out), read_rows(Path(rows))))))
        case ["picture", out, rows, png]:
            draw(read_results(Path(out), read_rows(Path(rows))), Path(png))
        case _:
            sys.exit("usage: lm_state.py names ROWS | protocols ROWS RUN | table OUT ROWS | picture OUT ROWS PNG")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"lm_state.py: {error}")
