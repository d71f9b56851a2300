"""Colours, style and file formats of every picture: those of fwp-plot and of recipes/."""

import csv
import io
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fairseq_fwp.cli import write_whole

if TYPE_CHECKING:
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

# One colour for each model or update rule, the same in all pictures. They are Okabe and Ito's, which colour-blind
# readers can distinguish. fwm's is another: their yellow is too pale, and their light blue too close to delta's.
COLOURS = {
    "delta": "#0072B2",
    "sum": "#D55E00",
    "softmax": "#009E73",
    "decay": "#CC79A7",
    "gated": "#E69F00",
    "fwm": "#882255",
    "gated_delta": "#56B4E9",
    "kda": "#332288",
    "gla": "#A6761D",
    "delta_product": "#44AA99",
    "gdn2": "#6699CC",
    "rwkv7": "#B2182B",
    "xl": "#000000",
}
PUBLISHED = "#666666"  # a paper's numbers, and lines to compare with
MARKERS = "osD^vPX"
FORMATS = (".png", ".svg", ".pdf")
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 130,
    "svg.hashsalt": "fairseq_fwp",  # the same picture is the same file
}


def colours(names: Iterable[str]) -> dict[str, str]:
    """Give each name the colour of the rule that it begins with, unless an earlier name has it, or an unused one."""
    of_names = dict.fromkeys(names, "")
    for name in of_names:
        own = colour_of(name.lower())
        if own not in of_names.values():
            of_names[name] = own
    palette = list(COLOURS.values())[::-1]  # names without a rule take delta's and sum's last
    free = [colour for colour in palette if colour not in of_names.values()] or palette
    others = [name for name, colour in of_names.items() if not colour]
    return of_names | {name: free[i % len(free)] for i, name in enumerate(others)}


def colour_of(name: str, default: str = "") -> str:
    """Return the colour of the longest rule name that a name begins with, or the default."""
    rules = [rule for rule in COLOURS if name.startswith(rule)]
    return COLOURS[max(rules, key=len)] if rules else default


def load_pyplot() -> ModuleType:
    """Return matplotlib.pyplot in the common style; ValueError where matplotlib is missing."""
    # fairseq turns on all debugging messages; matplotlib has hundreds.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("drawing needs matplotlib: pip install 'fairseq_fwp[plots]'.") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(STYLE)
    return pyplot


def check_path(path: Path) -> None:
    """Check that a picture can be written to `path`; ValueError says what is wrong."""
    if path.suffix not in FORMATS or not path.absolute().parent.is_dir():
        raise ValueError(f"a picture must be a {', '.join(FORMATS)} file in a folder that exists, got {path}.")


def save(figure: "Figure", path: Path) -> None:
    """Write a figure in the format of its file name, completely or not at all, and close it."""
    check_path(path)
    # No date: the same picture is the same file.
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    try:
        write_whole(path, lambda file: figure.savefig(file, format=path.suffix[1:], metadata=undated))
    finally:
        load_pyplot().close(figure)


def save_table(rows: Iterable[Sequence[object]], path: Path) -> None:
    """Write the numbers of a picture as a CSV, completely or not at all."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    write_whole(path, lambda file: file.write_text(text.getvalue(), encoding="utf-8", newline=""))


def use_log_scale(axis: "XAxis | YAxis", ticks: Sequence[float] = ()) -> None:
    """Make an axis (axes.xaxis or axes.yaxis) logarithmic, with plain numbers at `ticks` times the powers of ten.

    Call this after drawing. Without `ticks` there are three for each power of ten, or ten if the axis has only one.
    """
    from matplotlib import ticker

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    low, high = getattr(axis.axes, f"get_{axis.axis_name}lim")()
    ticks = ticks or ((1, 2, 5) if high > 12 * low else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8))
    axis.set_major_locator(ticker.LogLocator(subs=ticks))
    axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 100 else f"{x:g}"))
    axis.set_minor_locator(ticker.NullLocator())
