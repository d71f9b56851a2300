"""Tables and pictures of the trained points: the paper's Figures 2 to 5, and the capacity of every rule with every map.

Writes points.csv (a row for each finished point), curves.csv (each of its evaluations) and table.md (a row for all
seeds of a model at one size). Draws the pictures that have points, and names points without a picture.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import commands
import grid
from commands import RecipeError
from flags import read_yaml
from grid import Training
from log import read_training
from retrieval import Point
from tables import markdown, write_csv

from fairseq_fwp.cli.plot_style import COLOURS, MARKERS, PUBLISHED, load_pyplot, save

# Names of the paper's models in legends; other models are named by their flags.
LABELS = {
    "softmax_retrieval": "softmax",
    "sum_retrieval": "sum, ELU+1",
    "sum_dpfp1_retrieval": "sum, DPFP-1",
    "sum_dpfp2_retrieval": "sum, DPFP-2",
    "sum_dpfp3_retrieval": "sum, DPFP-3",
    "sum_favor64_retrieval": "sum, FAVOR+ 64",
    "sum_favor128_retrieval": "sum, FAVOR+ 128",
    "sum_favor512_retrieval": "sum, FAVOR+ 512",
    "gated_dpfp1_retrieval": "gated, DPFP-1",
    "decay_dpfp1_retrieval": "decay, DPFP-1",
    "fwm_tanh_retrieval,batch-size=128,lr=1e-4": "fwm, tanh: Schlag (2021)",
    "fwm_dpfp1_retrieval": "fwm, DPFP-1: Schlag (2021) with DPFP",
    "delta_retrieval": "delta, ELU+1",
    "delta_dpfp1_retrieval": "delta, DPFP-1: the paper's",
    "delta_dpfp2_retrieval": "delta, DPFP-2",
}
# Flags of the data and the length of training; a model is defined by all others.
TRAINING_FLAGS = ["num-keys", "seed", "with-replacement", "valid-length", "max-update", "stop-updates", "stop-loss"]
# The model without a preset, whose capacity is drawn.
BARE_ARCH = "fwp_associative_retrieval"
# The share of black (below 0) or white in the colour of a rule, for its first model, its second, ...
SHADES = (0, -0.45, 0.5, -0.65, 0.25)
# One for each model of a picture, so that it is readable without colours.
ALL_MARKERS = MARKERS + "*<>dp"
# The model's own; to ask it, fairseq would have to be imported.
DEFAULTS = {"update-rule": "sum", "feature-map": "elu"}
# The sizes whose learning curves the paper draws.
FIGURE_3_SIZE = 20
FIGURE_4_SIZE = 600

TITLES = {
    "figure2": "Figure 2: setting 1; dotted: numbers of features",
    "ratio": "Setting 1: D features hold at most D keys",
    "figure3": f"Figure 3: setting 2, {FIGURE_3_SIZE} keys, {2 * FIGURE_3_SIZE} pairs; one line per seed",
    "figure4": f"Figure 4: setting 1, {FIGURE_4_SIZE} keys",
    "figure5": "Figure 5: setting 2, 2 S pairs; dotted: numbers of features",
    "capacity": "Setting 1, every rule with every map: keys that are held, of S",
}


class Outcome(NamedTuple):
    """The contents of a log: evaluations are (update, loss)."""

    evaluations: list[tuple[int, float]]
    seconds: float
    feature_dim: int | None
    diverged: bool

    @property
    def best(self) -> float:
        """The paper's measure; infinite without an evaluation."""
        return min((loss for _, loss in self.evaluations if loss == loss), default=float("inf"))

    @property
    def updates(self) -> int:
        """The last update that was evaluated."""
        return self.evaluations[-1][0] if self.evaluations else 0


class Result(NamedTuple):
    """A finished point."""

    point: Point
    outcome: Outcome

    @property
    def arch(self) -> str:
        return self.point.flags["arch"]

    @property
    def size(self) -> int:
        return self.point.size

    @property
    def replaced(self) -> bool:
        """Whether the point is of setting 2."""
        return self.point.flags.get("with-replacement") == "true"

    @property
    def model(self) -> str:
        """The common part of all seeds and sizes of a model: its architecture and other flags, sorted."""
        flags = {flag: value for flag, value in self.point.flags.items() if flag not in TRAINING_FLAGS}
        return ",".join([flags.pop("arch"), *(f"{flag}={value}" for flag, value in sorted(flags.items()))])

    @property
    def name(self) -> str:
        """The name of the model in the table."""
        return re.sub(r",\s*", ", ", self.model.replace("_retrieval", "", 1))

    @property
    def rule(self) -> str:
        """The update rule: of the flag, or of the preset, whose name begins with it."""
        named = [rule for rule in COLOURS if self.arch.startswith(rule)]
        preset = max(named, key=len) if named else DEFAULTS["update-rule"]
        return self.point.flags.get("update-rule", preset)


def read_outcome(training: Training) -> Outcome | None:
    """Return the outcome of a point; None if it is not finished."""
    if not grid.is_finished(training):
        return None
    folder = training.folder
    text = (folder / "train.log").read_text(encoding="utf-8", errors="replace")
    found = read_training(folder / "train.log")
    dim = re.search(r"feature_dim=(\d+)", text)
    return Outcome(found.curve("loss"), found.seconds, int(dim[1]) if dim else None, found.not_finite)


def read_results(points: list[Point], common: dict[str, str], out: Path) -> list[Result]:
    """Return the finished points of the grids, in their order."""
    outcomes = ((point, read_outcome(point.training(common, out))) for point in points)
    return [Result(point, outcome) for point, outcome in outcomes if outcome]


def write_tables(results: list[Result], out: Path) -> None:
    """Write points.csv and curves.csv."""
    rows = []
    for point, outcome in results:
        row: dict[str, Any] = {"point": point.name, "S": point.size, "feature_dim": outcome.feature_dim or ""}
        at_update = next((update for update, loss in outcome.evaluations if loss == outcome.best), "")
        row |= {"best_loss": f"{outcome.best:.3g}", "at_update": at_update, "updates": outcome.updates}
        rows.append(row | {"seconds": f"{outcome.seconds:.0f}", "diverged": "yes" if outcome.diverged else ""})
    write_csv(out / "points.csv", rows)
    curves = [
        {"point": point.name, "update": update, "loss": f"{loss:.6g}"}
        for point, outcome in results
        for update, loss in outcome.evaluations
    ]
    write_csv(out / "curves.csv", curves, ("point", "update", "loss"))


def lines_of(results: list[Result], published: dict[str, Any]) -> list[str]:
    """Return a table, a row for all seeds of a model at one size, with the released run's loss next to ours.

    Models without a preset are left out in setting 1: there are as many as rules and maps, and a picture shows them.
    """
    heads = ["setting", "model", "S", "best loss of each run", "updates", "paper"]
    cells = []
    rows: dict[tuple[str, str, int, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.arch != BARE_ARCH or result.replaced:
            pairs = result.point.flags.get("valid-length")
            shown = result.name + (f", {pairs} pairs in evaluation" if pairs else "")
            rows["2" if result.replaced else "1", shown, result.size, result.model].append(result)
    for (setting, shown, size, model), found in sorted(rows.items()):
        theirs = published[f"setting {setting}"].get(model, {}).get(size)
        paper = "-" if theirs is None else f"{theirs:.3g}"
        losses = ", ".join(f"{result.outcome.best:.3g}" for result in found)
        updates = ", ".join(f"{result.outcome.updates:,}" for result in found)
        cells.append([setting, shown, size, losses, updates, paper])
    return markdown(heads, cells, left=2)


def by_size(results: list[Result]) -> dict[int, list[float]]:
    """Return the losses of all seeds, by S."""
    losses = defaultdict(list)
    for result in results:
        losses[result.size].append(result.outcome.best)
    return dict(sorted(losses.items()))


class Style(NamedTuple):
    """The style in which a model is drawn."""

    label: str
    colour: str
    marker: str


def model_styles(results: list[Result]) -> dict[str, Style]:
    """Return the style of every model: a shade of the colour of its rule, and a marker."""
    models: dict[str, dict[str, str]] = defaultdict(dict)
    for result in results:
        models[result.rule][result.model] = LABELS.get(result.model, result.name)
    styles = {}
    markers = itertools.cycle(ALL_MARKERS)
    for rule, labels in models.items():
        for index, (model, label) in enumerate(labels.items()):
            colour = shade(COLOURS.get(rule, PUBLISHED), SHADES[index % len(SHADES)])
            styles[model] = Style(label, colour, next(markers))
    return styles


def shade(colour: str, amount: float) -> str:
    """Return the colour mixed with that amount of white, or of black if it is below 0."""
    from matplotlib.colors import to_hex, to_rgb

    return to_hex([(1 - abs(amount)) * part + max(0, amount) for part in to_rgb(colour)])


def by_model(results: list[Result]) -> dict[str, list[Result]]:
    """Return the results of each model, in their order."""
    models = defaultdict(list)
    for result in results:
        models[result.model].append(result)
    return models


def draw_losses(axes: Any, results: list[Result], styles: dict[str, Style], published: dict[str, Any]) -> None:
    """Draw ours as full symbols with a line through medians, the paper's released runs empty, and features dotted.

    The number of features of FAVOR+ is left out: its losses leave zero long before.
    """
    largest = max(result.size for result in results)
    empty = {"ms": 6, "mfc": "none", "lw": 0.8}
    compared = False
    for model, found in by_model(results).items():
        label, colour, marker = styles[model]
        losses = by_size(found)
        axes.plot(list(losses), [median(values) for values in losses.values()], color=colour, lw=1.5)
        sizes = [size for size, values in losses.items() for _ in values]
        flat = [loss for values in losses.values() for loss in values]
        axes.plot(sizes, flat, marker, color=colour, ms=5, label=label)
        theirs = {size: loss for size, loss in published.get(model, {}).items() if size <= largest}
        axes.plot(list(theirs), list(theirs.values()), marker + "--", color=colour, alpha=0.8, **empty)
        compared = compared or bool(theirs)
    if compared:
        axes.plot([], [], "o--", color=PUBLISHED, label="empty: the paper's released runs", **empty)
    for dim in {result.outcome.feature_dim or 0 for result in results if "favor" not in result.model}:
        if 0 < dim <= largest:
            axes.axvline(dim, color=PUBLISHED, ls=":", lw=1.2)
            axes.text(dim, 1, f" {dim}", color=PUBLISHED, transform=axes.get_xaxis_transform(), va="top", fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("number of keys S")
    axes.set_ylabel("best evaluation loss (half the squared distance)")


def draw_curves(axes: Any, results: list[Result], styles: dict[str, Style]) -> None:
    """Draw evaluations over updates, a line for each seed."""
    for model, found in by_model(results).items():
        label, colour, marker = styles[model]
        for index, result in enumerate(found):
            updates, losses = zip(*result.outcome.evaluations, strict=True)
            axes.plot(updates, losses, marker, ls="-", color=colour, lw=1.6, ms=4, markevery=0.12, alpha=0.9)
            axes.plot(updates[-1], losses[-1], marker, color=colour, ms=5, label=None if index else label)
    axes.set_xlabel("updates")
    axes.set_ylabel("evaluation loss (half the squared distance)")


class Cell(NamedTuple):
    """The results of all seeds of a rule with a map of this many features, at one number of keys."""

    size: int
    results: list[Result]

    @property
    def loss(self) -> float:
        return median(result.outcome.best for result in self.results)

    @property
    def held(self) -> int:
        """The number of the S keys that are answered: each other one costs 1 / 2."""
        return round(max(0, self.size * (1 - 2 * self.loss)))


# A rule, a map, and its number of features.
Block = tuple[str, str, int]


def by_rule_and_map(results: list[Result]) -> dict[Block, dict[float, Cell]]:
    """Return cells by S / feature dimension, of rules and maps without a preset; of several models the first."""
    cells: dict[Block, dict[float, Cell]] = defaultdict(dict)
    models: dict[Block, str] = {}
    for result in results:
        dim = result.outcome.feature_dim
        if result.arch != BARE_ARCH or not dim:
            continue
        block = (result.rule, result.point.flags.get("feature-map", DEFAULTS["feature-map"]), dim)
        if models.setdefault(block, result.model) == result.model:
            cells[block].setdefault(result.size / dim, Cell(result.size, [])).results.append(result)
    return cells


def draw_capacity(axes: Any, results: list[Result]) -> Any:
    """Draw a row for each rule and a block for each map, by S / feature dimension: loss and answered keys."""
    cells = by_rule_and_map(results)
    rules = list(dict.fromkeys(rule for rule, *_ in cells))
    maps = list(dict.fromkeys((feature_map, dim) for _, feature_map, dim in cells))
    ratios = sorted({ratio for found in cells.values() for ratio in found})
    columns = list(itertools.product(maps, ratios))
    losses = [[float("nan")] * len(columns) for _ in rules]
    for (y, rule), (x, (block, ratio)) in itertools.product(enumerate(rules), enumerate(columns)):
        if cell := cells.get((rule, *block), {}).get(ratio):
            losses[y][x] = cell.loss
            colour = "white" if cell.loss < 0.1 else "black"
            axes.text(x, y, cell.held, ha="center", va="center", fontsize=8, color=colour)
    axes.grid(False)
    image = axes.imshow(losses, aspect="auto", cmap="viridis", norm="log", vmin=0.001, vmax=0.5)
    axes.set_xticks(range(len(columns)), [f"{ratio:g}" for _, ratio in columns], fontsize=7)
    axes.set_yticks(range(len(rules)), rules)
    axes.set_xlabel("number of keys over number of features, S / D; white line: 1")
    above = axes.secondary_xaxis("top")
    middles = [(index + 0.5) * len(ratios) - 0.5 for index in range(len(maps))]
    above.set_xticks(middles, [f"{feature_map}, D = {dim}" for feature_map, dim in maps])
    for start in range(0, len(columns), len(ratios)):
        axes.axvline(start - 0.5, color="black", lw=2)
        axes.axvline(start + sum(ratio <= 1 for ratio in ratios) - 0.5, color="white", lw=1.5)
    for ticks in (axes, above):
        ticks.tick_params(length=0)
    return image


def draw_ratio(axes: Any, results: list[Result], styles: dict[str, Style]) -> None:
    """Draw the loss over S / D, with D the feature dimension, and its lower bound.

    All outputs for the S queries of a sequence are a matrix of rank D; the right answers are one of rank S with
    singular values of 1. Half the squared distance is at least (S - D) / 2, and the mean over queries (1 - D / S) / 2.
    """
    for model, found in by_model(results).items():
        label, colour, marker = styles[model]
        dim = found[0].outcome.feature_dim
        losses = by_size(found)
        ratios = [size / dim for size in losses]
        axes.plot(ratios, [median(values) for values in losses.values()], marker + "-", color=colour, ms=5, label=label)
    axes.axvline(1, color=PUBLISHED, ls=":")
    ratios = [1 + step / 100 for step in range(26)]
    least = [(1 - 1 / ratio) / 2 for ratio in ratios]
    axes.plot(ratios, least, "--", color=PUBLISHED, label="least possible: (1 - D / S) / 2")
    axes.set_xlabel("number of keys over number of features, S / D")
    axes.set_ylabel("best evaluation loss, median of seeds")


class Picture(NamedTuple):
    """A picture and its points: draw_on(axes, results, *given) returns an image if it needs a colour bar."""

    name: str
    draw_on: Callable[..., Any]
    results: list[Result]
    given: tuple[Any, ...] = ()
    log: bool = False
    size: tuple[float, float] = (8.4, 4.8)


def plan_pictures(results: list[Result], published: dict[str, Any]) -> list[Picture]:
    """Return the pictures that have points."""
    shown = [result for result in results if isfinite(result.outcome.best) and "valid-length" not in result.point.flags]
    first = [result for result in shown if not result.replaced]
    cells = [cell for row in by_rule_and_map(first).values() for cell in row.values()]
    capacity = [result for cell in cells for result in cell.results]
    first = [result for result in first if result.arch != BARE_ARCH or not result.outcome.feature_dim]
    near = [result for result in first if result.size != FIGURE_4_SIZE]
    far = [result for result in first if result.size == FIGURE_4_SIZE]
    ratio = [result for result in near if result.outcome.feature_dim and "favor" not in result.model]
    second = [result for result in shown if result.replaced]
    early = [result for result in second if result.size == FIGURE_3_SIZE]
    one, two = (model_styles(first), published["setting 1"]), (model_styles(second), published["setting 2"])
    planned = [
        Picture("figure2", draw_losses, near, one),
        Picture("ratio", draw_ratio, ratio, one[:1]),
        Picture("figure3", draw_curves, early, two[:1], log=True),
        Picture("figure4", draw_curves, far, one[:1]),
        Picture("figure5", draw_losses, second, two, log=True),
        Picture("capacity", draw_capacity, capacity, size=(12, 3.4)),
    ]
    return [picture for picture in planned if picture.results]


def draw(picture: Picture, out: Path) -> None:
    """Draw a picture into its file."""
    figure, axes = load_pyplot().subplots(figsize=picture.size)
    image = picture.draw_on(axes, picture.results, *picture.given)
    axes.set_title(TITLES[picture.name])
    if picture.log:
        axes.set_yscale("log")
    if image:
        figure.colorbar(image, label="best evaluation loss", pad=0.01)
    else:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, out / f"{picture.name}.png")


def why_not_drawn(result: Result) -> str:
    """Return the reason why a point is not in a picture."""
    if not isfinite(result.outcome.best):
        return "none of its evaluations is a number"
    if "valid-length" in result.point.flags:
        return "its evaluations have another number of pairs"
    return "its cell of capacity.png has a model with other flags"


def write(recipe: Path, points: list[Point], common: dict[str, str], out: Path) -> None:
    """Write everything, and name points without a picture. Raises RecipeError if no point is finished."""
    results = read_results(points, common, out)
    if not results:
        raise RecipeError(f"{out} must have a finished point of these grids, got none: run the stage train first.")
    # The losses of the paper's released runs, by S, of each model in each setting.
    published = read_yaml(recipe / "published.yaml", plain=False)
    write_tables(results, out)
    commands.write(out / "table.md", "\n".join(lines_of(results, published)) + "\n")
    pictures = plan_pictures(results, published)
    for picture in pictures:
        draw(picture, out)
        print(out / f"{picture.name}.png")
    drawn = {result.point.name for picture in pictures for result in picture.results}
    for result in results:
        if result.point.name not in drawn:
            print(f"not drawn: {result.point.name}: {why_not_drawn(result)}; it is in points.csv.")
    if left := len(points) - len(results):
        print(f"not drawn: {left} points that are not finished; the stage plan names them.")
