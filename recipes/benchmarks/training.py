"""Words per second and memory of fairseq-train: ours compared with softmax attention, here and in fairseq.

The small model of Schlag et al. 2021 (16 layers, D = 128, 8 heads, ffn 2048; Sec. 6.3 has speed and memory of these
rules and maps). Its 10,000 words are invented: with more, the softmax over the vocabulary would hide the layers.
The optimizer and the 2,048 tokens an update are the same for all. A run's speed is the median of its updates after the
first. Memory is the peak of one run's process beyond that of a run with few tokens.
"""

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from statistics import median

import models
from models import OURS
from pictures import Bars
from record import BYTES, SPEED, Goal, compare, say
from timing import GIVE_BACK

VOCABULARY = 10_000  # with the dictionary's four symbols
TOKENS_PER_UPDATE = 2048
LENGTHS = (256, 2048)
REPETITIONS = 3
UPDATES = 9
WARM_UP = 3
THREADS = "2"
# Memory is counted beyond that of an update of this few tokens, which loads the model and all libraries.
FEW_TOKENS = 16
KERNEL = [*OURS, "--fwp-backend", "kernel"]
# One band of adaptive inputs and softmax, tied: like ours, a plain softmax that adaptive_loss can use.
BAND = str(VOCABULARY)
DELTA, SUM, SOFTMAX, FAIRSEQ = "delta_lm_wt103", "sum_lm_wt103", "softmax_lm_wt103", "transformer_lm"
MODELS = {
    DELTA: KERNEL,
    SUM: KERNEL,
    "delta_dpfp_lm_wt103": KERNEL,
    # Schlag et al. 2021, Table 5: as many features as DPFP has.
    "delta_favor_lm_wt103": [*KERNEL, "--favor-features", "16"],
    SOFTMAX: OURS,
    FAIRSEQ: [
        *("--decoder-layers", "16", "--decoder-embed-dim", "128", "--decoder-ffn-embed-dim", "2048"),
        *("--decoder-attention-heads", "8", "--decoder-input-dim", "128", "--decoder-output-dim", "128"),
        *("--adaptive-input", "--adaptive-input-cutoff", BAND, "--adaptive-softmax-cutoff", BAND),
        *("--tie-adaptive-weights", "--tie-adaptive-proj"),
    ],
}


def prepare(folder):
    """Write a random corpus and return fairseq's data folder."""
    drawn = models.draw_words(VOCABULARY, TOKENS_PER_UPDATE * (UPDATES + 2)) - models.SPECIAL
    lines = [" ".join(f"w{word}" for word in line.tolist()) for line in drawn.split(64)]
    (folder / "train.txt").write_text("\n".join(lines) + "\n")
    models.write_dictionary(folder, VOCABULARY)
    files = ["--srcdict", folder / "dict.txt", "--trainpref", folder / "train.txt", "--destdir", folder / "data"]
    call("fairseq-preprocess", "--only-source", *files)
    return folder / "data"


def call(*command, **environment):
    """Return the output of a command and its peak memory in bytes; SystemExit with its last lines if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": THREADS} | environment
    words = [str(word) for word in command]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    answer = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[0]} failed: {(answer.strip().splitlines() or ['it said nothing'])[-1]}")
    return answer, usage.ru_maxrss * 1024


def train(model, data, length, tokens=TOKENS_PER_UPDATE, **environment):
    return call(
        *("fairseq-train", data, "--task", "language_modeling", "--arch", model, *MODELS[model], "--cpu"),
        *("--tokens-per-sample", length, "--sample-break-mode", "none", "--max-tokens", tokens),
        *("--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp", "--dropout", "0.1"),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.999)", "--lr", "0.00025", "--clip-norm", "0.25"),
        *("--max-update", UPDATES, "--no-save", "--disable-validation", "--num-workers", "0", "--seed", "1"),
        *("--required-batch-size-multiple", "1", "--log-format", "json", "--log-interval", "1"),
        **environment,
    )


def words_per_second(log):
    """Return the median of the updates after the warm-up, each timed by itself, from fairseq's JSON log."""
    updates = [json.loads(found) for found in re.findall(r"\| train_inner \| (\{.*\})", log)]
    speeds = [float(update["wps"]) for update in updates][WARM_UP:]
    if len(speeds) != UPDATES - WARM_UP:
        raise SystemExit(f"fairseq-train logged {len(updates)} updates instead of {UPDATES}: nothing is reported.")
    return median(speeds)


def place(length):
    return f"{length} tokens a sample"


def measure(record):
    """Measure the models in turn; memory beyond that of an update of FEW_TOKENS."""
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(Path(folder))
        for repetition in range(REPETITIONS):
            for length in LENGTHS:
                for model in MODELS:
                    speed = words_per_second(train(model, data, length)[0])
                    record.add(place(length), "training", model, [speed], SPEED)
                    say(f"repetition {repetition + 1} of {REPETITIONS}: {model}, {place(length)}: {speed:.0f} words/s")
        for model in MODELS:
            few = train(model, data, FEW_TOKENS, FEW_TOKENS, **GIVE_BACK)[1]
            for length in LENGTHS:
                peak = train(model, data, length, **GIVE_BACK)[1] - few
                record.add(place(length), "training", model, [peak], BYTES)
                say(f"memory: {model}, {place(length)}: {peak / 2**20:.0f} MB")


def goals(record):
    comparisons = [
        *((model, FAIRSEQ, 1 if model == DELTA else None) for model in MODELS if model != FAIRSEQ),
        *((model, SOFTMAX, None) for model in MODELS if model not in (FAIRSEQ, SOFTMAX)),
        (DELTA, SUM, 0.9),
    ]
    rows = []
    for kind, what in ((SPEED, SPEED), (BYTES, "memory")):
        for ours, peer, bound in comparisons:
            for length in LENGTHS:
                goal = Goal(f"{what}, {ours} vs {peer}", place(length), bound if kind == SPEED else None)
                pair = (peer, ours) if kind == SPEED else (ours, peer)
                rows.append(compare(record, goal, *((place(length), "training", name) for name in pair), kind))
    return rows


TITLE = "fairseq-train, 16 layers, D = 128"
PANELS = [
    Bars(TITLE, "words per second, multiple of the second's", lambda row: SPEED in row[0]),
    Bars(TITLE, "peak memory, multiple of the second's", lambda row: "memory" in row[0]),
]
