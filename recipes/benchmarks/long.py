"""Cost of long sequences for whole models: delta_lm_wt103 and fairseq's transformer_lm.

A training step (loss and backward) at growing lengths, and decoding token by token with a growing context. Every
measurement has a process of its own, so that its peak memory is its own.
"""

import resource
import time
from pathlib import Path
from statistics import median

import models
import torch
from models import OURS
from pictures import Curves
from record import BYTES, SECONDS, Goal, compare, say
from timing import GIVE_BACK, alone, memory
from training import MODELS as FLAGS
from training import THREADS, VOCABULARY

DELTA, TRANSFORMER = MODELS = ("delta_lm_wt103", "transformer_lm")
STEP, DECODING = "training step", "decoding"
LENGTHS = (1024, 4096, 16384)
CONTEXTS = (256, 1024, 4096)
STEPS_TIMED = 32
REPETITIONS = 2
SECONDS_ALLOWED = 120
SHARE_OF_MEMORY = 0.8


def build(name, length):
    flags = [flag for flag in FLAGS[name] if flag not in OURS]
    return models.build(VOCABULARY, "--arch", name, *flags, "--tokens-per-sample", length, "--dropout", "0.1", "--cpu")


def limit_memory():
    """Limit the memory of this process, so that an allocation fails before the machine runs out of memory."""
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
    allowed = int(int(available.split()[1]) * 1024 * SHARE_OF_MEMORY)
    ceiling = memory("VmSize") + allowed
    resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))
    return allowed


def training_step(built, length):
    built.model.zero_grad()
    built.criterion(built.model, models.sample(VOCABULARY, 1, length))[0].backward()


def measure_step(name, length):
    """Return the seconds of a step, and its peak memory beyond the model with its gradients."""
    built = build(name, length)
    built.model.train()
    allowed = limit_memory()
    training_step(built, 64)
    before, seconds = memory("VmRSS"), []
    try:
        for _ in range(2):
            start = time.perf_counter()
            training_step(built, length)
            seconds.append(time.perf_counter() - start)
    except (RuntimeError, MemoryError) as error:
        if "allocate memory" not in str(error):
            raise
        return {"stopped": f"needs more than {allowed / 2**30:.0f} GB"}
    return {SECONDS: min(seconds), BYTES: memory("VmHWM") - before}


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


@torch.no_grad()
def measure_decoding(name, longest):
    """Return {context: seconds a token and bytes of the decoding state}; the context grows token by token."""
    model = build(name, longest).model.eval()
    tokens = models.sample(VOCABULARY, 1, longest)["net_input"]["src_tokens"]
    state, seconds, found = {}, [], {}
    for length in range(1, longest + 1):
        start = time.perf_counter()
        model.get_normalized_probs(model.decoder(tokens[:, :length], incremental_state=state), log_probs=True)
        seconds.append(time.perf_counter() - start)
        if length in CONTEXTS:
            size = sum(tensor.nbytes for tensor in tensors_in(state))
            found[str(length)] = {SECONDS: median(seconds[-STEPS_TIMED:]), BYTES: size}
    return found


def measure_alone(stage, name, length):
    return {STEP: measure_step, DECODING: measure_decoding}[stage](name, int(length))


def measure(record):
    """Measure the models in turn."""
    how = {"limit": SECONDS_ALLOWED, "OMP_NUM_THREADS": THREADS, **GIVE_BACK}
    for repetition in range(REPETITIONS):
        for name in MODELS:
            say(f"repetition {repetition + 1} of {REPETITIONS}: decoding, {name}")
            found = alone("long", DECODING, name, CONTEXTS[-1], **how)
            for n in CONTEXTS:
                record.take(f"{n} tokens", DECODING, name, found.get(str(n), found))
        for n in LENGTHS:
            for name in MODELS:
                say(f"repetition {repetition + 1} of {REPETITIONS}: training step, {name}, {n} tokens")
                record.take(f"{n} tokens", STEP, name, alone("long", STEP, name, n, **how))


def growth(record, goal, stage, name, lengths, what, times=1.0):
    longest, shortest = ((f"{n} tokens", stage, name) for n in (lengths[-1], lengths[0]))
    return compare(record, goal, longest, shortest, what, times)


def goals(record):
    rows, where = [], f"{LENGTHS[0]} -> {LENGTHS[-1]} tokens"
    for what, label in ((SECONDS, "time"), (BYTES, "peak memory")):
        for name in MODELS:
            bound = 1.5 if name == DELTA else None
            goal = Goal(f"{name}, {STEP}, growth of {label} per token", where, bound, at_most=True)
            rows.append(growth(record, goal, STEP, name, LENGTHS, what, LENGTHS[0] / LENGTHS[-1]))
    for what, label, bound in ((SECONDS, "time per token", 1.2), (BYTES, "decoding state", 1)):
        for name in MODELS:
            of_name = bound if name == DELTA else None
            at = f"context {CONTEXTS[0]} -> {CONTEXTS[-1]}"
            goal = Goal(f"{name}, {DECODING}, growth of {label}", at, of_name, at_most=True)
            rows.append(growth(record, goal, DECODING, name, CONTEXTS, what))
    for stage, lengths in ((STEP, LENGTHS), (DECODING, CONTEXTS)):
        for what, label in ((SECONDS, "time"), (BYTES, "memory")):
            for place in (f"{n} tokens" for n in lengths):
                goal = Goal(f"{TRANSFORMER} over {DELTA}, {stage}, {label}", place)
                rows.append(compare(record, goal, *((place, stage, name) for name in (TRANSFORMER, DELTA)), what))
    return rows


def paragraphs(_):
    return [
        f"{THREADS} threads, one sequence, {REPETITIONS} repetitions, every measurement in a process of its own. "
        "Peak memory is beyond the model and its gradients. A quadratic cost would grow "
        f"{LENGTHS[-1] // LENGTHS[0]}-fold per token from the shortest to the longest.\n"
    ]


PANELS = [
    Curves("{} tokens", STEP, unit="milliseconds per token", scale=lambda value, n: 1000 * value / n),
    Curves("{} tokens", STEP, unit="peak memory (MB)", what=BYTES, log=True),
    Curves("{} tokens", DECODING, unit="milliseconds per token", scale=lambda value, n: 1000 * value),
    Curves("{} tokens", DECODING, unit="memory of the context (MB)", what=BYTES, log=True),
]
