"""The rules of one operator, compared with each other, a matrix product and ONNX Runtime.

float32, one thread. The cost of a rule is counted in passes of one multiplication and one addition over a head's
memory, D x D. Forward, sum writes and reads, and delta also retrieves. Backward, sum has five a token, and delta seven.
"""

import math
from functools import partial

import inputs
import torch
from inputs import FORWARD, STEP, TRAINING
from onnx_peer import DOMAINS, linear_attention, pack
from pictures import Bars
from record import Goal, compare, fastest, say
from timing import Contender, interleave

# (B, H, L, D): D is the size of keys and values.
TRAINED = (1, 8, 1024, 64)
READ = {(1, 32, 512, 128): 8, (1, 32, 512, 64): 8, (4, 8, 256, 16): 8, (1, 8, 1024, 64): 8, (1, 32, 1, 128): 2}
STEPPED = (32, 8, 1, 64)
ROUNDS, SECONDS = 7, 25
HEAD, KEY = "decay per head", "decay per key dimension"
# ONNX Runtime's names of the same rules.
THEIRS = {"sum": "linear", f"gla, {KEY}": "gated", "delta": "delta", f"gated_delta, {HEAD}": "gated_delta"}
STEPS = ("sum", "delta", f"gated_delta, {HEAD}")
# A rule, the rule it is compared with, how often that one counts, and the largest ratio.
COSTS = (
    (f"gla, {HEAD}", "sum", 1, 1.4),
    (f"gla, {KEY}", "sum", 1, 1.8),
    ("delta", "sum", 1, None),
    (f"gated_delta, {HEAD}", "delta", 1, 1.35),
    (f"gated_delta, {KEY}", "delta", 1, 1.6),
    ("delta_product, 2 steps", "delta", 2, 1.1),
    ("rwkv7", "delta", 1, 2),
)
# Passes over the memory a token, forward and backward; for each the least share of a product's rate.
PASSES = {"sum": (2, 5), "delta": (3, 7)}
SHARES = {FORWARD: 0.9, TRAINING: 0.8}
PRODUCT = 512  # rows and columns of the multiplied matrices

WHERE = f"{TRAINED[2]:,} tokens, {TRAINED[1]} heads of {TRAINED[3]}"
WHERE_STEPPED = "B = 32, H = 8, d = 64"


def measure_training(record):
    """Measure every rule and a matrix product."""
    shape = (*TRAINED, TRAINED[-1])
    products = {name: Contender(call) for name, call in inputs.products(PRODUCT).items()}
    calls = {stage: dict(products) for stage in SHARES}
    for name in dict.fromkeys([*PASSES, *(cost[0] for cost in COSTS)]):
        rule = inputs.call(name)
        inputs.check(name, rule, name, shape)
        for stage, call in inputs.passes(rule, name, shape).items():
            calls[stage][name] = Contender(call)
    for stage in SHARES:
        with torch.set_grad_enabled(stage == TRAINING):
            times = interleave(calls[stage], ROUNDS, stage, seconds=SECONDS)
        for name, seconds in times.items():
            record.add(WHERE, stage, name, seconds)


def measure_peers(record, shape):
    """Measure every form that ONNX Runtime has: ours and its two, after a check of all."""
    B, H, _, D = shape
    state, calls = torch.zeros(B, H, D, D), {}
    for name, theirs in THEIRS.items():
        tensors = inputs.draw(name, (*shape, D))
        exact = {name: x.double() for name, x in tensors.items()}
        right = inputs.step(name, exact, state.double(), "reference")()
        calls[name, "ours"] = Contender(inputs.step(name, tensors, state))
        inputs.check_results(name, right, calls[name, "ours"].call())
        decay, beta = next((x for of, x in tensors.items() if "decay" in of), None), tensors.get("beta")
        feed = pack(*(tensors[x] for x in "qkv"), state, decay, beta)
        for whose, domain in DOMAINS.items():
            session = linear_attention(theirs, (*shape, D), domain, decay is not None, beta is not None)
            out, after = session.run(None, feed)
            out = torch.from_numpy(out).unflatten(-1, (H, -1)).transpose(1, 2)
            inputs.check_results(f"{whose}, {theirs}", right, (out, torch.from_numpy(after)))
            calls[name, whose] = Contender(partial(session.run, None, feed))
    with torch.no_grad():
        times = interleave(calls, ROUNDS, f"ONNX Runtime at {shape}", seconds=2 * SECONDS)
    for (name, whose), seconds in times.items():
        record.add(shape, name, whose, seconds)


def measure_steps(record):
    """Measure one step of 32 sequences, which returns a new state, and a copy of the states."""
    shape = (*STEPPED, STEPPED[-1])
    state = torch.randn(*STEPPED[:2], 64, 64, generator=torch.Generator().manual_seed(3))
    calls = {name: Contender(inputs.step(name, inputs.draw(name, shape), state)) for name in STEPS}
    calls["copy"] = Contender(state.clone)
    with torch.no_grad():
        times = interleave(calls, ROUNDS, "one step", seconds=10)
    for name, seconds in times.items():
        record.add(WHERE_STEPPED, STEP, name, seconds)


def measure(record):
    torch.set_num_threads(1)
    say("checking every rule against the float64 reference")
    measure_training(record)
    for shape in READ:
        measure_peers(record, shape)
    measure_steps(record)


def products_in(name, shape, stage):
    """Return how many matrix products have as many multiplications as the passes of a rule."""
    forward, backward = PASSES[name]
    return math.prod(shape) * (forward if stage == FORWARD else forward + backward) / PRODUCT**3


def goals(record):
    rows = []
    for name, other, times, bound in COSTS:
        what = f"{name} over {other}" + (f" {times} times" if times > 1 else "") + f", {TRAINING}"
        goal = Goal(what, WHERE, bound, at_most=True)
        rows.append(compare(record, goal, (WHERE, TRAINING, name), (WHERE, TRAINING, other), times=1 / times))
    for stage, bound in SHARES.items():
        for name in PASSES:
            products = products_in(name, (*TRAINED, TRAINED[-1]), stage)
            goal = Goal(f"{name}, share of a product's rate, {stage}", WHERE, bound)
            product = fastest(record, WHERE, stage, inputs.products(1))
            rows.append(compare(record, goal, (WHERE, stage, product), (WHERE, stage, name), times=products))
    for shape, bound in READ.items():
        for name in THEIRS:
            # The goal is for the form that the opset defines.
            for whose, least in zip(DOMAINS, (bound, None), strict=True):
                goal = Goal(f"{name} vs {whose}, {FORWARD}", str(shape), least)
                rows.append(compare(record, goal, (shape, name, whose), (shape, name, "ours")))
    for name in STEPS:
        goal = Goal(f"{STEP}, {name}, over a copy of its states", WHERE_STEPPED, 1.3, at_most=True)
        rows.append(compare(record, goal, (WHERE_STEPPED, STEP, name), (WHERE_STEPPED, STEP, "copy")))
    return rows


PANELS = [
    Bars("One thread, forward + backward", "time of the first / time of the second", lambda row: " over " in row[0]),
    Bars("Against ONNX Runtime's fused kernel, forward", "its time / time of ours", lambda row: "fused" in row[0]),
]
