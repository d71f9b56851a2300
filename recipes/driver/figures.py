"""Tables and pictures of the trained points: the paper's Figures 2 to 5, and the capacity of every rule with every map.

Writes points.csv (a row for each finished point), curves.csv (each of its evaluations) and table.md (a row for all
seeds of a model at one size). Draws the pictures that have points.
"""

import re
from collections.abc import Callable
from itertools import cycle, product
from math import inf, isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import commands
from engine import Training
from flags import read_yaml
from log import read_training
from tables import group, markdown, write_csv

from fairseq_fwp.cli.plot_style import COLOURS, MARKERS, PUBLISHED, colours, load_pyplot, save

# Flags of the data and the length of training; a model is defined by all others.
TRAINING_FLAGS = ["num-keys", "seed", "with-replacement", "valid-length", "max-update", "stop-updates", "stop-loss"]
# The model without a preset, whose capacity is drawn.
BARE_ARCH = "fwp_associative_retrieval"
# The model's own; to ask it, fairseq would have to be imported.
DEFAULTS = {"update-rule": "sum", "feature-map": "elu"}
# The sizes whose learning curves the paper draws.
FIGURE_3_SIZE = 20
FIGURE_4_SIZE = 600
LOSS = "evaluation loss (half the squared distance)"


class Result(NamedTuple):
    """A finished point: flags of its grid, evaluations (update, loss), seconds, features, whether it diverged."""

    name: str
    flags: dict[str, str]
    evaluations: list[tuple[int, float]]
    seconds: float
    feature_dim: int | None
    diverged: bool

    @property
    def size(self) -> int:
        """S, the number of keys."""
        return int(self.flags["num-keys"])

    @property
    def best(self) -> float:
        """The paper's measure; infinite without an evaluation."""
        return min((loss for _, loss in self.evaluations if loss == loss), default=inf)

    @property
    def updates(self) -> int:
        return self.evaluations[-1][0] if self.evaluations else 0

    @property
    def is_bare(self) -> bool:
        return self.flags["arch"] == BARE_ARCH

    @property
    def replaced(self) -> bool:
        """Whether the point is of setting 2."""
        return self.flags.get("with-replacement") == "true"

    @property
    def model(self) -> str:
        """The common part of all seeds and sizes of a model: its architecture and other flags, sorted."""
        flags = {flag: value for flag, value in self.flags.items() if flag not in TRAINING_FLAGS}
        return ",".join([flags.pop("arch"), *(f"{flag}={value}" for flag, value in sorted(flags.items()))])

    @property
    def shown(self) -> str:
        """The name of the model in the table."""
        return re.sub(r",\s*", ", ", self.model.replace("_retrieval", "", 1))

    @property
    def rule(self) -> str:
        """The update rule: of the flag, or of the preset, whose name begins with it."""
        named = [rule for rule in COLOURS if self.flags["arch"].startswith(rule)]
        return self.flags.get("update-rule", max(named, key=len, default=DEFAULTS["update-rule"]))


def read_result(training: Training) -> Result:
    path = training.folder / "train.log"
    log, dim = read_training(path), re.search(r"feature_dim=(\d+)", path.read_text("utf-8", errors="replace"))
    features = int(dim[1]) if dim else None
    return Result(training.name, training.about, log.curve("loss"), log.seconds, features, log.not_finite)


def write_tables(results: list[Result], out: Path) -> None:
    points, curves = [], []
    for result in results:
        at_best = next((update for update, loss in result.evaluations if loss == result.best), "")
        row = {"point": result.name, "S": result.size, "feature_dim": result.feature_dim or ""}
        row |= {"best_loss": f"{result.best:.3g}", "at_update": at_best, "updates": result.updates}
        points.append(row | {"seconds": f"{result.seconds:.0f}", "diverged": "yes" if result.diverged else ""})
        curves += [{"point": result.name, "update": at, "loss": f"{loss:.6g}"} for at, loss in result.evaluations]
    write_csv(out / "points.csv", points)
    write_csv(out / "curves.csv", curves, ("point", "update", "loss"))


def lines_of(results: list[Result], published: dict[str, Any]) -> list[str]:
    """Return a table, a row for all seeds of a model at one size, with the released run's loss next to ours.

    Models without a preset are left out in setting 1: there are as many as rules and maps, and a picture shows them.
    """

    def row_of(result: Result) -> tuple[str, str, int, str]:
        pairs = result.flags.get("valid-length")
        shown = result.shown + (f", {pairs} pairs in evaluation" if pairs else "")
        return "2" if result.replaced else "1", shown, result.size, result.model

    cells = []
    rows = group((result for result in results if not result.is_bare or result.replaced), row_of)
    for (setting, shown, size, model), found in sorted(rows.items()):
        theirs = published[f"setting {setting}"].get(model, {}).get(size)
        losses = ", ".join(f"{result.best:.3g}" for result in found)
        updates = ", ".join(f"{result.updates:,}" for result in found)
        cells.append([setting, shown, size, losses, updates, "-" if theirs is None else f"{theirs:.3g}"])
    return markdown(["setting", "model", "S", "best loss of each run", "updates", "paper"], cells, left=2)


# Pictures.


Styles = dict[str, dict[str, str]]  # label, colour and marker of each model


def model_styles(results: list[Result]) -> Styles:
    names = {result.model: result.shown for result in results}
    colour, markers = colours(names.values()), cycle(MARKERS + "*<>dp")  # readable without colours, too
    return {model: {"label": name, "color": colour[name], "marker": next(markers)} for model, name in names.items()}


def draw_losses(axes: Any, results: list[Result], styles: Styles, published: dict[str, Any]) -> None:
    """Draw ours as full symbols with a line through medians, the paper's released runs empty, and features dotted.

    The number of features of FAVOR+ is left out: its losses leave zero long before.
    """
    largest, compared = max(result.size for result in results), False
    empty = {"ms": 6, "mfc": "none", "lw": 0.8}
    for model, found in group(results, lambda result: result.model).items():
        style, found = styles[model], sorted(found, key=lambda result: result.size)
        sizes = group(found, lambda result: result.size)
        medians = [median(result.best for result in seeds) for seeds in sizes.values()]
        axes.plot(list(sizes), medians, color=style["color"], lw=1.5)
        axes.plot([result.size for result in found], [result.best for result in found], ls="", ms=5, **style)
        theirs = {size: loss for size, loss in published.get(model, {}).items() if size <= largest}
        axes.plot(list(theirs), list(theirs.values()), ls="--", alpha=0.8, **empty, **style | {"label": None})
        compared = compared or bool(theirs)
    if compared:
        axes.plot([], [], "o--", color=PUBLISHED, label="empty: the paper's released runs", **empty)
    for dim in {result.feature_dim or 0 for result in results if "favor" not in result.model}:
        if 0 < dim <= largest:
            axes.axvline(dim, color=PUBLISHED, ls=":", lw=1.2)
            axes.text(dim, 1, f" {dim}", color=PUBLISHED, transform=axes.get_xaxis_transform(), va="top", fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="number of keys S", ylabel=f"best {LOSS}")


def draw_curves(axes: Any, results: list[Result], styles: Styles) -> None:
    """Draw evaluations over updates, a line for each seed."""
    for model, found in group(results, lambda result: result.model).items():
        style = styles[model]
        for index, result in enumerate(found):
            updates, losses = zip(*result.evaluations, strict=True)
            axes.plot(updates, losses, lw=1.6, ms=4, markevery=0.12, alpha=0.9, **style | {"label": None})
            axes.plot(updates[-1], losses[-1], ls="", ms=5, **style | {"label": None if index else style["label"]})
    axes.set(xlabel="updates", ylabel=LOSS)


def capacity(results: list[Result]) -> dict[tuple[str, str, int], dict[float, list[Result]]]:
    """Return results by (rule, map, features), then by S / features, without presets; of several models the first."""

    def block_of(result: Result) -> tuple[str, str, int]:
        return result.rule, result.flags.get("feature-map", DEFAULTS["feature-map"]), result.feature_dim

    blocks = group((result for result in results if result.is_bare and result.feature_dim), block_of)
    for block, found in blocks.items():
        found = [result for result in found if result.model == found[0].model]
        blocks[block] = group(found, lambda result: result.size / result.feature_dim)
    return blocks


def draw_capacity(axes: Any, results: list[Result]) -> None:
    """Draw a row for each rule and a block for each map, by S / feature dimension: loss and answered keys."""
    cells = capacity(results)
    rules = list(dict.fromkeys(rule for rule, *_ in cells))
    maps = list(dict.fromkeys(block[1:] for block in cells))
    ratios = sorted({ratio for found in cells.values() for ratio in found})
    columns = list(product(maps, ratios))
    losses = [[nan] * len(columns) for _ in rules]
    for (y, rule), (x, (block, ratio)) in product(enumerate(rules), enumerate(columns)):
        if cell := cells.get((rule, *block), {}).get(ratio):
            loss = losses[y][x] = median(result.best for result in cell)
            answered = round(max(0, cell[0].size * (1 - 2 * loss)))  # each other key costs 1 / 2
            axes.text(x, y, answered, ha="center", va="center", fontsize=8, color="black" if loss < 0.02 else "white")
    axes.grid(False)
    image = axes.imshow(losses, aspect="auto", cmap="viridis_r", norm="log", vmin=0.001, vmax=0.5)
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
    axes.figure.colorbar(image, label="best evaluation loss", pad=0.01)


class Picture(NamedTuple):
    """A picture and its points: draw_on(axes, results, *given)."""

    name: str
    title: str
    draw_on: Callable[..., None]
    results: list[Result]
    given: tuple[Any, ...] = ()
    scale: str = "linear"  # of losses

    def draw(self, out: Path) -> None:
        figure, axes = load_pyplot().subplots(figsize=(12, 3.4) if self.name == "capacity" else (8.4, 4.8))
        self.draw_on(axes, self.results, *self.given)
        axes.set_title(self.title)
        if axes.get_legend_handles_labels()[0]:
            axes.set_yscale(self.scale)
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        save(figure, out / f"{self.name}.png")
        print(out / f"{self.name}.png")


def plan_pictures(results: list[Result], published: dict[str, Any]) -> list[Picture]:
    """Return the pictures that have points."""
    shown = [result for result in results if isfinite(result.best) and "valid-length" not in result.flags]
    first, second = ([result for result in shown if result.replaced == replaced] for replaced in (False, True))
    cells = [result for block in capacity(first).values() for cell in block.values() for result in cell]
    named = [result for result in first if not result.is_bare or not result.feature_dim]
    near, far = ([r for r in named if (r.size == FIGURE_4_SIZE) == is_far] for is_far in (False, True))
    early = [result for result in second if result.size == FIGURE_3_SIZE]
    one, two = model_styles(named), model_styles(second)
    theirs = published["setting 1"], published["setting 2"]
    dotted, seeds = "dotted: numbers of features", f"{FIGURE_3_SIZE} keys, {2 * FIGURE_3_SIZE} pairs; one line per seed"
    planned = [
        Picture("figure2", f"Figure 2: setting 1; {dotted}", draw_losses, near, (one, theirs[0])),
        Picture("figure3", f"Figure 3: setting 2, {seeds}", draw_curves, early, (two,), "log"),
        Picture("figure4", f"Figure 4: setting 1, {FIGURE_4_SIZE} keys", draw_curves, far, (one,)),
        Picture("figure5", f"Figure 5: setting 2, 2 S pairs; {dotted}", draw_losses, second, (two, theirs[1]), "log"),
        Picture("capacity", "Setting 1, every rule with every map: keys that are held, of S", draw_capacity, cells),
    ]
    return [picture for picture in planned if picture.results]


def write(finished: list[Training], recipe: Path, out: Path) -> None:
    """Write everything. published.yaml has the losses of the paper's released runs, by setting, model and S."""
    published = read_yaml(recipe / "published.yaml", plain=False)
    results = [read_result(training) for training in finished]
    write_tables(results, out)
    commands.write(out / "table.md", "\n".join(lines_of(results, published)) + "\n")
    for picture in plan_pictures(results, published):
        picture.draw(out)
