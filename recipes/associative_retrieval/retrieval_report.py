"""Tables and pictures of the trained points: the paper's Figures 2 to 5, and the capacity of every rule with every map.

    python recipes/associative_retrieval/retrieval_report.py CONF... [--out FOLDER]

Writes points.csv (a row for each finished point), curves.csv (each of its evaluations), table.md (a row for all seeds
of a point of the paper's models) and the pictures for which there are points: figure2.png to figure5.png, ratio.png
and capacity.png. An empty place in a picture is a point that was not run.
"""

import argparse
import csv
import itertools
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml
from retrieval_grid import HERE, ROOT, Outcome, Point, read_finished, read_points

# A word, and Okabe and Ito's colours, which stay distinct for colour-blind readers, for each of the paper's models.
STYLES = {
    "softmax_retrieval": ("softmax", "#000000", "o"),
    "sum_retrieval": ("Linear (ELU+1)", "#D55E00", "s"),
    "sum_dpfp1_retrieval": ("DPFP-1", "#56B4E9", "^"),
    "sum_dpfp2_retrieval": ("DPFP-2", "#0072B2", "v"),
    "sum_dpfp3_retrieval": ("DPFP-3", "#009E73", "D"),
    "sum_favor64_retrieval": ("FAVOR+ 64", "#F0C000", "P"),
    "sum_favor128_retrieval": ("FAVOR+ 128", "#E69F00", "X"),
    "sum_favor512_retrieval": ("FAVOR+ 512", "#CC79A7", "*"),
}
RULE_STYLES = {
    "sum_dpfp1_retrieval": ("sum, DPFP-1", "#56B4E9", "^"),
    "gated_dpfp1_retrieval": ("gated, DPFP-1", "#E69F00", "v"),
    "decay_dpfp1_retrieval": ("decay, DPFP-1", "#009E73", "P"),
    "fwm_tanh_retrieval": ("fwm, tanh: Schlag (2021)", "#CC79A7", "X"),
    "fwm_dpfp1_retrieval": ("fwm, DPFP-1: Schlag (2021) with DPFP", "#D55E00", "s"),
    "delta_retrieval": ("delta, ELU+1", "#808080", "D"),
    "delta_dpfp1_retrieval": ("delta, DPFP-1: the paper's", "#0072B2", "o"),
    "delta_dpfp2_retrieval": ("delta, DPFP-2", "#000000", "*"),
}
# The model's own; to ask it, fairseq would have to be imported.
DEFAULTS = {"update-rule": "sum", "feature-map": "elu"}
# The sizes whose learning curves the paper draws.
FIGURE_3_SIZE = 20
FIGURE_4_SIZE = 600


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
        """Whether it is of setting 2."""
        return self.point.flags.get("with-replacement") == "true"


def read_results(confs: list[Path], out: Path) -> list[Result]:
    """The finished points of the grids, in their order."""
    outcomes = ((point, read_finished(out / point.name)) for point in read_points(confs))
    return [Result(point, outcome) for point, outcome in outcomes if outcome]


def read_published() -> dict[str, Any]:
    """The paper's numbers: losses by S and the knee, of each architecture in each setting."""
    return yaml.safe_load((HERE / "published.yaml").read_text(encoding="utf-8"))


def write_tables(results: list[Result], out: Path) -> None:
    """points.csv and curves.csv."""
    with (out / "points.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["point", "S", "feature_dim", "best_loss", "at_update", "updates", "seconds", "diverged"])
        for point, outcome in results:
            at_update = next((update for update, loss in outcome.evaluations if loss == outcome.best), "")
            row = [point.name, point.size, outcome.feature_dim or "", f"{outcome.best:.3g}", at_update]
            table.writerow([*row, outcome.updates, f"{outcome.seconds:.0f}", "yes" if outcome.diverged else ""])
    with (out / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["point", "update", "loss"])
        for point, outcome in results:
            table.writerows([point.name, update, f"{loss:.6g}"] for update, loss in outcome.evaluations)


def markdown(results: list[Result], published: dict[str, Any]) -> list[str]:
    """The lines of a table of the paper's models, a row for all seeds of a point, with the paper's loss beside ours."""
    heads = ["setting", "model", "S", "best loss of each run", "updates", "paper"]
    lines = ["| " + " | ".join(heads) + " |", "| --- | --- | ---: | --- | --- | ---: |"]
    rows: dict[tuple[str, str, int, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.arch in {**STYLES, **RULE_STYLES}:
            pairs = result.point.flags.get("valid-length")
            setting = "2" if result.replaced else "1"
            shown = result.arch.removesuffix("_retrieval") + (f", {pairs} pairs in evaluation" if pairs else "")
            rows[setting, shown, result.size, result.arch].append(result)
    for (setting, shown, size, arch), found in sorted(rows.items()):
        theirs = published[f"setting {setting}"].get(arch, {}).get("losses", {}).get(size, "-")
        losses = ", ".join(f"{result.outcome.best:.2g}" for result in found)
        updates = ", ".join(f"{result.outcome.updates:,}" for result in found)
        lines.append(f"| {setting} | {shown} | {size} | {losses} | {updates} | {theirs} |")
    return lines


def by_size(results: list[Result]) -> dict[int, list[float]]:
    """The losses of all seeds, by S."""
    losses = defaultdict(list)
    for result in results:
        losses[result.size].append(result.outcome.best)
    return dict(sorted(losses.items()))


def draw_losses(axes: Any, results: list[Result], styles: dict[str, Any], published: dict[str, Any]) -> None:
    """Full symbols and a line through their medians: ours; empty symbols: the paper's; dotted: its knees."""
    largest = max(result.size for result in results)
    for arch, (label, colour, marker) in styles.items():
        losses = by_size([result for result in results if result.arch == arch])
        paper = published.get(arch, {})
        if not losses:
            continue
        axes.plot(list(losses), [median(values) for values in losses.values()], color=colour, lw=1.5)
        sizes = [size for size, values in losses.items() for _ in values]
        flat = [loss for values in losses.values() for loss in values]
        axes.plot(sizes, flat, marker, color=colour, ms=5, label=label)
        theirs = {size: loss for size, loss in paper.get("losses", {}).items() if size <= largest}
        axes.plot(list(theirs), list(theirs.values()), marker + "--", color=colour, ms=7, mfc="none", lw=0.8, alpha=0.8)
        if "knee" in paper:
            axes.axvline(paper["knee"], color=colour, ls=":", lw=1.2)
            place = {"transform": axes.get_xaxis_transform(), "va": "top", "fontsize": 9}
            axes.text(paper["knee"], 1, f" {paper['knee']}", color=colour, **place)
    axes.plot([], [], "o--", color="0.4", ms=7, mfc="none", lw=0.8, label="empty: the paper's runs")
    axes.set_xlabel("number of keys S")
    axes.set_ylabel("best evaluation loss")


def draw_curves(axes: Any, results: list[Result], styles: dict[str, Any]) -> None:
    """Evaluations over updates, a line for each seed."""
    for arch, (label, colour, _) in styles.items():
        for index, result in enumerate(result for result in results if result.arch == arch):
            updates, losses = zip(*result.outcome.evaluations, strict=True)
            axes.plot(updates, losses, color=colour, lw=1.6, alpha=0.9, label=None if index else label)
            axes.plot(updates[-1], losses[-1], "o", color=colour, ms=3)
    axes.set_xlabel("updates")
    axes.set_ylabel("evaluation loss")


class Cell(NamedTuple):
    """What all seeds of a rule with a map came to at one number of keys."""

    size: int
    feature_dim: int
    losses: list[float]

    @property
    def loss(self) -> float:
        return median(self.losses)

    @property
    def held(self) -> int:
        """How many of S keys are answered, as one that is not costs 1 / 2."""
        return round(max(0, self.size * (1 - 2 * self.loss)))


def by_rule_and_map(results: list[Result]) -> dict[tuple[str, str], dict[float, Cell]]:
    """Of every rule with every map what S / feature dimension came to in setting 1."""
    cells: dict[tuple[str, str], dict[float, Cell]] = defaultdict(dict)
    for result in results:
        flags, dim = result.point.flags, result.outcome.feature_dim
        if result.arch == "fwp_associative_retrieval" and dim and not result.replaced:
            rule, feature_map = ({**DEFAULTS, **flags}[flag] for flag in DEFAULTS)
            cell = cells[rule, feature_map].setdefault(result.size / dim, Cell(result.size, dim, []))
            cell.losses.append(result.outcome.best)
    return cells


def draw_capacity(axes: Any, cells: dict[tuple[str, str], dict[float, Cell]]) -> Any:
    """A row for each rule, a block for each map, in it S / feature dimension: the loss, and the keys that are held."""
    rules = list(dict.fromkeys(rule for rule, _ in cells))
    maps = list(dict.fromkeys(feature_map for _, feature_map in cells))
    ratios = sorted({ratio for found in cells.values() for ratio in found})
    columns = list(itertools.product(maps, ratios))
    losses = [[float("nan")] * len(columns) for _ in rules]
    for (y, rule), (x, (feature_map, ratio)) in itertools.product(enumerate(rules), enumerate(columns)):
        if cell := cells.get((rule, feature_map), {}).get(ratio):
            losses[y][x] = cell.loss
            colour = "white" if cell.loss < 0.1 else "black"
            axes.text(x, y, cell.held, ha="center", va="center", fontsize=8, color=colour)
    image = axes.imshow(losses, aspect="auto", cmap="viridis", norm="log", vmin=0.001, vmax=0.5)
    axes.set_xticks(range(len(columns)), [f"{ratio:g}" for _, ratio in columns], fontsize=7)
    axes.set_yticks(range(len(rules)), rules)
    axes.set_xlabel("S / D, keys over features; white line: 1")
    dims = {name: cell.feature_dim for (_, name), row in cells.items() for cell in row.values()}
    above = axes.secondary_xaxis("top")
    middles = [(index + 0.5) * len(ratios) - 0.5 for index in range(len(maps))]
    above.set_xticks(middles, [f"{feature_map}, D = {dims[feature_map]}" for feature_map in maps])
    for start in range(0, len(columns), len(ratios)):
        axes.axvline(start - 0.5, color="black", lw=2)
        axes.axvline(start + sum(ratio <= 1 for ratio in ratios) - 0.5, color="white", lw=1.5)
    for ticks in (axes, above):
        ticks.tick_params(length=0)
    return image


def draw_ratio(axes: Any, results: list[Result]) -> None:
    """Loss over S / D, the feature dimension, and what it cannot be below.

    All read-outs for the S queries of a sequence are a matrix of rank D, and those it should be one of rank S with
    singular values of 1: half the squared distance is at least (S - D) / 2, the mean over queries (1 - D / S) / 2.
    """
    for arch, (label, colour, marker) in STYLES.items():
        found = [result for result in results if result.arch == arch and result.outcome.feature_dim]
        if not found or "favor" in arch:
            continue
        dim = found[0].outcome.feature_dim
        losses = by_size(found)
        ratios = [size / dim for size in losses]
        axes.plot(ratios, [median(values) for values in losses.values()], marker + "-", color=colour, ms=5, label=label)
    axes.axvline(1, color="0.4", ls=":")
    ratios = [1 + step / 100 for step in range(26)]
    least = [(1 - 1 / ratio) / 2 for ratio in ratios]
    axes.plot(ratios, least, "--", color="0.4", label="least possible: (1 - D / S) / 2")
    axes.set_xlabel("S / D, keys over features")
    axes.set_ylabel("best evaluation loss, median of seeds")


def draw(results: list[Result], published: dict[str, Any], out: Path) -> list[Path]:
    """All pictures for which there are points."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("drawing needs matplotlib: pip install 'fairseq_fwp[plots]'.") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    named = [result for result in results if result.arch in {**STYLES, **RULE_STYLES} and result.outcome.evaluations]
    first = [result for result in named if not result.replaced]
    # Evaluated as our other points are.
    second = [result for result in named if result.replaced and "valid-length" not in result.point.flags]
    around_knees = [result for result in first if result.size != FIGURE_4_SIZE]
    drawn = []

    def save(name: str, title: str, draw_on: Any, *given: Any, log: bool = False, size: Any = (8.4, 4.8)) -> None:
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        image = draw_on(axes, *given)
        axes.set_title(title, loc="left", fontsize=11)
        if log:
            axes.set_yscale("log")
        if image:
            figure.colorbar(image, label="best evaluation loss", pad=0.01)
        else:
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(out / name, dpi=130)
        pyplot.close(figure)
        drawn.append(out / name)

    if around_knees:
        title = "Figure 2: setting 1, sum rule; dotted: features (softmax: the paper's 340)"
        save("figure2.png", title, draw_losses, around_knees, STYLES, published["setting 1"])
        title = "Setting 1: D features hold at most D keys"
        save("ratio.png", title, draw_ratio, around_knees)
    if curves := [result for result in second if result.size == FIGURE_3_SIZE]:
        title = "Figure 3: setting 2, 20 keys, 40 pairs; a line a seed"
        save("figure3.png", title, draw_curves, curves, RULE_STYLES, log=True)
    if curves := [result for result in first if result.size == FIGURE_4_SIZE]:
        save("figure4.png", "Figure 4: setting 1, 600 keys", draw_curves, curves, STYLES)
    if second:
        title = "Figure 5: setting 2, 2 S pairs"
        save("figure5.png", title, draw_losses, second, RULE_STYLES, published["setting 2"], log=True)
    if cells := by_rule_and_map(results):
        title = "Setting 1, every rule with every map: keys that are held, of S"
        save("capacity.png", title, draw_capacity, cells, size=(12, 3.4))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("conf", type=Path, nargs="+", metavar="CONF", help="grids, such as conf/quick.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/associative_retrieval", help="where the points lie")
    args = parser.parse_args()
    try:
        results = read_results(args.conf, args.out)
    except (OSError, ValueError) as error:
        sys.exit(f"retrieval_report.py: {error}")
    if not results:
        sys.exit(f"retrieval_report.py: no point of these grids is finished in {args.out}: train them first (run.sh).")
    published = read_published()
    write_tables(results, args.out)
    (args.out / "table.md").write_text("\n".join(markdown(results, published)) + "\n", encoding="utf-8")
    for path in draw(results, published, args.out):
        print(path)


if __name__ == "__main__":
    main()
