"""The kernels of a version before against these: `python before.py FOLDER`, a checkout whose recipes/setup.sh has run.

`--models`: whole models in place of kernels, a training step and decoding token by token.

float32, one thread, at the shapes of operators.py. Each installation measures its own calls in a process of its own, in
turn, so that a slow moment hits both alike.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import operators
import torch
from report import Goal, goal_row, publish, ratios, say

from fairseq_fwp import ops

ROOT = Path(__file__).resolve().parents[2]
FORMS = {
    "sum": (ops.sum_rule, "q k v"),
    "delta": (ops.delta_rule, "q k v beta"),
    "gated": (ops.gated_rule, "q k v gate"),
    "decay": (ops.decay_rule, "q k v key_decay value_decay"),
}
ROUNDS, SECONDS_A_CALL, BOUND = 9, 0.02, 1.03


def calls():
    """{(rule and pass, where): a call of this installation}."""
    found = {}
    for where, shape in operators.SHAPES.items():
        tensors = operators.inputs(shape)
        gradient = torch.randn(*shape[:3], shape[4])
        for name, (rule, names) in FORMS.items():
            chosen, form = [tensors[x] for x in names.split()], operators.first(rule, "kernel")
            found[f"{name}, {operators.TRAINING}", where] = partial(operators.training_step, form, chosen, gradient)
            found[f"{name}, forward", where] = partial(form, *(x.detach() for x in chosen))
    for batch in operators.STEP_BATCHES:
        tensors = {name: x.detach() for name, x in operators.inputs((batch, 8, 1, 64, 64)).items()}
        state = torch.randn(batch, 8, 64, 64)
        for name, (rule, names) in FORMS.items():
            step = partial(rule, *(tensors[x] for x in names.split()), state, backend="kernel")
            found[f"{name}, decoding step", f"B = {batch}, H = 8, d = 64"] = step
    return found


# Models of four layers, by their flags; sequences and tokens of a training step.
MODELS = {
    "sum": ("--arch sum_lm_wt103", 8, 256),
    "delta": ("--arch delta_lm_wt103", 8, 256),
    "delta, both normalisations": ("--arch delta_lm_wt103 --attention-normalization", 8, 256),
    "gated delta": ("--arch gated_delta_lm_wt103", 8, 256),
    "decay": ("--arch decay_lm_wt103", 8, 256),
    "softmax": ("--arch softmax_lm_wt103", 8, 256),
    "Transformer-XL": ("--arch xl_lm_wt103", 8, 256),
    "fast weight layer": ("--arch fwp_fwl_lm --decoder-update-rule softmax --attention-window 64", 8, 256),
    "translation, delta": ("--arch delta_mt_wmt14_en_de", 16, 32),
}
WORDS, DECODED = 1000, 32


def model_calls():
    """The same of whole models: a training step, and one sequence token by token."""
    from fairseq.data import Dictionary
    from fairseq.models import (
        ARCH_CONFIG_REGISTRY,
        ARCH_MODEL_NAME_REGISTRY,
        ARCH_MODEL_REGISTRY,
        MODEL_DATACLASS_REGISTRY,
    )
    from omegaconf import OmegaConf

    import fairseq_fwp.models  # noqa: F401  (registers them)

    dictionary = Dictionary()
    for index in range(WORDS - len(dictionary)):
        dictionary.add_symbol(str(index))
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    found = {}
    for name, (flags, sequences, length) in MODELS.items():
        arch = flags.split()[1]
        parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
        parser.add_argument("--arch")
        ARCH_MODEL_REGISTRY[arch].add_args(parser)
        layers = ["--decoder-layers", "4", *(("--encoder-layers", "4") if "_mt_" in arch else ())]
        args = parser.parse_args([*flags.split(), *layers])
        of_task = {"tokens_per_sample": length, "max_target_positions": 1024, "add_bos_token": False}
        vars(args).update(of_task)
        ARCH_CONFIG_REGISTRY[arch](args)
        options = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY[arch])
        given = {name: value for name, value in vars(args).items() if name != "arch"}
        cfg = OmegaConf.merge(OmegaConf.structured(options), given) if options else args
        torch.manual_seed(1)
        model = ARCH_MODEL_REGISTRY[arch].build_model(cfg, task)
        tokens = torch.randint(4, WORDS, (sequences, length))
        where = f"{sequences} x {length} tokens"
        found[f"{name}, {operators.TRAINING}", where] = partial(train_step, model, tokens)
        found[f"{name}, decoding", f"{DECODED} tokens"] = partial(decode, model, tokens[:1, :DECODED])
    return found


def train_step(model, tokens):
    """Loss and gradients of a batch; a translation model reads the same as its source."""
    model.train()
    if hasattr(model, "encoder"):
        out, _ = model(tokens, torch.full((len(tokens),), tokens.shape[1]), tokens)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), tokens.flatten())
    else:
        features, _ = model(tokens)
        logits, targets = model.decoder.adaptive_softmax(features, tokens)
        loss = torch.nn.functional.cross_entropy(logits[0], targets[0])
    model.zero_grad()
    loss.backward()


@torch.no_grad()
def decode(model, tokens):
    """Every token in a step of its own."""
    model.eval()
    state, source = {}, None
    if hasattr(model, "encoder"):
        lengths = torch.full((len(tokens),), tokens.shape[1])
        source = model.encoder.forward_torchscript({"src_tokens": tokens, "src_lengths": lengths})
    for end in range(1, tokens.shape[1] + 1):
        if source is None:
            model.decoder(tokens[:, :end], incremental_state=state)
        else:
            model.decoder(tokens[:, :end], source, incremental_state=state)


def serve(models):
    """Say what there is, then answer how many seconds a call takes: a line of its number and how often in, one out."""
    torch.set_num_threads(1)
    known = model_calls() if models else calls()
    for call in known.values():
        call()
    print(json.dumps(list(known)), flush=True)
    for line in sys.stdin:
        which, often = map(int, line.split())
        call = list(known.values())[which]
        for _ in range(often // 2):
            call()
        start = time.perf_counter()
        for _ in range(often):
            call()
        print((time.perf_counter() - start) / often, flush=True)


class Installation:
    """A process that serves the calls of one folder. Freed memory stays with it: see run.sh."""

    def __init__(self, folder, models):
        keep = {"MALLOC_TRIM_THRESHOLD_": "8589934592", "MALLOC_MMAP_MAX_": "0", "OMP_NUM_THREADS": "1"}
        command = [folder / ".venv/bin/python", __file__, "--serve", *(["--models"] if models else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | keep
        )
        first = self.process.stdout.readline()
        if not first:
            raise SystemExit(f"before.py: {folder} must have a .venv in which the kernels can be built, see above")
        self.names = [tuple(name) for name in json.loads(first)]

    def seconds(self, which, often):
        print(which, often, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def compare(folder, models):
    sides = {"before": Installation(folder.resolve(), models), "now": Installation(ROOT, models)}
    names = sides["now"].names
    often = [max(1, round(SECONDS_A_CALL / sides["before"].seconds(i, 1))) for i in range(len(names))]
    times = {side: [[] for _ in names] for side in sides}
    for i in range(ROUNDS):
        say(f"round {i + 1} of {ROUNDS}")
        for which, count in enumerate(often):
            for side in list(sides)[:: 1 if i % 2 else -1]:
                times[side][which].append(sides[side].seconds(which, count))
    rows = [
        goal_row(Goal(what, where, BOUND, at_most=True), ratios(times["now"][i], times["before"][i]))
        for i, (what, where) in enumerate(names)
    ]
    raw = [
        [*names[which], side, i, x]
        for side, of in times.items()
        for which, seconds in enumerate(of)
        for i, x in enumerate(seconds)
    ]
    commit = subprocess.run(["git", "-C", folder, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    before = f"Time now / time before, {commit.stdout.strip() or 'a version'}; one thread, float32.\n"
    header = ["what", "where", "version", "round", "seconds"]
    publish("before_models" if models else "before", header, raw, rows, before, script="before.py", picture=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of the version before")
    parser.add_argument("--models", action="store_true", help="whole models in place of kernels")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.models)
    elif args.folder is None:
        parser.error("the folder of the version before is missing")
    else:
        compare(args.folder, args.models)


if __name__ == "__main__":
    main()
