"""The pictures of a run: bars of the ratios that have goals, and curves over lengths."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

from record import MISSED, SECONDS

from fairseq_fwp.cli.plot_style import MARKERS, PUBLISHED, colour_of, load_pyplot, save, use_log_scale

# First words of names that do not begin with a rule, with the rule whose colour they get; and dashed lines.
RULES = {"transformer_lm": "softmax", "attention": "softmax", "favor": "sum", "dpfp": "sum"}
DASHES = {"softmax, cache in place": "--"}
IN_A_ROW = 4


class Bars(NamedTuple):
    """The ratios of the `chosen` rows of the goals, on a logarithmic axis."""

    title: str
    unit: str
    chosen: Callable

    def rows(self, record, goals):
        return [row for row in goals if row[5] != MISSED and self.chosen(row)]

    def draw(self, axes, record, goals):
        rows = self.rows(record, goals)
        for y, row in enumerate(rows):
            value = float(row[3])
            named = (colour_of(words) for words in [*row[0].split(", "), row[1]])
            axes.barh(y, value - 1, left=1, color=next(filter(None, named), PUBLISHED))
            place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
            axes.annotate(f"{value:.3g}", (max(value, 1), y), **place)
        axes.set_yticks(range(len(rows)), [f"{row[0]} ({row[1]})" for row in rows], fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1, color="black", lw=0.8)
        axes.margins(x=0.15)
        use_log_scale(axes.xaxis)
        axes.grid(visible=False, axis="y")
        axes.set(title=self.title, xlabel=self.unit)


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
    title: str = ""

    def rows(self, record, goals):
        """Return (name, {number: value}) of the curves."""
        names = dict.fromkeys(row[2] for row in record.rows if row[1] == self.stage)
        curves = ((name, record.curve(self.where, self.stage, name, self.what)) for name in names)
        return [(name, curve) for name, curve in curves if curve]

    def draw(self, axes, record, goals):
        scale, curves = self.scale or (lambda value, _: value * 2**-20), self.rows(record, goals)
        drawn = dict.fromkeys(row[2] for row in record.rows if row[0] != "machine")
        # The same in all panels, and readable without colours.
        markers = dict(zip(drawn, itertools.cycle(MARKERS + "*<>dp"), strict=False))
        for name, found in curves:
            values = [scale(value, n) for n, value in found.items()]
            colour = colour_of(RULES.get(name.split()[0], name), PUBLISHED)
            axes.plot(list(found), values, markers[name], ls=DASHES.get(name, "-"), color=colour, label=name)
        if self.log:
            use_log_scale(axes.yaxis)
        else:
            axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        lengths = sorted({length for _, found in curves for length in found})
        axes.set_xscale("log")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=9)
        axes.minorticks_off()
        axes.set(title=self.title or self.stage, xlabel=self.where.format("n"), ylabel=self.unit)


def draw(path, record, goals, panels):
    """Write the picture of a run with the panels that have measurements."""
    panels = [panel for panel in panels if panel.rows(record, goals)]
    bars = [0.9 + 0.2 * len(panel.rows(record, goals)) for panel in panels if isinstance(panel, Bars)]
    columns = 1 if bars else min(len(panels), IN_A_ROW)
    rows = -(-len(panels) // columns)
    heights = [*bars, *[4.2] * (rows - len(bars))]
    size = (8.6 if bars else max(4.5 * columns, 7), sum(heights))  # bars below each other, for a page
    figure, axes = load_pyplot().subplots(rows, columns, figsize=size, squeeze=False, height_ratios=heights)
    for place in axes.flat[len(panels) :]:
        place.axis("off")
    for place, panel in zip(axes.flat, panels, strict=False):
        panel.draw(place, record, goals)
    lines = {line.get_label(): line for place in axes.flat for line in place.get_lines() if line.get_label()[0] != "_"}
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=6)
    save(figure, path)
