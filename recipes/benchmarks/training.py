"""Words per second and memory of fairseq-train: ours against softmax attention, here and in fairseq (run.sh does it).

The small model of Schlag et al. 2021 (16 layers, D = 128, 8 heads, ffn 2048; Sec. 6.3 has speed and memory of these
rules and maps), 10,000 invented words so that the softmax over the vocabulary does not hide the layers, the same
optimizer and the same 2,048 tokens an update for all.
"""

import json
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path
from statistics import median

import torch
from report import HERE, Goal, goal_row, publish, ratios, say

VOCABULARY = 10_000  # with the dictionary's four symbols
TOKENS_PER_UPDATE = 2048
LENGTHS = (256, 2048)
REPETITIONS = 3
UPDATES = 9
WARM_UP = 3
THREADS = "2"
# Memory is what an update takes beyond one of so few tokens, which loads the model and all libraries.
FEW_TOKENS = 16
OURS = ["--user-dir", str(HERE.parents[1] / "fairseq_fwp")]
KERNEL = [*OURS, "--fwp-backend", "kernel"]
# One band of adaptive inputs and softmax, tied: as ours, a plain softmax that the criterion adaptive_loss can take.
BAND = str(VOCABULARY)
DELTA, SUM, SOFTMAX, FAIRSEQ = "delta_lm_wt103", "sum_lm_wt103", "softmax_lm_wt103", "transformer_lm"
DPFP, FAVOR = "delta_dpfp_lm_wt103", "delta_favor_lm_wt103"
MODELS = {
    DELTA: KERNEL,
    SUM: KERNEL,
    DPFP: KERNEL,
    FAVOR: [*KERNEL, "--favor-features", "16"],  # Schlag et al. 2021, Table 5: as many features as DPFP has
    SOFTMAX: OURS,
    FAIRSEQ: [
        *("--decoder-layers", "16", "--decoder-embed-dim", "128", "--decoder-ffn-embed-dim", "2048"),
        *("--decoder-attention-heads", "8", "--decoder-input-dim", "128", "--decoder-output-dim", "128"),
        *("--adaptive-input", "--adaptive-input-cutoff", BAND, "--adaptive-softmax-cutoff", BAND),
        *("--tie-adaptive-weights", "--tie-adaptive-proj"),
    ],
}


def prepare(folder):
    """A corpus whose words follow Zipf's law; only its speed matters. Returns fairseq's data folder."""
    words = VOCABULARY - 4
    count = TOKENS_PER_UPDATE * (UPDATES + 2)
    frequencies = 1 / torch.arange(1, words + 1)
    drawn = torch.multinomial(frequencies, count, replacement=True, generator=torch.Generator().manual_seed(1))
    lines = [" ".join(f"w{word}" for word in line.tolist()) for line in drawn.split(64)]
    (folder / "train.txt").write_text("\n".join(lines) + "\n")
    (folder / "dict.txt").write_text("".join(f"w{word} 1\n" for word in range(words)))
    files = [
        "--srcdict",
        folder / "dict.txt",
        "--trainpref",
        folder / "train.txt",
        "--destdir",
        folder / "data",
    ]
    call("fairseq-preprocess", "--only-source", *files)
    return folder / "data"


def call(*command, **environment):
    """What a command printed; ends the program with the command's last words when it fails."""
    return call_and_watch(*command, **environment)[0]


def call_and_watch(*command, **environment):
    """What a command printed, and the most memory that it had, in bytes."""
    process = subprocess.Popen(
        [str(word) for word in command],
        env=os.environ | {"OMP_NUM_THREADS": THREADS} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    answer = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[0]} failed: {(answer.strip().splitlines() or ['it said nothing'])[-1]}")
    return answer, usage.ru_maxrss * 1024


def command(model, data, length, tokens=TOKENS_PER_UPDATE):
    return [
        *("fairseq-train", data, "--task", "language_modeling", "--arch", model, *MODELS[model], "--cpu"),
        *("--tokens-per-sample", length, "--sample-break-mode", "none", "--max-tokens", tokens),
        *("--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp", "--dropout", "0.1"),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.999)", "--lr", "0.00025", "--clip-norm", "0.25"),
        *("--max-update", UPDATES, "--no-save", "--disable-validation", "--num-workers", "0", "--seed", "1"),
        *("--required-batch-size-multiple", "1", "--log-format", "json", "--log-interval", "1"),
    ]


def words_per_second(log):
    """Median over the updates after the warm-up, each timed by itself, from fairseq's JSON log."""
    updates = [json.loads(found) for found in re.findall(r"\| train_inner \| (\{.*\})", log)]
    speeds = [float(update["wps"]) for update in updates][WARM_UP:]
    if len(speeds) != UPDATES - WARM_UP:
        raise SystemExit(f"fairseq-train logged {len(updates)} updates instead of {UPDATES}: nothing is reported.")
    return median(speeds)


def measure(data):
    """{(model, length): words per second of each repetition}, the models in turn."""
    speeds = {(model, length): [] for length in LENGTHS for model in MODELS}
    for repetition in range(REPETITIONS):
        for model, length in speeds:
            found = words_per_second(call(*command(model, data, length)))
            speeds[model, length].append(found)
            say(f"repetition {repetition + 1} of {REPETITIONS}: {model}, {length} tokens a sample: {found:.0f} words/s")
    return speeds


def measure_memory(data):
    """{(model, length): bytes that an update takes beyond one of FEW_TOKENS}."""
    found = {}
    for model in MODELS:
        # Freed memory goes back at once, so that what is resident is what is in use.
        few, *peaks = (
            call_and_watch(*command(model, data, length, tokens), MALLOC_MMAP_THRESHOLD_="65536")[1]
            for length, tokens in [(FEW_TOKENS, FEW_TOKENS), *((length, TOKENS_PER_UPDATE) for length in LENGTHS)]
        )
        for length, peak in zip(LENGTHS, peaks, strict=True):
            found[model, length] = peak - few
            say(f"memory: {model}, {length} tokens a sample: {(peak - few) / 2**20:.0f} MB")
    return found


def goal_rows(speeds, peaks):
    comparisons = [
        *((model, FAIRSEQ, 1 if model == DELTA else None) for model in MODELS if model != FAIRSEQ),
        *((model, SOFTMAX, None) for model in MODELS if model not in (FAIRSEQ, SOFTMAX)),
        (DELTA, SUM, 0.9),
    ]
    rows = []
    for ours, peer, bound in comparisons:
        for length in LENGTHS:
            seconds = ([1 / speed for speed in speeds[model, length]] for model in (peer, ours))
            goal = Goal(f"words per second, {ours} vs {peer}", f"{length} tokens a sample", bound)
            rows.append(goal_row(goal, ratios(*seconds)))
    for ours, peer, _ in comparisons:
        for length in LENGTHS:
            goal = Goal(f"memory, {ours} vs {peer}", f"{length} tokens a sample")
            rows.append(goal_row(goal, peaks[ours, length] / peaks[peer, length]))
    return rows


def main():
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(Path(folder))
        speeds, peaks = measure(data), measure_memory(data)
    commands = "\n".join(shlex.join(map(str, command(model, "DATA", LENGTHS[0]))) for model in MODELS)
    publish(
        "training",
        ["model", "tokens_per_sample", "repetition", "words_per_second", "memory_bytes"],
        [[*key, i, f"{speed:.1f}", peaks[key]] for key, found in speeds.items() for i, speed in enumerate(found)],
        goal_rows(speeds, peaks),
        f"{THREADS} threads, {TOKENS_PER_UPDATE} tokens an update, {REPETITIONS} runs of each, interleaved; a run's "
        f"speed is the median of its updates after the first {WARM_UP}. Memory is the peak of one run's process beyond "
        f"that of a run with {FEW_TOKENS} tokens an update.\n",
        f"```\n{commands.replace(OURS[1], 'fairseq_fwp')}\n```\n",
    )


if __name__ == "__main__":
    main()
