"""Whole models on a GPU: updates of fairseq's own trainer, and decoding after a long context (gpu.py does it).

The settings are those of Schlag et al. 2021 (256 tokens a sample and 96 samples an update for the small models, 384 and
56 for the medium ones), in bfloat16, with a vocabulary of WikiText-103's size; the words are random.
"""

import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from gpu_peers import first_line
from gpu_report import BYTES, CONTEXTS, EAGER, SPEED, STEP

VOCABULARY = 267_744  # with the dictionary's four symbols, rounded as fairseq does
SMALL, MEDIUM = (96, 256), (56, 384)
PLAN = {
    SMALL: ("delta_lm_wt103", "sum_lm_wt103", "softmax_lm_wt103", "xl_lm_wt103"),
    MEDIUM: ("delta_lm_wt103_medium", "sum_lm_wt103_medium", "softmax_lm_wt103_medium", "xl_lm_wt103_medium"),
}
ROUNDS, UPDATES_A_ROUND, WARM_UP = 5, 4, 3
DECODED = ("delta_lm_wt103", "softmax_lm_wt103")
STEPS_A_ROUND = 8


def measure(record, in_time, plan=PLAN, contexts=CONTEXTS, flags=("--bf16",)):
    """Words per second and memory of what is registered, and the step after each context."""
    with tempfile.TemporaryDirectory() as folder:
        words = "".join(f"w{i} 1\n" for i in range(VOCABULARY - 4))
        Path(folder, "dict.txt").write_text(words)
        for update, architectures in plan.items():
            where = name_of(update)
            train(record, in_time, where, update, architectures, folder, flags)
        for name in DECODED:
            due = [n for n in contexts if in_time(f"context {n}", STEP, [name])]
            if due:
                decode(record, in_time, name, folder, due, flags)


def name_of(update):
    return f"{update[0]} x {update[1]} tokens"


def trainer_of(architecture, update, folder, flags):
    """fairseq's trainer for an architecture, as fairseq-train makes it."""
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.trainer import Trainer

    from fairseq_fwp import models  # noqa: F401 - registers the architectures

    if architecture not in ARCH_MODEL_REGISTRY:
        raise LookupError("it is not registered")
    samples, length = update
    words = [
        *(folder, "--task", "language_modeling", "--arch", architecture, "--tokens-per-sample", length),
        *("--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp", "--optimizer", "adam", "--lr", "0.00025"),
        *("--clip-norm", "0.25", "--batch-size", samples, "--max-update", "1000000", "--seed", "1", *flags),
    ]
    parsed = options.parse_args_and_arch(options.get_training_parser(), [str(word) for word in words])
    cfg = convert_namespace_to_omegaconf(parsed)
    cfg.common.tpu = False  # fairseq takes --bf16 for one
    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    trainer.begin_epoch(1)
    return trainer


def sample_of(update):
    samples, length = update
    tokens = torch.randint(4, VOCABULARY, (samples, length + 1), generator=torch.Generator().manual_seed(2))
    return {
        "id": torch.arange(samples),
        "nsentences": samples,
        "ntokens": samples * length,
        "net_input": {"src_tokens": tokens[:, :-1], "src_lengths": torch.full((samples,), length)},
        "target": tokens[:, 1:].contiguous(),
    }


def train(record, in_time, where, update, architectures, folder, flags):
    sample, trainers = sample_of(update), {}
    for name in architectures:
        if not in_time(where, "training", [name]):
            continue
        before = allocated()
        try:
            trainer = trainer_of(name, update, folder, flags)
            for _ in range(WARM_UP):
                trainer.train_step([sample])
        except Exception as error:  # whatever the reason: it stands beside the models that run
            record.miss(where, "training", name, first_line(error))
            continue
        trainers[name] = trainer
        record.add(where, "training", name, BYTES, [allocated(peak=True) - before])
    seconds = {name: [] for name in trainers}
    for i in range(ROUNDS):
        if i and not in_time(where, f"training, round {i + 1}", ()):
            break  # as many rounds for each: they are compared
        for name, trainer in trainers.items():
            trainer.train_step([sample])  # what ran before has cleared the caches
            updates = elapsed(partial(trainer.train_step, [sample]), UPDATES_A_ROUND)
            seconds[name].append(sum(updates) / UPDATES_A_ROUND)
    for name, found in seconds.items():
        record.add(where, "training", name, SPEED, [sample["ntokens"] / s for s in found])


def decode(record, in_time, name, folder, contexts, flags):
    """A step of the model, one sequence, after contexts that it reads at once."""
    steps = WARM_UP + ROUNDS * STEPS_A_ROUND
    try:
        model = trainer_of(name, (1, contexts[-1] + steps), folder, flags).model.eval()
    except LookupError as error:
        for context in contexts:
            record.miss(f"context {context}", STEP, name, first_line(error))
        return
    device = next(model.parameters()).device
    tokens = sample_of((1, contexts[-1] + steps))["net_input"]["src_tokens"].to(device)
    for context in contexts:
        if not in_time(f"context {context}", STEP, [name]):
            continue
        try:
            with torch.no_grad():
                found = step_seconds(model.decoder, tokens[:, : context + steps], context)
        except RuntimeError as error:  # above all: the attention over a long context needs too much memory
            record.miss(f"context {context}", STEP, name, first_line(error))
            continue
        record.add(f"context {context}", STEP, name, EAGER, found)


def step_seconds(decoder, tokens, context):
    """Median seconds of a step, by round, after a context that is read at once."""
    state = {}
    decoder(tokens[:, :context], incremental_state=state, features_only=True)
    lengths = iter(range(context + 1, tokens.shape[1] + 1))

    def step():
        decoder(tokens[:, : next(lengths)], incremental_state=state)

    elapsed(step, WARM_UP)
    return [median(elapsed(step, STEPS_A_ROUND)) for _ in range(ROUNDS)]


def elapsed(call, times):
    """Seconds of each of several calls, until the device has done it."""
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
    """Bytes of the device now, or at most since this was last asked without `peak`; 0 without a device."""
    if not torch.cuda.is_available():
        return 0
    if peak:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
