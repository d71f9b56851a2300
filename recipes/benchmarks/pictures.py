"""The pictures of a run: bars of the ratios that have goals, and curves over lengths."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

from record import MISSED, SECONDS

from fairseq_fwp.cli.plot_style import MARKERS, PUBLISHED, colour_of, load_pyplot, save, use_log_scale

# First words of names that do not begin with a rule, with the rule whose colour they get; and dashed lines.
RULES = {"transformer_lm": "softmax", "attention": "softmax", "favor": "sum", "dpfp": "sum"}
DASHES = {"softmax, cache in place": "--"}
ALL_MARKERS = MARKERS + "*<>dp"  # readable without colours
IN_A_ROW = 4


class Bars(NamedTuple):
    """The ratios of the `chosen` rows of the goals, on a logarithmic axis."""

    title: str
    unit: str
    chosen: Callable = lambda row: True


class Curves(NamedTuple):
    """The smallest value of every contender at the places called `where`, over the number that replaces {}.

    scale: (value, number) -> the drawn number, by default megabytes.
    """

    where: str
    stage: str
    unit: str
    what: str = SECONDS
    scale: Callable | None = None
    log: bool = False


def draw_bars(axes, panel, record, goals):
    rows = [row for row in goals if row[5] != MISSED and panel.chosen(row)]
    for y, row in enumerate(rows):
        value = float(row[3])
        named = (colour_of(words) for words in [*row[0].split(", "), row[1]])
        axes.barh(y, value - 1, left=1, color=next(filter(None, named), PUBLISHED))
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(f"{value:.3g}", (max(value, 1), y), **place)
    axes.set_yticks(
        range(len(rows)),
        [f"{row[0]} ({row[1]})" for row in rows],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.axvline(1, color="black", lw=0.8)
    axes.margins(x=0.15)
    use_log_scale(axes.xaxis)
    axes.grid(visible=False, axis="y")
    axes.set(title=panel.title, xlabel=panel.unit)


def draw_curves(axes, panel, record, _):
    scale = panel.scale or (lambda value, _: value * 2**-20)
    lengths = set()
    drawn = dict.fromkeys(row[2] for row in record.rows if row[0] != "machine")
    markers = dict(zip(drawn, itertools.cycle(ALL_MARKERS), strict=False))  # the same in all panels
    for name in dict.fromkeys(row[2] for row in record.rows if row[1] == panel.stage):
        found = record.curve(panel.where, panel.stage, name, panel.what)
        if found:
            lengths |= set(found)
            values = [scale(value, n) for n, value in found.items()]
            colour = colour_of(RULES.get(name.split()[0], name), PUBLISHED)
            axes.plot(list(found), values, markers[name], ls=DASHES.get(name, "-"), color=colour, label=name)
    if panel.log:
        use_log_scale(axes.yaxis)
    else:
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.set_xscale("log")
    axes.set_xticks(sorted(lengths), [f"{length:,}" for length in sorted(lengths)], fontsize=9)
    axes.minorticks_off()
    axes.set(title=panel.stage, xlabel=panel.where.format("n"), ylabel=panel.unit)


def is_there(panel, record):
    return isinstance(panel, Bars) or any(
        record.curve(panel.where, panel.stage, name, panel.what) for name in {row[2] for row in record.rows}
    )


def draw(path, record, goals, panels):
    """Write the picture of a run with the panels that have measurements."""
    pyplot = load_pyplot()
    panels = [panel for panel in panels if is_there(panel, record)]
    rows = -(-len(panels) // IN_A_ROW)
    columns = -(-len(panels) // rows)
    longest = max(
        (len([row for row in goals if panel.chosen(row)]) for panel in panels if isinstance(panel, Bars)), default=0
    )
    wide = 11 if longest else 4.5
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(wide * columns, max(4.2, 0.2 * longest) * rows), squeeze=False
    )
    for place in axes.flat[len(panels) :]:
        place.axis("off")
    for place, panel in zip(axes.flat, panels, strict=False):
        (draw_bars if isinstance(panel, Bars) else draw_curves)(place, panel, record, goals)
    lines = {
        line.get_label(): line
        for place in axes.flat
        for line in place.get_lines()
        if not line.get_label().startswith("_")
    }
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=6)
    save(figure, path)
