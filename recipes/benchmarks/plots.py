"""One picture of each part from the CSV files in results/: `python plots.py PART`, one of DRAW."""

import csv
import sys

import matplotlib

matplotlib.use("Agg")
import gpu_report
import matplotlib.pyplot as plt
import translation
from matplotlib.ticker import LogLocator
from report import RESULTS

COLOURS = plt.get_cmap("tab10").colors
PARITY = {"color": "black", "linewidth": 0.8}
SDPA_STEP = "decoding step, delta vs SDPA with a cache of "
PYTORCH_STEP = "decoding step, delta vs best PyTorch step"


def read(name):
    with open(RESULTS / f"{name}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured_goals(name):
    return [row for row in read(f"{name}_goals") if row["met"] != "not measured"]


def bars(axes, rows, labels):
    """Horizontal bars of the median ratios on a logarithmic axis, with a mark where each goal lies."""
    kinds = list(dict.fromkeys(row["ratio"] for row in rows))
    for y, row in enumerate(rows):
        value = float(row["median of rounds"])
        bound = row["must reach"].strip("<>= ")
        axes.barh(y, value - 1, left=1, color=COLOURS[kinds.index(row["ratio"])])
        if bound != "-":
            axes.plot([float(bound)] * 2, [y - 0.4, y + 0.4], color="black", linewidth=2)
        label = axes.text(max(value, 1) * 1.05, y, f"{value:.3g}x", va="center", fontsize=8, zorder=3)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, **PARITY)
    axes.margins(x=0.15)


def draw_operators():
    rows = measured_goals("operators")
    speed = [row for row in rows if " vs " in row["ratio"] and "step" not in row["ratio"]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6.5), width_ratios=(3, 2), layout="constrained")
    bars(left, speed, [f"{row['ratio'].replace(', forward + backward', '')} ({row['where']})" for row in speed])
    left.set_title(
        "How many times faster than the peer, one thread\n(forward + backward unless it says forward; | = goal)"
    )
    for index, where in enumerate(dict.fromkeys(row["where"] for row in rows if row["ratio"] == PYTORCH_STEP)):
        steps = [row for row in rows if row["where"] == where]
        caches = [row for row in steps if row["ratio"].startswith(SDPA_STEP)]
        contexts = [int(row["ratio"].removeprefix(SDPA_STEP)) for row in caches]
        colour, batch = COLOURS[index], where.split(",")[0]
        right.plot(
            contexts,
            [float(row["median of rounds"]) for row in caches],
            "o-",
            color=colour,
            label=f"softmax attention with a cache, {batch}",
        )
        loop = next(float(row["median of rounds"]) for row in steps if row["ratio"] == PYTORCH_STEP)
        right.axhline(loop, color=colour, linestyle=":", label=f"delta rule in PyTorch, {batch}")
    right.axhline(1, **PARITY, label="our delta step, at any context")
    right.set(xscale="log", yscale="log", xlabel="context (tokens)", title="Time of a decoding step, in times of ours")
    right.set_xticks(contexts, [str(context) for context in contexts])
    right.minorticks_off()
    right.legend(fontsize=8)
    return figure


def draw_training():
    rows = measured_goals("training")
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    bars(axes, rows, [f"{row['ratio'].removeprefix('words per second, ')}, {row['where']}" for row in rows])
    axes.set_title("Words per second of fairseq-train, as a ratio (| = goal)")
    return figure


def smallest(rows, what, model, field):
    """{tokens: smallest value of the repetitions}"""
    found = {}
    for row in rows:
        if (row["what"], row["model"]) == (what, model) and not row["stopped"]:
            tokens, value = int(row["tokens"]), float(row[field])
            found[tokens] = min(value, found.get(tokens, value))
    return found


def draw_long():
    """Times as ratios to ours at the shortest length; memory as it is."""
    rows = read("long")
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(1, 4, figsize=(15, 4), layout="constrained")
    panels = [
        ("step", "seconds", "Training step: time per token\n(1 = ours at the shortest)", "tokens in the sequence"),
        ("step", "bytes", "Training step: peak memory (MB)", "tokens in the sequence"),
        ("decode", "seconds", "Decoding: time per token\n(1 = ours at the shortest)", "context (tokens)"),
        ("decode", "bytes", "Decoding: memory of the context (MB)", "context (tokens)"),
    ]
    for ax, (what, field, title, label) in zip(axes, panels, strict=True):
        unit = None
        for model in models:
            figures = smallest(rows, what, model, field)
            if field == "bytes":
                figures = {tokens: value / 2**20 for tokens, value in figures.items()}
            elif what == "step":
                figures = {tokens: value / tokens for tokens, value in figures.items()}
            if field == "seconds":
                unit = unit or figures[min(figures)]
                figures = {tokens: value / unit for tokens, value in figures.items()}
            ax.plot(list(figures), list(figures.values()), "o-", label=model)
            for point in figures.items():
                ax.annotate(
                    f"{point[1]:,.0f}" if point[1] >= 100 else f"{point[1]:.3g}",
                    point,
                    xytext=(0, 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                )
        ticks = sorted({int(row["tokens"]) for row in rows if row["what"] == what})
        ax.set(xscale="log", xlabel=label, title=title)
        if field == "bytes":
            ax.set_yscale("log")
        ax.set_xticks(ticks, [str(tokens) for tokens in ticks])
        ax.minorticks_off()
        ax.margins(x=0.2, y=0.15)
        if field == "seconds":
            ax.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    return figure


def draw_rules():
    """Time per token as a ratio to sum's at the shortest length; memory against a state kept for every token."""
    rows = read("rules")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    lengths = sorted({int(row["tokens"]) for row in rows})
    unit = None
    for rule in dict.fromkeys(row["rule"] for row in rows if row["what"] == "seconds"):
        for ax, what in zip(axes, ("seconds", "bytes"), strict=True):
            found = {}
            for row in rows:
                if (row["rule"], row["what"]) == (rule, what):
                    value = float(row["value"]) / (int(row["tokens"]) if what == "seconds" else 2**20)
                    found[int(row["tokens"])] = min(value, found.get(int(row["tokens"]), value))
            if what == "seconds":
                unit = unit or found[min(found)]
                found = {tokens: value / unit for tokens, value in found.items()}
            ax.plot(list(found), list(found.values()), "o-", label=rule)
    every = {int(row["tokens"]): float(row["value"]) / 2**20 for row in rows if row["rule"] == "a state per token"}
    axes[1].plot(list(every), list(every.values()), "k--", label="keeping a state per token")
    axes[0].set_title("Forward + backward: time per token\n(1 = sum at the shortest length)")
    axes[1].set_title("Forward + backward: peak memory beyond the inputs (MB)")
    for ax in axes:
        ax.set(xscale="log", yscale="log", xlabel="tokens in the sequence")
        ax.set_xticks(lengths, [str(length) for length in lengths])
        ax.minorticks_off()
        ax.grid(axis="y", alpha=0.3)
    axes[1].legend(fontsize=8)
    return figure


def draw_generation():
    """Mao 2022, Figure 1: time as a ratio to decay's after the shortest context, and memory.

    A row of pictures for each device and number of sequences.
    """
    rows = read("generation")
    places = list(dict.fromkeys((row["device"], row["sequences"]) for row in rows))
    figure, axes = plt.subplots(len(places), 3, figsize=(15, 4.2 * len(places)), layout="constrained", squeeze=False)
    panels = [
        ("seconds", "model", "Time of a token, whole model\n(1 = decay after the shortest context)"),
        ("seconds", "layers", "Time of a token, attention layers alone\n(1 = decay after the shortest context)"),
        ("bytes", "model", "Peak memory beyond the model (MB)"),
    ]
    for of_place, place in zip(axes, places, strict=True):
        for ax, (what, of, title) in zip(of_place, panels, strict=True):
            unit = 2**20 if what == "bytes" else None
            for name in dict.fromkeys(row["name"] for row in rows):
                found = {}
                for row in rows:
                    if [row[key] for key in ("what", "device", "sequences", "of", "name")] == [what, *place, of, name]:
                        context = int(row["context"])
                        found[context] = min(float(row["value"]), found.get(context, float("inf")))
                unit = unit or found[min(found)]
                ax.plot(list(found), [value / unit for value in found.values()], "o-", label=name)
            ticks = sorted({int(row["context"]) for row in rows})
            device, sequences = place
            how_many = "one sequence" if sequences == "1" else f"{sequences} sequences at once"
            ax.set(xscale="log", yscale="log", xlabel=f"context (tokens), {device}, {how_many}", title=title)
            ax.set_xticks(ticks, [str(tokens) for tokens in ticks], fontsize=8)
            ax.minorticks_off()
            ax.grid(axis="y", alpha=0.3)
    axes[0][0].legend(fontsize=8)
    return figure


def draw_eval_lm():
    rows = measured_goals("eval_lm")
    figure, axes = plt.subplots(figsize=(9, 3.5), layout="constrained")
    bars(axes, rows, [f"{row['ratio'].removeprefix('tokens per second, ')}, {row['where']}" for row in rows])
    figure.suptitle("Tokens per second of the sliding window, as a ratio (| = goal)")
    return figure


def draw_translation():
    """Generation of one sentence, as its target and as its source grows: time per target token, and peak memory."""
    rows = read("translation")
    figure, axes = plt.subplots(1, 4, figsize=(15, 4), layout="constrained")
    panels = [(side, field) for side in ("target", "source") for field in ("seconds", "bytes")]
    for ax, (side, field) in zip(axes, panels, strict=True):
        for model in dict.fromkeys(row["model"] for row in rows if row["what"] == side):
            found = smallest(rows, side, model, field)
            scale = {"bytes": 2**-20, "seconds": 1000}[field]
            written = {n: n if side == "target" else translation.SHORT for n in found}
            found = {n: value * scale / (written[n] if field == "seconds" else 1) for n, value in found.items()}
            ax.plot(list(found), list(found.values()), "o-", label=model)
        title = "peak memory (MB)" if field == "bytes" else "milliseconds a target token"
        ax.set(xscale="log", yscale="log", title=title, xlabel=f"tokens of the {side}")
        ax.set_xticks(translation.LENGTHS, [str(length) for length in translation.LENGTHS])
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.grid(axis="y", alpha=0.3)
    axes[0].legend(fontsize=8)
    return figure


def draw_fwl():
    rows = measured_goals("fwl")
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    bars(axes, rows, [f"{row['ratio']}, {row['where']}" for row in rows])
    figure.suptitle("What learning costs in scoring, as a ratio to the model alone (| = goal)")
    return figure


def draw_gpu():
    """Goals as bars; time per token of training at growing length, and of decoding after growing contexts."""
    record = gpu_report.Record(row.values() for row in read("gpu"))
    goals = [row for row in measured_goals("gpu") if row["must reach"] != "-"]
    figure, axes = plt.subplots(1, 3, figsize=(18, 6), width_ratios=(3, 2, 2), layout="constrained")
    bars(axes[0], goals, [f"{row['ratio']} ({row['where']})" for row in goals])
    axes[0].set_title("Ratios with a goal (|)")
    sweep = {n: gpu_report.swept(n) for n in gpu_report.SWEEP}
    contexts = {n: f"context {n}" for n in gpu_report.CONTEXTS}
    for ax, places, stage, tokens, title in (
        (axes[1], sweep, gpu_report.TRAINING, gpu_report.TOKENS, "Forward + backward: ns per token"),
        (axes[2], contexts, gpu_report.STEP, 1, "One decoding step: ns"),
    ):
        names = dict.fromkeys(name for where in places.values() for name in record.contenders(where, stage))
        for name in names:
            found = {n: gpu_report.best_time(record, where, name, stage) for n, where in places.items()}
            found = {n: min(times) * 1e9 / tokens for n, times in found.items() if not isinstance(times, str)}
            ax.plot(list(found), list(found.values()), "o-", label=name)
        ax.set(xscale="log", yscale="log", title=title, xlabel="tokens in the sequence" if tokens > 1 else "context")
        ax.set_xticks(list(places), [str(n) for n in places])
        ax.minorticks_off()
        if names:
            ax.legend(fontsize=8)
    return figure


DRAW = {
    "operators": draw_operators,
    "rules": draw_rules,
    "training": draw_training,
    "long": draw_long,
    "generation": draw_generation,
    "gpu": draw_gpu,
    "eval_lm": draw_eval_lm,
    "translation": draw_translation,
    "fwl": draw_fwl,
}


if __name__ == "__main__":
    for part in sys.argv[1:]:
        DRAW[part]().savefig(RESULTS / f"{part}.png", dpi=120)
