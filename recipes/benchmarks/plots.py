"""One picture of each part from the CSV files in results/: `python plots.py PART`, one of DRAW."""

import csv
import sys

import gpu_report
import translation
from report import RESULTS

from fairseq_fwp.cli.plot_style import COLOURS, PUBLISHED, colour_of, colours, load_pyplot, save, use_log_scale

plt = load_pyplot()
# What is drawn in the colour of a rule without beginning with its name, and lines that are dashed.
RULES = {"transformer_lm": "softmax", "favor": "sum", "dpfp": "sum"}
DASHES = {"softmax, cache in place": "--", "favor": "--", "dpfp": ":"}
SDPA_STEP = "decoding step, delta vs SDPA with a cache of "
PYTORCH_STEP = "decoding step, delta vs best PyTorch step"
SEQUENCE, CONTEXT = "tokens in the sequence", "context (tokens)"


def read(name):
    with open(RESULTS / f"{name}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured(name):
    """The ratios of a part that there are."""
    return [row for row in read(f"{name}_goals") if row["met"] != "not measured"]


def colour(name):
    """Of the rule that a name begins with; grey where it begins with none."""
    return colour_of(RULES.get(name, name), PUBLISHED)


def line(axes, name, values):
    axes.plot(list(values), list(values.values()), "o", ls=DASHES.get(name, "-"), color=colour(name), label=name)


def bars(axes, rows, labels, unit):
    """Horizontal bars of the median ratios on a logarithmic axis, coloured by the model that a label begins with."""
    for y, (row, label) in enumerate(zip(rows, labels, strict=True)):
        value = float(row["median of rounds"])
        axes.barh(y, value - 1, left=1, color=colour(label))
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(f"{value:.3g}", (max(value, 1), y), **place)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", lw=0.8)
    axes.margins(x=0.15)
    use_log_scale(axes.xaxis)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(unit)


def over_lengths(axes, lengths, **labels):
    """An axis of lengths, each with its tick."""
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=9)
    axes.minorticks_off()
    axes.set(**labels)


def draw_operators():
    rows = measured("operators")
    speed = [row for row in rows if " vs " in row["ratio"] and "step" not in row["ratio"]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6.5), width_ratios=(3, 2))
    labels = [f"{row['ratio'].replace(', forward + backward', '')} ({row['where']})" for row in speed]
    bars(left, speed, labels, "time of the peer / time of ours")
    left.set_title("Operators, one thread (forward + backward unless it says forward)")
    places = dict.fromkeys(row["where"] for row in rows if row["ratio"] == PYTORCH_STEP)
    for where, dashes in zip(places, ("-", "--"), strict=True):  # one sequence, several
        steps = [row for row in rows if row["where"] == where]
        caches = [row for row in steps if row["ratio"].startswith(SDPA_STEP)]
        contexts = [int(row["ratio"].removeprefix(SDPA_STEP)) for row in caches]
        softmax = [float(row["median of rounds"]) for row in caches]
        loop = next(float(row["median of rounds"]) for row in steps if row["ratio"] == PYTORCH_STEP)
        batch = where.split(",")[0]
        label = f"softmax attention with a cache, {batch}"
        right.plot(contexts, softmax, "o", ls=dashes, color=COLOURS["softmax"], label=label)
        right.axhline(loop, color=PUBLISHED, ls=dashes, label=f"delta rule in PyTorch, {batch}")
    right.axhline(1, color=COLOURS["delta"], label="our delta step, at any context")
    use_log_scale(right.yaxis)
    title, unit = "Decoding step", "time / time of our delta step"
    over_lengths(right, contexts, title=title, xlabel=CONTEXT, ylabel=unit)
    right.legend()
    return figure


def draw_training():
    rows = measured("training")
    kinds = {"words per second": "words per second", "memory": "peak memory"}
    kinds = {kind: unit for kind, unit in kinds.items() if any(row["ratio"].startswith(kind) for row in rows)}
    figure, panels = plt.subplots(1, len(kinds), figsize=(8 * len(kinds), 4), squeeze=False)
    for axes, (kind, unit) in zip(panels[0], kinds.items(), strict=True):
        found = [row for row in rows if row["ratio"].startswith(kind)]
        labels = [f"{row['ratio'].removeprefix(f'{kind}, ')}, {row['where']}" for row in found]
        bars(axes, found, labels, f"{unit}, multiple of the second model's")
        axes.set_title(f"fairseq-train, 16 layers, D = 128: {unit}")
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
    rows = read("long")
    figure, axes = plt.subplots(1, 4, figsize=(16, 4.2))
    panels = [
        ("step", "seconds", "Training step", "milliseconds per token", SEQUENCE),
        ("step", "bytes", "Training step", "peak memory (MB)", SEQUENCE),
        ("decode", "seconds", "Decoding", "milliseconds per token", CONTEXT),
        ("decode", "bytes", "Decoding", "memory of the context (MB)", CONTEXT),
    ]
    for ax, (what, field, title, unit, label) in zip(axes, panels, strict=True):
        for model in dict.fromkeys(row["model"] for row in rows):
            found = smallest(rows, what, model, field)
            if field == "bytes":
                found = {tokens: value / 2**20 for tokens, value in found.items()}
            else:
                found = {tokens: 1000 * value / (tokens if what == "step" else 1) for tokens, value in found.items()}
            line(ax, model, found)
        if field == "bytes":
            use_log_scale(ax.yaxis)
        else:
            ax.set_ylim(0, 1.1 * ax.get_ylim()[1])
        over_lengths(ax, sorted({int(row["tokens"]) for row in rows if row["what"] == what}), title=title)
        ax.set(xlabel=label, ylabel=unit)
    axes[0].legend()
    return figure


def draw_rules():
    """Time per token, and memory against a state kept for every token."""
    rows = read("rules")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    for rule in dict.fromkeys(row["rule"] for row in rows if row["what"] == "seconds"):
        for ax, what in zip(axes, ("seconds", "bytes"), strict=True):
            found = {}
            for row in rows:
                if (row["rule"], row["what"]) == (rule, what):
                    value = float(row["value"]) * (1e6 / int(row["tokens"]) if what == "seconds" else 2**-20)
                    found[int(row["tokens"])] = min(value, found.get(int(row["tokens"]), value))
            line(ax, rule, found)
    every = {int(row["tokens"]): float(row["value"]) / 2**20 for row in rows if row["rule"] == "a state per token"}
    axes[1].plot(list(every), list(every.values()), "--", color=PUBLISHED, label="keeping a state per token")
    for ax, unit in zip(axes, ("microseconds per token", "peak memory beyond the inputs (MB)"), strict=True):
        use_log_scale(ax.yaxis)
        lengths = sorted({int(row["tokens"]) for row in rows})
        over_lengths(ax, lengths, title="Forward + backward", xlabel=SEQUENCE, ylabel=unit)
    axes[1].legend()
    return figure


def draw_family():
    """What rules cost, and how much faster they read than ONNX Runtime's fused kernel."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6))
    rows = measured("family")
    costs = [row for row in rows if " over " in row["ratio"]]
    labels = [row["ratio"].replace(", forward + backward", "") for row in costs]
    bars(left, costs, labels, "time / time of what it is held against")
    left.set_title("One thread, forward + backward")
    peers = [row for row in rows if "fused" in row["ratio"]]
    labels = [f"{row['ratio'].split(' vs ')[0]} {row['where']}" for row in peers]
    bars(right, peers, labels, "time of ONNX Runtime / time of ours")
    right.set_title("Against the fused kernel, forward")
    return figure


def draw_generation():
    """Mao 2022, Figure 1: time of a token and memory; a row of pictures for each device and number of sequences."""
    rows = read("generation")
    places = list(dict.fromkeys((row["device"], row["sequences"]) for row in rows))
    figure, axes = plt.subplots(len(places), 3, figsize=(14, 4 * len(places)), squeeze=False)
    panels = [
        ("seconds", "model", "whole model", "milliseconds per token"),
        ("seconds", "layers", "attention layers alone", "milliseconds per token"),
        ("bytes", "model", "whole model", "peak memory beyond the model (MB)"),
    ]
    for of_place, (device, sequences) in zip(axes, places, strict=True):
        for ax, (what, of, title, unit) in zip(of_place, panels, strict=True):
            for name in dict.fromkeys(row["name"] for row in rows):
                found = {}
                for row in rows:
                    key = [what, device, sequences, of, name]
                    if [row[column] for column in ("what", "device", "sequences", "of", "name")] == key:
                        value = float(row["value"]) * (1000 if what == "seconds" else 2**-20)
                        found[int(row["context"])] = min(value, found.get(int(row["context"]), value))
                line(ax, name, found)
            use_log_scale(ax.yaxis)
            how_many = "one sequence" if sequences == "1" else f"{sequences} sequences at once"
            over_lengths(ax, sorted({int(row["context"]) for row in rows}), xlabel=CONTEXT, ylabel=unit)
            ax.set_title(f"{device.upper()}, {how_many}, {title}")
    axes[0][0].legend()
    return figure


def draw_eval_lm():
    rows = measured("eval_lm")
    figure, axes = plt.subplots(figsize=(10, 3.5))
    labels = [f"{row['where']}: {row['ratio'].removeprefix('tokens per second, ')}" for row in rows]
    bars(axes, rows, labels, "tokens per second, multiple of the second's")
    axes.set_title("Evaluation in a sliding window")
    return figure


def draw_translation():
    """Generation of one sentence, as its target and as its source grows: time per target token, and peak memory."""
    rows = read("translation")
    figure, axes = plt.subplots(1, 4, figsize=(16, 4.2))
    panels = [(side, field) for side in ("target", "source") for field in ("seconds", "bytes")]
    for ax, (side, field) in zip(axes, panels, strict=True):
        for model in dict.fromkeys(row["model"] for row in rows if row["what"] == side):
            found = smallest(rows, side, model, field)
            scale = {"bytes": 2**-20, "seconds": 1000}[field]
            written = {n: n if side == "target" else translation.SHORT for n in found}
            found = {n: value * scale / (written[n] if field == "seconds" else 1) for n, value in found.items()}
            line(ax, model, found)
        unit = "peak memory (MB)" if field == "bytes" else "milliseconds per target token"
        use_log_scale(ax.yaxis)
        over_lengths(ax, translation.LENGTHS, title=f"Growing {side}", xlabel=f"tokens of the {side}", ylabel=unit)
    axes[0].legend()
    return figure


def draw_fwl():
    rows = measured("fwl")
    figure, axes = plt.subplots(figsize=(9, 4))
    unit = "multiple of the model alone"
    bars(axes, rows, [f"{row['ratio'].removesuffix(' vs the model alone')}, {row['where']}" for row in rows], unit)
    axes.set_title("Scoring with learning")
    return figure


def draw_gpu():
    """Ratios as bars; time per token of training at growing length, and of decoding after growing contexts."""
    record = gpu_report.Record(row.values() for row in read("gpu"))
    rows = [row for row in measured("gpu") if row["must reach"] != "-"]
    figure, axes = plt.subplots(1, 3, figsize=(18, 6), width_ratios=(3, 2, 2))
    bars(axes[0], rows, [f"{row['ratio']} ({row['where']})" for row in rows], "ratio")
    axes[0].set_title("Ours against others")
    sweep = {n: gpu_report.swept(n) for n in gpu_report.SWEEP}
    contexts = {n: f"context {n}" for n in gpu_report.CONTEXTS}
    for ax, places, stage, tokens, title in (
        (axes[1], sweep, gpu_report.TRAINING, gpu_report.TOKENS, "Forward + backward"),
        (axes[2], contexts, gpu_report.STEP, 1, "One decoding step"),
    ):
        palette = colours(name for where in places.values() for name in record.contenders(where, stage))
        for name in palette:
            found = {n: gpu_report.best_time(record, where, name, stage) for n, where in places.items()}
            found = {n: min(times) * 1e9 / tokens for n, times in found.items() if not isinstance(times, str)}
            ax.plot(list(found), list(found.values()), "o-", color=palette[name], label=name)
        use_log_scale(ax.yaxis)
        unit = "nanoseconds per token" if tokens > 1 else "nanoseconds"
        over_lengths(ax, list(places), title=title, xlabel=SEQUENCE if tokens > 1 else CONTEXT, ylabel=unit)
        if palette:
            ax.legend()
    return figure


DRAW = {
    "operators": draw_operators,
    "family": draw_family,
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
        save(DRAW[part](), RESULTS / f"{part}.png")
