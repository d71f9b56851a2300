"""Tables and pictures of the trained points: the paper's Figures 2 to 5, and the capacity of every rule with every map.

    python recipes/associative_retrieval/retrieval_report.py CONF [--out FOLDER]

Writes points.csv (a row for each finished point), curves.csv (each of its evaluations), table.md (a row for all seeds
of a point of the paper's models) and the pictures for which there are points: figure2.png to figure5.png, ratio.png
and capacity.png. An empty place in a picture is a point that was not run.
"""

import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml
from retrieval_grid import HERE, ROOT, SOLVED, Outcome, Point, read_jobs, read_outcome

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
        return "with-replacement" in self.point.flags


def read_results(conf: Path, out: Path) -> list[Result]:
    """The finished points of the grid, in its order."""
    points = [point for job in read_jobs(conf) for point in job if (out / point.name / "finished").exists()]
    return [Result(point, read_outcome(out / point.name / "train.log")) for point in points]


def read_published() -> dict[str, Any]:
    """The paper's numbers: losses by S and the knee, of each architecture in each setting."""
    return yaml.safe_load((HERE / "published.yaml").read_text(encoding="utf-8"))


def write_tables(results: list[Result], out: Path) -> None:
    """points.csv and curves.csv."""
    with (out / "points.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["point", "S", "feature_dim", "best_loss", "at_update", "updates", "seconds", "diverged"])
        for point, outcome in results:
            losses = {loss: update for update, loss in reversed(outcome.evaluations)}
            updates = outcome.evaluations[-1][0] if outcome.evaluations else 0
            row = [
                point.name,
                point.size,
                outcome.feature_dim or "",
                f"{outcome.best:.3g}",
                losses.get(outcome.best, ""),
            ]
            table.writerow([*row, updates, f"{outcome.seconds:.0f}", "yes" if outcome.diverged else ""])
    with (out / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["point", "update", "loss"])
        for point, outcome in results:
            table.writerows([point.name, update, f"{loss:.3g}"] for update, loss in outcome.evaluations)


def markdown(results: list[Result], published: dict[str, Any]) -> list[str]:
    """The lines of a table of the paper's models, a row for all seeds of a point, with the paper's loss beside ours."""
    heads = ["setting", "model", "S", "best loss of each seed", "updates", "paper"]
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
        updates = ", ".join(f"{result.outcome.evaluations[-1][0]:,}" for result in found if result.outcome.evaluations)
        lines.append(f"| {setting} | {shown} | {size} | {losses} | {updates} | {theirs} |")
    return lines


def by_size(results: list[Result]) -> dict[int, list[float]]:
    """The losses of all seeds, by S."""
    losses = defaultdict(list)
    for result in results:
        losses[result.size].append(result.outcome.best)
    return dict(sorted(losses.items()))


def draw_losses(
    axes: Any, results: list[Result], styles: dict[str, Any], published: dict[str, Any], largest: int
) -> None:
    """Full symbols and a line through their medians: ours; empty symbols: the paper's; dotted: its knees."""
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
    axes.plot([], [], "o--", color="0.4", ms=7, mfc="none", lw=0.8, label="empty: the paper's runs")


def draw_curves(axes: Any, results: list[Result], styles: dict[str, Any]) -> None:
    """Evaluations over updates, a line for each seed."""
    for arch, (label, colour, _) in styles.items():
        for index, result in enumerate(result for result in results if result.arch == arch):
            updates, losses = zip(*result.outcome.evaluations, strict=True)
            axes.plot(updates, losses, color=colour, lw=1.6, alpha=0.9, label=None if index else label)
            axes.plot(updates[-1], losses[-1], "o", color=colour, ms=3)
    axes.set_xlabel("updates")
    axes.set_ylabel("evaluation loss")


def capacity(results: list[Result]) -> dict[tuple[str, str], tuple[int, int, bool]]:
    """Of every (rule, map): the largest S that was solved, the feature dimension, and whether a larger one was not."""
    cells: dict[tuple[str, str], tuple[int, int, bool]] = {}
    for point, outcome in results:
        rule, feature_map = point.flags.get("update-rule"), point.flags.get("feature-map", "")
        if rule is None:
            continue
        largest, dim, ended = cells.get((rule, feature_map), (0, outcome.feature_dim or 0, False))
        solved = outcome.best <= SOLVED
        cells[rule, feature_map] = (max(largest, point.size if solved else 0), dim, ended or not solved)
    return cells


def draw_capacity(axes: Any, cells: dict[tuple[str, str], tuple[int, int, bool]]) -> Any:
    """A cell for every rule with every map: its capacity, and that over the feature dimension as its colour."""
    rules = list(dict.fromkeys(rule for rule, feature_map in cells if feature_map))
    maps = list(dict.fromkeys(feature_map for _, feature_map in cells if feature_map))
    shown = [[cells.get((rule, feature_map), (0, 1, False)) for feature_map in maps] for rule in rules]
    image = axes.imshow([[largest / dim for largest, dim, _ in row] for row in shown], cmap="viridis", vmin=0, vmax=1.5)
    for y, row in enumerate(shown):
        for x, (largest, dim, ended) in enumerate(row):
            said = f"{largest}" if largest else "< 8"
            colour = "black" if largest / dim > 0.9 else "white"
            axes.text(x, y, said + ("" if ended else "+"), ha="center", va="center", color=colour, fontsize=11)
    dims = {feature_map: dim for (_, feature_map), (_, dim, _) in cells.items()}
    axes.set_xticks(range(len(maps)), [f"{feature_map}\n({dims[feature_map]})" for feature_map in maps])
    axes.set_yticks(range(len(rules)), rules)
    axes.set_xlabel("feature map (its feature dimension)")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def draw_ratio(axes: Any, results: list[Result]) -> None:
    """Loss over S / feature dimension of every model of setting 1 that normalises its read-out."""
    for arch, (label, colour, marker) in STYLES.items():
        found = [result for result in results if result.arch == arch and result.outcome.feature_dim]
        if not found or "favor" in arch:
            continue
        dim = found[0].outcome.feature_dim
        losses = by_size(found)
        ratios = [size / dim for size in losses]
        axes.plot(ratios, [median(values) for values in losses.values()], marker + "-", color=colour, ms=5, label=label)
    axes.axvline(1, color="0.4", ls=":")
    axes.set_xlabel("S / feature dimension")
    axes.set_ylabel("best evaluation loss, median of seeds")


def draw(results: list[Result], published: dict[str, Any], out: Path) -> list[Path]:
    """All pictures for which there are points."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("drawing needs matplotlib: pip install 'fairseq_fwp[plots]'.") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    named = [result for result in results if result.arch in {**STYLES, **RULE_STYLES}]
    first = [result for result in named if not result.replaced]
    # Evaluated as our other points are.
    second = [result for result in named if result.replaced and "valid-length" not in result.point.flags]
    drawn = []

    def save(name: str, make: Any, title: str, log: bool = False, legend: bool = True, size: Any = (8.4, 4.8)) -> None:
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        made = make(axes)
        axes.set_title(title, loc="left", fontsize=11)
        if log:
            axes.set_yscale("log")
        if legend:
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
        else:
            figure.colorbar(made, label="capacity / feature dimension")
        figure.savefig(out / name, dpi=130)
        pyplot.close(figure)
        drawn.append(out / name)

    def losses(found: list[Result], styles: dict[str, Any], setting: str) -> Any:
        largest = max(result.size for result in found)

        def make(axes: Any) -> None:
            draw_losses(axes, found, styles, published[setting], largest)
            axes.set_xlabel("number of keys S")
            axes.set_ylabel("best evaluation loss")

        return make

    capacities = [result for result in first if result.size < 600] or first
    if first:
        title = "Figure 2: setting 1, sum rule; dotted: the published knees"
        save("figure2.png", losses(capacities, STYLES, "setting 1"), title)
        save(
            "ratio.png",
            lambda axes: draw_ratio(axes, first),
            "Setting 1: the loss leaves zero at S = feature dimension",
        )
    if curves := [result for result in second if result.size == 20 and result.outcome.evaluations]:
        title = "Figure 3: setting 2, 20 keys, 40 pairs; a line a seed"
        save("figure3.png", lambda axes: draw_curves(axes, curves, RULE_STYLES), title, log=True)
    if curves := [result for result in first if result.size == 600 and result.outcome.evaluations]:
        title = "Figure 4: setting 1, 600 keys"
        save("figure4.png", lambda axes: draw_curves(axes, curves, STYLES), title)
    if second:
        title = "Figure 5: setting 2, 2 S pairs"
        save("figure5.png", losses(second, RULE_STYLES, "setting 2"), title, log=True)
    if cells := capacity(results):
        softmax = cells.get(("softmax", ""))
        title = "Largest S solved (loss below 0.01), setting 1, keys of size 16"
        title += f"; softmax: {softmax[0]}{'' if softmax[2] else '+'}" if softmax else ""
        save("capacity.png", lambda axes: draw_capacity(axes, cells), title, legend=False, size=(8.4, 4.4))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("conf", type=Path, metavar="CONF", help="the grid, such as conf/quick.yaml")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/associative_retrieval", help="where the points lie")
    args = parser.parse_args()
    results = read_results(args.conf, args.out)
    if not results:
        sys.exit(f"retrieval_report.py: no point of {args.conf} is finished in {args.out}: train them first (run.sh).")
    published = read_published()
    write_tables(results, args.out)
    (args.out / "table.md").write_text("\n".join(markdown(results, published)) + "\n", encoding="utf-8")
    for path in draw(results, published, args.out):
        print(path)


if __name__ == "__main__":
    main()
