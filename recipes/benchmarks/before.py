"""The kernels of a version before against these: `python before.py FOLDER`, a checkout whose recipes/setup.sh has run.

float32, one thread, at the shapes of operators.py. Each installation measures its own calls in a process of its own, in
turn, so that a slow moment hits both alike.
"""

import argparse
import json
import os
import subprocess
import sys
import time
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


def serve():
    """Say what there is, then answer how many seconds a call takes: a line of its number and how often in, one out."""
    torch.set_num_threads(1)
    known = calls()
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

    def __init__(self, folder):
        keep = {"MALLOC_TRIM_THRESHOLD_": "8589934592", "MALLOC_MMAP_MAX_": "0", "OMP_NUM_THREADS": "1"}
        command = [folder / ".venv/bin/python", __file__, "--serve"]
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


def compare(folder):
    sides = {"before": Installation(folder.resolve()), "now": Installation(ROOT)}
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
    publish("before", header, raw, rows, before, script="before.py", picture=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of the version before")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
    elif args.folder is None:
        parser.error("the folder of the version before is missing")
    else:
        compare(args.folder)


if __name__ == "__main__":
    main()
