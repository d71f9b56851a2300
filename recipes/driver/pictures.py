"""Pictures of language models next to a paper's tables: a grid's rows, and a carried state by its size; of problems."""

import math
from pathlib import Path
from typing import Any

from fairseq_fwp.cli.plot_style import COLOURS, load_pyplot, save, use_log_scale

OURS, PAPER = COLOURS["delta"], COLOURS["sum"]
EDGE = 1.55  # of a grid: a row that is farther away would press all others together
Row = dict[str, Any]


def compared_split(table: Row) -> str:
    """Return the split by which a table is ranked: test if the paper has it, else valid."""
    return "test" if any("test" in row for row in table["rows"]) else "valid"


# A grid.


def draw_grid(grid: list[Row], rows: list[Row], path: Path) -> None:
    """Draw two circles a row, ours full and the paper's empty: multiples of the best row of the same table."""
    ours_of, tables = {row["run"]: row for row in rows}, []
    for table in grid:
        split = compared_split(table)
        cells = [(row["row"], ours_of.get(row["run"], {}).get(split), row.get(split)) for row in table["rows"]]
        if any(paper for *_, paper in cells):
            tables.append((table["table"], [(name, number(ours), number(paper)) for name, ours, paper in cells]))
    height = 0.9 + 0.25 * sum(len(cells) + 2 for _, cells in tables)
    figure, axes = load_pyplot().subplots(figsize=(8.4, height))
    y, ticks = 0, {}
    for title, cells in tables:
        axes.text(0, y, title, weight="bold", transform=axes.get_yaxis_transform(), va="center", fontsize=8.5)
        best = [min((cell[column] for cell in cells if cell[column]), default=math.nan) for column in (1, 2)]
        for name, ours, paper in sorted(cells, key=lambda cell: cell[2] or math.inf):
            y -= 1
            ticks[y] = name
            ratios = [ours and ours / best[0], paper and paper / best[1]]
            if None not in ratios:
                axes.plot(ratios, [y, y], color="0.8", lw=1.2, zorder=1)
            for ratio, colour, face in zip(ratios, (OURS, PAPER), (OURS, "none"), strict=True):
                axes.plot(ratio or [], [y] if ratio else [], "o", color=colour, markerfacecolor=face, markersize=7)
                if ratio and ratio > EDGE:
                    at_edge = {"ha": "right", "va": "center", "fontsize": 8.5, "transform": axes.get_yaxis_transform()}
                    axes.text(1, y, f"{ratio:.2f} \N{RIGHTWARDS ARROW}", color=colour, **at_edge)
        y -= 2
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8.5)
    axes.set_ylim(y + 1.4, 0.7)
    axes.set_xlim(right=min(axes.get_xlim()[1], EDGE))
    axes.set_xlabel("perplexity as a multiple of the best row (no circle: diverged or not run)")
    axes.grid(visible=False, axis="y")
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)
    axes.plot([], [], "o", color=OURS, label="here")
    axes.plot([], [], "o", color=PAPER, markerfacecolor="none", label="paper")
    figure.legend(loc="outside upper left", ncols=2)
    save(figure, path)


def number(value: Any) -> float | None:
    """Return a perplexity, or None for a missing one and for a word such as "diverged"."""
    return float(value) if isinstance(value, int | float) else None


# A carried state, by its size.

# Model: colour, marker.
STYLES = {
    "Delta Network": (COLOURS["delta"], "o"),
    "Delta Network, post-norm, output / sqrt(d)": (COLOURS["delta"], "^"),
    "Delta Network, attention normalisation": (COLOURS["delta"], "x"),
    "Delta Network, DPFP": (COLOURS["delta"], "P"),
    "Delta, keys of length one": (COLOURS["delta"], "*"),
    "Gated delta rule": (COLOURS["gated_delta"], "o"),
    "Linear Transformer": (COLOURS["sum"], "s"),
    "Linear Transformer, no normalisation": (COLOURS["sum"], "D"),
    "Transformer-XL": (COLOURS["xl"], "v"),
}


def draw_carried(rows: list[tuple[Row, Row]], path: Path) -> None:
    """Draw two panels, ours and the paper's, of models that are evaluated as they were trained.

    rows: a row of the YAML, and of our results. Transformer-XL has a line through its memories. Empty: no state.
    """
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.4))
    alike = [pair for pair in rows if pair[0]["evaluated"] not in ("as trained", "blocks")]
    alike = [pair for pair in alike if (pair[0]["trained"] == "segments") == (pair[0]["evaluated"] == "window")]
    ours = [(asked, found.get("state"), number(found.get("test"))) for asked, found in alike]
    paper = [
        (asked, asked["state"] * 1e6 if "state" in asked else None, bound(asked.get("test"))) for asked, _ in alike
    ]
    titles = ("Here: small models", "BPE token"), ("Schlag et al. 2021, Table 4: WikiText-103, medium", "word")
    for axes, points, (title, unit) in zip(panels, (ours, paper), titles, strict=True):
        points = [(asked, state / 1000, ppl) for asked, state, ppl in points if state and ppl]
        memories = [point[1:] for point in points if point[0]["row"] == "Transformer-XL"]
        axes.plot(*zip(*memories, strict=True) if memories else ([], []), color=COLOURS["xl"], lw=1)
        for asked, state, ppl in points:
            colour, marker = STYLES[asked["row"]]
            face = "none" if asked["evaluated"] == "window" else colour
            axes.plot(state, ppl, marker, color=colour, markerfacecolor=face, markersize=7)
            if axes is panels[1] and isinstance(asked["test"], str):
                axes.annotate(asked["test"], (state, ppl), xytext=(7, -3), textcoords="offset points", fontsize=8)
        if points:  # a logarithmic axis cannot be empty
            axes.margins(x=0.15, y=0.1)
            use_log_scale(axes.xaxis, (1, 3))
            use_log_scale(axes.yaxis)
        axes.set_title(title)
        axes.set(xlabel="state (thousands of numbers kept of a sequence)", ylabel=f"test perplexity per {unit}")
    shown = {asked["row"] for asked, found in alike if found.get("test") or "test" in asked}
    styles = {name: style for name, style in STYLES.items() if name in shown}
    styles |= {"empty: trained and evaluated without carried state": ("0.4", "o")}
    handles = [pyplot.Line2D([], [], color=c, marker=m, ls="", label=name) for name, (c, m) in styles.items()]
    handles[-1].set_markerfacecolor("none")
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    save(figure, path)


def bound(value: Any) -> float | None:
    """Return a perplexity of the paper, or the bound of one, "> 260"."""
    return float(value.removeprefix("> ")) if isinstance(value, str) else number(value)


# Problems.


def draw_shares(problems: list[str], shares: dict[str, list[float | None]], path: Path) -> None:
    """Draw the right answers in % of each model on the problems as cells; None: not run."""
    figure, axes = load_pyplot().subplots(figsize=(2.6 + 1.5 * len(problems), 0.9 + 0.32 * len(shares)))
    cells = [[math.nan if share is None else share for share in row] for row in shares.values()]
    axes.imshow(cells, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    for y, row in enumerate(cells):
        for x, share in enumerate(row):
            if not math.isnan(share):
                axes.text(x, y, f"{share:.1f}", ha="center", va="center", color="white" if share < 60 else "black")
    axes.set_xticks(range(len(problems)), problems)
    axes.set_yticks(range(len(shares)), shares)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.set_title("right answers in %")
    save(figure, path)
