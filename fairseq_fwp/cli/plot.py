"""fwp-plot: draw the perplexity of several training runs against updates or time.

    fwp-plot delta=runs/delta/train.log sum=runs/sum/train.log --out curves.png

A log is what `fairseq-train --log-format json` printed or wrote with `--log-file`; other lines in it are passed over.
Beside the picture lie its numbers, curves.csv, and the best validation perplexity of each run, curves.md.
"""

import argparse
import csv
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Okabe and Ito's colours, which stay distinct for colour-blind readers; the yellow is left out, too pale for a line.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"]
MARKERS = "osD^vPX"


@dataclass
class Run:
    """One training run: perplexity and hours of training so far, by the number of updates."""

    label: str
    train: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)
    hours: dict[int, float] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """The update with the lowest validation perplexity."""
        return min(self.valid, key=lambda update: self.valid[update])


def read_log(label: str, path: Path) -> Run:
    """Read a JSON log of fairseq-train; ValueError if there is no validation in it."""
    run, wall = Run(label), 0.0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"the log {path} cannot be read: {error.strerror}.") from error
    for line in lines:
        try:
            entry = json.loads(line[max(line.find("{"), 0) :])
        except ValueError:
            continue
        if not isinstance(entry, dict):
            continue
        # `ppl` is the mean since the last such line, `valid_ppl` that of a whole validation.
        values, prefix = (run.valid, "valid_") if "valid_ppl" in entry else (run.train, "")
        if not {prefix + "ppl", prefix + "num_updates"} <= entry.keys():
            continue
        update = int(entry[prefix + "num_updates"])
        wall = float(entry.get("wall", wall))
        for earlier in (run.train, run.valid, run.hours):
            # A run that was stopped goes back to its last checkpoint: what it did after that no longer counts.
            for undone in [number for number in earlier if number > update]:
                del earlier[undone]
        values[update], run.hours[update] = float(entry[prefix + "ppl"]), wall / 3600
    if not run.valid:
        raise ValueError(
            f"the log {path} holds no validation perplexity: it should be what `fairseq-train --log-format json` "
            "printed, from a run that came at least as far as its first validation."
        )
    return run


def write_csv(runs: Sequence[Run], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["run", "update", "hours", "train_ppl", "valid_ppl"])
        for run in runs:
            for update in sorted(run.hours):
                row = [run.train.get(update, ""), run.valid.get(update, "")]
                table.writerow([run.label, update, f"{run.hours[update]:.4f}", *row])


def write_markdown(runs: Sequence[Run], path: Path) -> None:
    rows = ["| run | best valid ppl | at update | updates | hours |", "| --- | ---: | ---: | ---: | ---: |"]
    for run in runs:
        last, best = max(run.hours), run.best
        rows.append(f"| {run.label} | {run.valid[best]:.2f} | {best:,} | {last:,} | {run.hours[last]:.2f} |")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def draw(runs: Sequence[Run], path: Path, x: str, train: bool) -> None:
    # fairseq turns on the debugging messages of everything; of matplotlib's there are hundreds.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("drawing needs matplotlib: pip install 'fairseq_fwp[plots]'.") from error
    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(7.2, 4.4), layout="constrained")
    for index, run in enumerate(runs):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        where = run.hours if x == "hours" else {update: update for update in run.hours}
        if train:
            axes.plot([where[u] for u in run.train], [*run.train.values()], color=colour, alpha=0.5, lw=1, ls="--")
        label = f"{run.label}: {run.valid[run.best]:.1f}"
        style = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.8}
        axes.plot([where[u] for u in run.valid], [*run.valid.values()], label=label, **style)
    # Perplexities fall from thousands to tens; the log scale keeps the end, where the runs differ, readable.
    axes.set_yscale("log")
    drawn = [ppl for run in runs for ppl in [*run.valid.values(), *(run.train.values() if train else ())]]
    lowest, highest = min(drawn), max(drawn)
    axes.set_ylim(lowest * 0.95, min(highest, lowest * 8) * 1.05)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
    axes.set_xlim(left=0)
    axes.set_xlabel("training time in hours" if x == "hours" else "updates")
    axes.set_ylabel("perplexity per token, log scale")
    axes.set_title("Validation" + (" (dashed: training)" if train else ""), loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="run: best validation", frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parser() -> argparse.ArgumentParser:
    description = __doc__.split("\n")[0].removeprefix("fwp-plot: ")
    made = argparse.ArgumentParser(prog="fwp-plot", description=description, allow_abbrev=False)
    made.add_argument(
        "logs", nargs="+", metavar="[LABEL=]LOG", help="a log; unlabelled, its folder's name is the label"
    )
    made.add_argument("--out", type=Path, default=Path("curves.png"), metavar="PNG", help="the picture (curves.png)")
    made.add_argument("--x", choices=["updates", "hours"], default="updates", help="the horizontal axis (updates)")
    made.add_argument("--train", action="store_true", help="draw the training perplexity too, dashed")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    try:
        runs = []
        for name in args.logs:
            # A file that is there may have a = in its path.
            label, log = name.split("=", 1) if "=" in name and not Path(name).exists() else ("", name)
            runs.append(read_log(label or Path(log).absolute().parent.name, Path(log)))
        if args.out.suffix != ".png" or not args.out.absolute().parent.is_dir():
            raise ValueError(f"--out must be a .png file in a folder that exists, but is {args.out}.")
        # Everything is drawn under another name first, so that what is there is whole.
        unfinished = {suffix: args.out.with_suffix(f".tmp{suffix}") for suffix in (".png", ".csv", ".md")}
        try:
            draw(runs, unfinished[".png"], args.x, args.train)
            write_csv(runs, unfinished[".csv"])
            write_markdown(runs, unfinished[".md"])
            for suffix, path in unfinished.items():
                os.replace(path, args.out.with_suffix(suffix))
        finally:
            for path in unfinished.values():
                path.unlink(missing_ok=True)
    except ValueError as error:
        sys.exit(f"fwp-plot: {error}")


if __name__ == "__main__":
    main()
