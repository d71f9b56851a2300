"""Compare an earlier version with this one: `python before.py FOLDER`, a checkout whose recipes/setup.sh has run.

Measured are the kernels at the shapes of operators.py and at those of today's models; with `--bfloat16` these in both
dtypes; with `--models` whole models: a training step and decoding token by token. float32 where nothing
else is said, CPU time of one thread. Each installation runs in a separate
process. They take turns, so that a slow moment affects both. Each round has a product of matrices, today's floor.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import inputs
import models
import torch
from family import HEAD, KEY, PASSES, PRODUCT, products_in
from inputs import FORWARD, STEP, TRAINING
from operators import OURS, SHAPES, STEPS
from record import HERE, Goal, Record, compare, fastest, git, make_parser, publish, say
from timing import KEEP, Contender

ROUNDS, SECONDS_A_CALL, BOUND = 9, 0.02, 1.03
TODAY = {"d = 128": (1, 4, 256, 128, 128), "d = 64": (1, 8, 256, 64, 64)}
RULES = (*OURS, f"gla, {HEAD}", f"gla, {KEY}", f"gated_delta, {HEAD}", f"gated_delta, {KEY}", "rwkv7")
# Passes over the memory are counted as those of the rules that do not forget. The least shares of a product's rate.
FORGETTING = {
    f"{rule}, {decay}": of for rule, of in (("gla", "sum"), ("gated_delta", "delta")) for decay in (HEAD, KEY)
}
IN_BFLOAT16 = (*PASSES, *FORGETTING, "decay", "rwkv7", "gdn2")
SHARES = {"d = 128": {FORWARD: 0.7, TRAINING: 0.55}, "d = 64": {FORWARD: 0.55, TRAINING: 0.45}}
# Models of four layers, by their flags; sequences and tokens of a training step.
MODELS = {
    "sum": ("sum_lm_wt103", 8, 256),
    "delta": ("delta_lm_wt103", 8, 256),
    "delta, both normalisations": ("delta_lm_wt103 --attention-normalization", 8, 256),
    "gated delta": ("gated_delta_lm_wt103", 8, 256),
    "decay": ("decay_lm_wt103", 8, 256),
    "Gated DeltaNet": ("gated_deltanet_lm_tiny", 8, 256),
    "softmax": ("softmax_lm_wt103", 8, 256),
    "softmax, RMS, SwiGLU": ("softmax_lm_wt103 --rms-norm --swiglu --decoder-normalize-before", 8, 256),
    "Transformer-XL": ("xl_lm_wt103", 8, 256),
    "fast weight layer": ("fwp_fwl_lm --decoder-update-rule softmax --attention-window 64", 8, 256),
    "translation, delta": ("delta_mt_wmt14_en_de", 16, 32),
}
WORDS, DECODED = 1000, 32


def kernel_calls():
    """Return {(rule and pass, where): a call of this installation}."""
    found = {}
    for (where, shape), name in itertools.product((SHAPES | TODAY).items(), RULES):
        calls = inputs.passes(inputs.call(name), name, shape)
        found |= {(f"{name}, {stage}", where): call for stage, call in calls.items()}
    for where, shape in STEPS.items():
        state = torch.randn(shape[0], 8, 64, 64)
        found |= {(f"{name}, {STEP}", where): inputs.step(name, inputs.draw(name, shape), state) for name in RULES}
    return found


def bfloat16_calls():
    """Return the same for more rules, at the shapes of today's models, in float32 and in bfloat16."""
    found = {}
    for (where, shape), kind, name in itertools.product(TODAY.items(), ("float32", "bfloat16"), IN_BFLOAT16):
        calls = inputs.passes(inputs.call(name), name, shape, getattr(torch, kind))
        found |= {(f"{name}, {kind}, {stage}", where): call for stage, call in calls.items()}
    return found


def model_calls():
    """Return the same for whole models: a training step, and decoding one sequence token by token."""
    found = {}
    for name, (flags, sequences, length) in MODELS.items():
        flags = ["--arch", *flags.split(), "--decoder-layers", 4]
        translation = "_mt_" in flags[1]
        flags += ["--encoder-layers", 4] if translation else ["--tokens-per-sample", length]
        kind = {"task": "translation", "criterion": "cross_entropy"} if translation else {}
        model = models.build(WORDS, *flags, **kind).model
        tokens = torch.randint(4, WORDS, (sequences, length))
        found[f"{name}, {TRAINING}", f"{sequences} x {length} tokens"] = partial(train_step, model, tokens)
        found[f"{name}, decoding", f"{DECODED} tokens"] = partial(decode, model, tokens[:1, :DECODED])
    return found


def train_step(model, tokens):
    """Compute loss and gradients of a batch; in translation the source is the target."""
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
    """Decode token by token."""
    model.eval()
    state, source = {}, ()
    if hasattr(model, "encoder"):
        lengths = torch.full((len(tokens),), tokens.shape[1])
        source = (model.encoder.forward_torchscript({"src_tokens": tokens, "src_lengths": lengths}),)
    for end in range(1, tokens.shape[1] + 1):
        model.decoder(tokens[:, :end], *source, incremental_state=state)


def serve(calls):
    """Print the names of the calls, then answer each line "number repetitions" with the seconds of that call."""
    torch.set_num_threads(1)
    for call in calls.values():
        call()
    print(json.dumps(list(calls)), flush=True)
    for line in sys.stdin:
        which, often = map(int, line.split())
        print(Contender(list(calls.values())[which], clock=time.process_time).seconds(often), flush=True)


class Installation:
    """A process that runs the calls of the installation in a folder."""

    def __init__(self, folder, flags):
        python = folder / ".venv/bin/python"
        if not python.exists():
            raise SystemExit(f"before.py: {folder} must have a .venv: run its recipes/setup.sh first")
        command = [python, __file__, "--serve", *flags]
        environment = os.environ | KEEP | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        first = self.process.stdout.readline()
        if not first:
            raise SystemExit(f"before.py: the calls of {folder} failed, see above")
        self.names = [tuple(name) for name in json.loads(first)]

    def seconds(self, which, often):
        print(which, often, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def measure(record, folder, flags):
    sides = {"before": Installation(folder.resolve(), flags), "now": Installation(HERE.parents[1], flags)}
    names = sides["now"].names
    often = [max(1, round(SECONDS_A_CALL / sides["before"].seconds(i, 1))) for i in range(len(names))]
    products = {name: Contender(call, clock=time.process_time) for name, call in inputs.products(PRODUCT).items()}
    for i in range(ROUNDS):
        say(f"round {i + 1} of {ROUNDS}")
        for name, product in products.items():
            record.add("product", FORWARD, name, [product.seconds(4)])
        for which, (what, where) in enumerate(names):
            for side in list(sides)[:: 1 if i % 2 else -1]:
                record.add(where, what, side, [sides[side].seconds(which, often[which])])


def shares(record):
    """Return the rows of the shares of a product's rate at today's shapes."""
    floor = ("product", FORWARD, fastest(record, "product", FORWARD, inputs.products(1)))
    rows = []
    for where, shape in TODAY.items():
        for name, of in (dict(zip(PASSES, PASSES, strict=True)) | FORGETTING).items():
            for stage, bound in SHARES[where].items():
                goal = Goal(f"{name}, share of a product's rate, {stage}", where, bound if name in FORGETTING else None)
                ours = (where, f"{name}, {stage}", "now")
                rows.append(compare(record, goal, floor, ours, times=products_in(of, shape, stage)))
    return rows


def in_bfloat16(record):
    """Return the rows of bfloat16 over float32."""
    rows = []
    for where, name, stage in itertools.product(TODAY, IN_BFLOAT16, (FORWARD, TRAINING)):
        over, under = ((where, f"{name}, {kind}, {stage}", "now") for kind in ("bfloat16", "float32"))
        goal = Goal(f"{name}, bfloat16 over float32, {stage}", where, 1, at_most=True)
        rows.append(compare(record, goal, over, under))
    return rows


def goals(record):
    calls = dict.fromkeys((row[1], row[0]) for row in record.rows if row[2] == "now")
    return [
        compare(record, Goal(what, where, BOUND, at_most=True), (where, what, "now"), (where, what, "before"))
        for what, where in calls
    ]


def main():
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="checkout of the earlier version")
    parser.add_argument("--bfloat16", action="store_true", help="compare float32 and bfloat16")
    parser.add_argument("--models", action="store_true", help="compare whole models instead of kernels")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(model_calls() if args.models else bfloat16_calls() if args.bfloat16 else kernel_calls())
        return
    if args.folder is None:
        parser.error("the argument folder must be given: a checkout of the earlier version")
    record = Record.begin()
    torch.set_num_threads(1)
    flags = [*["--models"] * args.models, *["--bfloat16"] * args.bfloat16]
    measure(record, args.folder, flags)
    commit = git("rev-parse", "--short", "HEAD", folder=args.folder)
    text = f"Time now / time before, {commit or 'a version'}; CPU time of one thread.\n"
    if args.models:
        publish("before_models", record, goals(record), text)
    elif args.bfloat16:
        publish("before_bfloat16", record, goals(record) + in_bfloat16(record), text)
    else:
        publish("before", record, goals(record) + shares(record), text)


if __name__ == "__main__":
    main()
