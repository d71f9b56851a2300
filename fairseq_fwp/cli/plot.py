"""fwp-plot: draw perplexity, loss or BLEU of several training runs against updates or time.

    fwp-plot delta=runs/delta/train.log sum=runs/sum --out curves.png
    fwp-plot --gain base.tsv layer.tsv --dictionary DATA/dict.txt --out gain.png

A log is what fairseq-train printed or wrote with `--log-file`, in any `--log-format`; other lines are passed over. A
folder stands for its train.log, or the only .log file in it. The ending of --out says what the picture is: .png, .svg
or .pdf. Next to it lie its numbers, curves.csv, and the best validation of each run, curves.md. With --dpfp the picture
is Figure 1 of Schlag et al. 2021, and no logs are read. With --gain it is Figure 2 of Clark et al. 2022: for which
tokens the second model is better than the first, from what `fwp-eval-lm --scores` wrote; its numbers go to a CSV. What
was written is printed.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from fairseq_fwp.cli import make_parser, one_sentence, write_whole
from fairseq_fwp.cli.arguments import positive
from fairseq_fwp.cli.logs import Run, find_log, read_log
from fairseq_fwp.cli.plot_style import (
    COLOURS,
    MARKERS,
    check_path,
    colours,
    load_pyplot,
    save,
    save_table,
    use_log_scale,
)

# Quantities that can be drawn: the name in the logs, and in words.
METRICS = {
    "ppl": "perplexity per token (log scale)",
    "loss": "loss as logged (of text: bits per token)",
    "bleu": "BLEU",
}
POINTS = 101  # of the picture of DPFP, along each side of the plane
PARTS = ["k₁", "k₂", "-k₁", "-k₂"]


def write_csv(runs: Sequence[Run], path: Path) -> None:
    rows: list[list[object]] = [["run", "update", "hours", f"train_{runs[0].metric}", f"valid_{runs[0].metric}"]]
    for run in runs:
        for update, hours in sorted(run.hours.items()):
            rows.append([run.label, update, f"{hours:.4f}", run.train.get(update, ""), run.valid.get(update, "")])
    save_table(rows, path)


def write_markdown(runs: Sequence[Run], path: Path) -> None:
    name = runs[0].metric.replace("bleu", "BLEU")
    rows = [f"| run | best valid {name} | at update | updates | hours |", "| --- | ---: | ---: | ---: | ---: |"]
    for run in runs:
        last, best = max(run.hours), run.best
        rows.append(f"| {run.label} | {run.valid[best]:.2f} | {best:,} | {last:,} | {run.hours[last]:.2f} |")
    write_whole(path, lambda file: file.write_text("\n".join(rows) + "\n", encoding="utf-8"))


def draw(runs: Sequence[Run], path: Path, x: str, train: bool) -> None:
    figure, axes = load_pyplot().subplots(figsize=(7.2, 4.4))
    metric, palette = runs[0].metric, colours(run.label for run in runs)
    for index, run in enumerate(runs):
        colour = palette[run.label]
        where = run.hours if x == "hours" else {update: update for update in run.hours}
        if train:
            axes.plot([where[u] for u in run.train], [*run.train.values()], color=colour, alpha=0.5, lw=1, ls="--")
        best = run.valid[run.best]
        label = f"{run.label}: {best:.{2 if best < 10 else 1}f}"
        marker = MARKERS[index % len(MARKERS)]
        axes.plot([where[u] for u in run.valid], [*run.valid.values()], label=label, color=colour, marker=marker)
    if metric == "ppl":
        # Perplexities fall from thousands to tens: on a log scale the end, where runs differ, is readable.
        drawn = [ppl for run in runs for ppl in [*run.valid.values(), *(run.train.values() if train else ())]]
        finite = [ppl for ppl in drawn if math.isfinite(ppl)]
        lowest, highest = min(finite), max(finite)
        axes.set_ylim(lowest * 0.95, min(highest, lowest * 8) * 1.05)
        use_log_scale(axes.yaxis)
    axes.xaxis.set_major_formatter("{x:,g}" if x == "hours" else "{x:,.0f}")
    axes.set_xlim(left=0)
    axes.set_xlabel("training time (hours)" if x == "hours" else "updates")
    axes.set_ylabel(METRICS[metric])
    axes.set_title("Validation" + (" (dashed: training)" if train else ""))
    curves = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    curves.sort(key=lambda line: line.get_ydata()[-1], reverse=True)  # as they end, from above
    axes.legend(handles=curves, title="run: best validation")
    save(figure, path)


def draw_dpfp(path: Path) -> None:
    """Draw DPFP (nu = 1) from two dimensions to four, with r(a) = max(a, 0): Figure 1 of Schlag et al. 2021."""
    import torch

    from fairseq_fwp.modules.feature_maps import FEATURE_MAPS

    side = torch.linspace(-1, 1, POINTS)
    first, second = torch.meshgrid(side, side, indexing="ij")
    features = FEATURE_MAPS["dpfp"](2, nu=1)(torch.stack([first, second], dim=-1))
    figure, axes = load_pyplot().subplots(figsize=(6.4, 4.8), subplot_kw={"projection": "3d"})
    look = {"shade": False, "edgecolor": "white", "linewidth": 0.3, "alpha": 0.9}
    for index, (feature, colour) in enumerate(zip(features.unbind(-1), COLOURS.values(), strict=False)):
        # Zeros are left out: the four surfaces would hide each other there.
        surface = (first, second, torch.where(feature > 0, feature, float("nan")))
        label = f"r({PARTS[index]}) r({PARTS[index - 1]})"
        axes.plot_surface(*(x.numpy() for x in surface), color=colour, label=label, **look)
    ticks = [-1, 0, 1]
    axes.set(xlabel="k₁", ylabel="k₂", zlabel="feature φ(k)", xticks=ticks, yticks=ticks, zticks=[0, 0.5, 1])
    axes.set_title("DPFP from 2 to 4 dimensions")
    axes.view_init(elev=38, azim=-72)  # no surface is seen edge-on
    figure.legend(loc="outside right upper")
    save(figure, path)


def parser() -> argparse.ArgumentParser:
    command = make_parser(__doc__)
    add = command.add_argument
    add("logs", nargs="*", metavar="[LABEL=]LOG", help="a log, or its folder, whose name is the label if none is given")
    out = "a .png, .svg or .pdf (curves.png, dpfp.png with --dpfp, gain.png with --gain)"
    add("--out", type=Path, metavar="PICTURE", help=out)
    add("--x", choices=["updates", "hours"], default="updates", help="the horizontal axis (updates)")
    add("--y", choices=list(METRICS), default="ppl", help="the vertical axis (ppl); bleu needs --eval-bleu")
    add("--dpfp", action="store_true", help="draw DPFP from 2 to 4 dimensions, without logs")
    gain = "draw the gain of a model over a base model by tokens, from two tables of fwp-eval-lm --scores"
    add("--gain", nargs=2, type=Path, metavar=("BASE", "MODEL"), help=gain)
    add("--dictionary", type=Path, metavar="DATA/dict.txt", help="with --gain: counts of the training text")
    block = "with --gain: blocks of N tokens are documents (by default a document begins at a heading as in WikiText)"
    add("--block", type=positive, metavar="N", help=block)
    add("--train", action="store_true", help="also draw the metric in training, dashed")
    return command


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    args = command.parse_args(arguments)
    if [bool(args.logs), args.dpfp, bool(args.gain)].count(True) != 1:
        command.error("give either logs of training, or --dpfp, or --gain")
    if not args.logs and (args.train or args.x != "updates" or args.y != "ppl"):
        command.error("--train, --x and --y must be left out with --dpfp and --gain: they are for logs of training")
    if bool(args.gain) != bool(args.dictionary) or (args.block and not args.gain):
        command.error("--gain needs --dictionary; --dictionary and --block need --gain")
    out = args.out or Path("dpfp.png" if args.dpfp else "gain.png" if args.gain else "curves.png")
    with one_sentence("fwp-plot"):
        check_path(out)
        if args.dpfp:
            draw_dpfp(out)
            print(f"wrote {out}")
            return
        if args.gain:
            from fairseq_fwp.cli.gain import draw_gain

            base, model = args.gain
            draw_gain(base, model, args.dictionary, args.block, out)
            print(f"wrote {out} and {out.with_suffix('.csv').name}")
            return
        runs = []
        for name in args.logs:
            # The path of an existing file may contain a =.
            label, path = name.split("=", 1) if "=" in name and not Path(name).exists() else ("", name)
            log = find_log(Path(path))
            runs.append(read_log(label or log.absolute().parent.name, log, args.y))
        labels = [run.label for run in runs]
        if len({*labels}) < len(labels):
            raise ValueError(f"each run must have a label of its own, got {', '.join(labels)}: give LABEL=LOG.")
        tables = out.with_suffix(".csv"), out.with_suffix(".md")
        others = [str(table) for table in tables if table.exists()]
        if others and not out.exists():
            raise ValueError(f"--out must have another name, because {others[0]} exists and is not of a picture.")
        draw(runs, out, args.x, args.train)
        write_csv(runs, tables[0])
        write_markdown(runs, tables[1])
        print(f"wrote {out}, {tables[0].name} and {tables[1].name}")


if __name__ == "__main__":
    main()
