"""fwp-plot: draw perplexity, loss or BLEU of several training runs against updates or time.

    fwp-plot delta=runs/delta/train.log sum=runs/sum --out curves.png

A log is what fairseq-train printed or wrote with `--log-file`, in any `--log-format`; other lines are passed over. A
folder stands for its train.log, or the only .log file in it. The ending of --out says what the picture is: .png, .svg
or .pdf. Next to it lie its numbers, curves.csv, and the best validation of each run, curves.md. With --dpfp the picture
is Figure 1 of Schlag et al. 2021, and no logs are read. What was written is printed.
"""

import argparse
import csv
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from fairseq_fwp.cli.dpfp_figure import draw_dpfp
from fairseq_fwp.cli.plot_style import MARKERS, check_path, colours, load_pyplot, save, use_log_scale

# Quantities that can be drawn: the name in the logs, and in words.
METRICS = {
    "ppl": "perplexity per token (log scale)",
    "loss": "loss as logged (of text: bits per token)",
    "bleu": "BLEU",
}
TIME = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) \| ")
JSON = re.compile(r"\{.*\}$")
PAIRS = re.compile(r"(\w+)[= ](-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf|nan)(?=[,\]\s]|$)")
# With `--log-format none` only this is logged of a validation, once for each checkpoint.
SAVED = re.compile(r"Saved checkpoint .*@ (\d+) updates, score (-?[\d.]+|inf|nan)\)")
# The settings: all of them as fairseq prints them, or those given as this package does (patches/messages.py).
SCORED_BY = re.compile(r"best_checkpoint_metric(?:': '|=)(\w+)")
# Criterions whose loss is the logarithm of the perplexity; label smoothing adds to it.
PLAIN_LOSS = re.compile(r"\bcriterion(?:': \{'_name': '|=)(adaptive_loss|cross_entropy)\b")


@dataclass
class Run:
    """One training run: a metric in training and validation, and hours of training so far, by the number of updates."""

    label: str
    metric: str = "ppl"
    train: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)
    hours: dict[int, float] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """The update with the best validation: the highest BLEU, or the lowest value of another metric."""
        finite = [update for update, value in self.valid.items() if math.isfinite(value)]
        return (max if self.metric == "bleu" else min)(finite, key=lambda update: self.valid[update])


def read_entry(line: str) -> tuple[str, dict[str, float]]:
    """Return the kind of a log line (inner: updates, epoch, valid, saved) and its numbers by name."""
    if found := SAVED.search(line):
        return "saved", {"num_updates": float(found[1]), "score": float(found[2])}
    if found := JSON.search(line):
        try:
            entry = json.loads(found[0])
        except ValueError:
            return "", {}
        prefix = next((prefix for prefix in ("valid_", "train_") if f"{prefix}num_updates" in entry), "")
        about = {"valid_": "valid", "train_": "epoch", "": "inner"}[prefix]
        text = " ".join(f"{name.removeprefix(prefix)}={value}" for name, value in entry.items())
    elif " | valid on '" in line:
        about, text = "valid" if "| valid on 'valid' subset |" in line else "", line
    else:
        about, text = "epoch" if " | num_updates " in line else "inner", line
    return about, {name: float(number) for name, number in PAIRS.findall(text)}


def read_log(label: str, path: Path, metric: str = "ppl") -> Run:
    """Read a log of fairseq-train; ValueError if it holds no validation of this metric."""
    try:
        log = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"the log {path} cannot be read: {error.strerror}.") from error
    found: dict[str, dict[int, float]] = {about: {} for about in ("inner", "epoch", "valid", "saved")}
    hours: dict[int, float] = {}
    named = SCORED_BY.search(log)
    scored_by = named[1] if named else "loss"
    start, seconds, wall = None, 0.0, 0.0
    for line in log.splitlines():
        if time := TIME.match(line):
            now = datetime.fromisoformat(time[1])
            start = start or now
            seconds = (now - start).total_seconds()
        about, entry = read_entry(line)
        if about == "saved" and metric == "ppl" and scored_by == "loss" and PLAIN_LOSS.search(log):
            entry["ppl"] = 2 ** entry["score"]
        elif about == "saved":
            entry[scored_by] = entry["score"]
        wall = entry.get("wall", wall)
        if about not in found or metric not in entry or not math.isfinite(entry.get("num_updates", math.nan)):
            continue
        update = int(entry["num_updates"])
        for earlier in (*found.values(), hours):
            # A resumed run starts from its last checkpoint: later updates of the stopped run no longer count.
            for undone in [number for number in earlier if number > update]:
                del earlier[undone]
        found[about][update], hours[update] = entry[metric], (wall or seconds) / 3600
    # Means since the last line of training; a log with progress bars has only means of epochs.
    run = Run(label, metric, found["inner"] or found["epoch"], found["valid"] or found["saved"])
    if not any(map(math.isfinite, run.valid.values())):
        raise ValueError(
            f"the log {path} must hold a validation {metric} that is a number, got none. It must be the log of a "
            "fairseq-train run that reached its first validation. With --log-format none a --log-file has no numbers: "
            "train with --log-format simple or json."
        )
    run.hours = {update: hours[update] for update in hours if update in run.train or update in run.valid}
    return run


def find_log(path: Path) -> Path:
    """Return the log that a path names: a folder's train.log or only .log file; ValueError where there is none."""
    if not path.is_dir():
        return path
    logs = [path / "train.log"] if (path / "train.log").exists() else sorted(path.glob("*.log"))
    if len(logs) != 1:
        raise ValueError(
            f"the folder {path} must hold a train.log or one other .log file, got {len(logs)}: name the log."
        )
    return logs[0]


def write_csv(runs: Sequence[Run], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["run", "update", "hours", f"train_{runs[0].metric}", f"valid_{runs[0].metric}"])
        for run in runs:
            for update in sorted(run.hours):
                row = [run.train.get(update, ""), run.valid.get(update, "")]
                table.writerow([run.label, update, f"{run.hours[update]:.4f}", *row])


def write_markdown(runs: Sequence[Run], path: Path) -> None:
    name = runs[0].metric.replace("bleu", "BLEU")
    rows = [f"| run | best valid {name} | at update | updates | hours |", "| --- | ---: | ---: | ---: | ---: |"]
    for run in runs:
        last, best = max(run.hours), run.best
        rows.append(f"| {run.label} | {run.valid[best]:.2f} | {best:,} | {last:,} | {run.hours[last]:.2f} |")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def draw(runs: Sequence[Run], path: Path, x: str, train: bool) -> None:
    figure, axes = load_pyplot().subplots(figsize=(7.2, 4.4))
    metric, palette = runs[0].metric, colours(run.label for run in runs)
    for index, run in enumerate(runs):
        colour = palette[run.label]
        where = run.hours if x == "hours" else {update: update for update in run.hours}
        if train:
            axes.plot([where[u] for u in run.train], [*run.train.values()], color=colour, alpha=0.5, lw=1, ls="--")
        label = f"{run.label}: {run.valid[run.best]:.1f}"
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
    axes.legend(title="run: best validation")
    save(figure, path)


def parser() -> argparse.ArgumentParser:
    description = __doc__.split("\n")[0].removeprefix("fwp-plot: ")
    made = argparse.ArgumentParser(prog="fwp-plot", description=description, allow_abbrev=False)
    made.add_argument(
        "logs",
        nargs="*",
        metavar="[LABEL=]LOG",
        help="a log, or its folder; without a label the folder's name is used",
    )
    made.add_argument(
        "--out", type=Path, metavar="PICTURE", help="a .png, .svg or .pdf (curves.png, or dpfp.png with --dpfp)"
    )
    made.add_argument("--x", choices=["updates", "hours"], default="updates", help="the horizontal axis (updates)")
    made.add_argument(
        "--y", choices=list(METRICS), default="ppl", help="the vertical axis (ppl); bleu needs --eval-bleu"
    )
    made.add_argument("--dpfp", action="store_true", help="draw DPFP from 2 to 4 dimensions, without logs")
    made.add_argument("--train", action="store_true", help="also draw the metric in training, dashed")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser()
    args = made.parse_args(arguments)
    if args.dpfp == bool(args.logs):
        made.error("give either logs of training or --dpfp")
    if args.dpfp and (args.train or args.x != "updates" or args.y != "ppl"):
        made.error("--train, --x and --y must be left out with --dpfp: they are for logs of training")
    out = args.out or Path("dpfp.png" if args.dpfp else "curves.png")
    try:
        check_path(out)
        if args.dpfp:
            draw_dpfp(out)
            print(f"wrote {out}")
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
    except (ValueError, OSError) as error:
        sys.exit(f"fwp-plot: {error}")


if __name__ == "__main__":
    main()
