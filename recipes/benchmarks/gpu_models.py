"""Whole models on a GPU, for gpu.py: updates of fairseq's own trainer, and decoding after a long context.

The settings are those of Schlag et al. 2021 (256 tokens a sample and 96 samples an update for the small models, 384 and
56 for the medium ones). They are in bfloat16, with a vocabulary of WikiText-103's size; the words are random.
"""

import time
from statistics import median

import models
import torch
from gpu_peers import first_line
from gpu_report import CALLED, CONTEXTS, MEDIUM, SMALL, context_of
from inputs import STEP
from record import BYTES, SPEED

VOCABULARY = 267_744  # with the dictionary's four symbols, rounded as fairseq does
RULES = ("delta", "sum", "softmax", "xl")
# Samples of an update, tokens of a sample, and the models.
PLAN = {
    SMALL: (96, 256, [f"{rule}_lm_wt103" for rule in RULES]),
    MEDIUM: (56, 384, [f"{rule}_lm_wt103_medium" for rule in RULES]),
}
ROUNDS, UPDATES_A_ROUND, WARM_UP = 5, 4, 3
DECODED = ("delta_lm_wt103", "softmax_lm_wt103")
STEPS_A_ROUND = 8
FLAGS = ("--bf16",)


def measure(record, in_time):
    """Measure speed and memory of every update of the plan, and the step after each context."""
    for where, (samples, length, architectures) in PLAN.items():
        train(record, in_time, where, samples, length, architectures)
    for name in DECODED:
        decode(record, in_time, name)


def build(architecture, length):
    return models.build(VOCABULARY, "--arch", architecture, "--tokens-per-sample", length, *FLAGS)


def trainer_of(architecture, length):
    """Return fairseq's trainer for an architecture, as fairseq-train makes it."""
    from fairseq.trainer import Trainer

    built = build(architecture, length)
    built.cfg.common.tpu = False  # fairseq sets it with --bf16
    trainer = Trainer(*built)
    trainer.begin_epoch(1)
    return trainer


def train(record, in_time, where, samples, length, architectures):
    sample, trainers = models.sample(VOCABULARY, samples, length), {}
    for name in architectures:
        if not in_time(where, "training", [name]):
            continue
        before = allocated()
        try:
            trainer = trainer_of(name, length)
            for _ in range(WARM_UP):
                trainer.train_step([sample])
        except (Exception, SystemExit) as error:  # any reason: the report shows it next to the models that run
            record.miss(where, "training", name, first_line(error))
            continue
        trainers[name] = trainer
        record.add(where, "training", name, [allocated(peak=True) - before], BYTES)
    for i in range(ROUNDS):
        if i and not in_time(where, f"training, round {i + 1}", ()):
            break  # the same number of rounds for each
        for name, trainer in trainers.items():
            trainer.train_step([sample])  # the previous model has cleared the caches
            seconds = sum(elapsed(lambda trainer=trainer: trainer.train_step([sample]), UPDATES_A_ROUND))
            record.add(where, "training", name, [UPDATES_A_ROUND * sample["ntokens"] / seconds], SPEED)


def decode(record, in_time, name):
    """Time a step of the model, one sequence, after contexts that it reads at once."""
    steps, model = WARM_UP + ROUNDS * STEPS_A_ROUND, None
    for context in CONTEXTS:
        where = context_of(context)
        if not in_time(where, STEP, [name]):
            continue
        try:
            model = model or on_device(build(name, CONTEXTS[-1] + steps).model)
            tokens = models.sample(VOCABULARY, 1, context + steps)["net_input"]["src_tokens"]
            found = step_seconds(model.decoder, tokens.to(next(model.parameters()).device), context)
        except (RuntimeError, SystemExit) as error:  # such as too little memory for attention over a long context
            record.miss(where, STEP, name, first_line(error))
            continue
        record.add(where, STEP, name, found, CALLED)


def on_device(model):
    dtype = torch.bfloat16 if "--bf16" in FLAGS else torch.float32
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu", dtype)


@torch.no_grad()
def step_seconds(decoder, tokens, context):
    """Return the median seconds of a step, by round, after a context that is read at once."""
    state = {}
    decoder(tokens[:, :context], incremental_state=state, features_only=True)
    lengths = iter(range(context + 1, tokens.shape[1] + 1))

    def step():
        decoder(tokens[:, : next(lengths)], incremental_state=state)

    elapsed(step, WARM_UP)
    return [median(elapsed(step, STEPS_A_ROUND)) for _ in range(ROUNDS)]


def elapsed(call, times):
    """Return the seconds of each of several calls, until the device has finished."""
    found = []
    for _ in range(times):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        found.append(time.perf_counter() - start)
    return found


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated(peak=False):
    """Return the device memory in use; with `peak` the highest since the last call without it; 0 without a device."""
    if not torch.cuda.is_available():
        return 0
    if peak:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
