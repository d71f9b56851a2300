"""Our operators, compared with other implementations in one interleaved run.

float32; one thread, unless the name says two. Shapes (B, H, L, Dk, Dv): Schlag et al.'s small and medium language
models (per layer), the big translation model with DPFP's 256 features, and one long sequence.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import inputs
import peers
import torch
from inputs import FORWARD, STEP, TRAINING
from pictures import Bars
from record import Goal, compare, fastest, say
from timing import GIVE_BACK, Contender, alone, interleave, memory

SHAPES = {
    "small": (8, 8, 256, 16, 16),
    "medium": (8, 8, 384, 32, 32),
    "MT": (16, 16, 40, 256, 64),
    "1k": (1, 8, 1024, 64, 64),
    "8k": (1, 8, 8192, 64, 64),
}
# Of a shape's pass: others on the host may slow a core down for a second, so five short rounds are not enough.
ROUNDS, SECONDS = 5, 25
PASSES = {FORWARD: torch.no_grad, TRAINING: torch.enable_grad}
STEPS = {f"B = {batch}, H = 8, d = 64": (batch, 8, 1, 64, 64) for batch in (1, 32)}
CONTEXTS = (512, 2048, 8192)
OURS = ("sum", "delta", "gated", "decay")
LOOP, SDPA, FAST = "delta, PyTorch loop", "softmax attention (SDPA)", "sum, fast-transformers"
CHUNKWISE = {
    f"delta, chunkwise PyTorch (C = {chunk}, doubling)": partial(peers.delta_chunkwise, chunk=chunk)
    for chunk in (16, 32, 64)
}
PAIRS = ["two products in turn", "two products at once"]
SIZES = "sizes of q + k + v + out"
# (what, slower contenders, faster one, {where: bound}) of the training step. Of the slower ones the fastest counts.
# A bound is a least ratio, or a largest one if its text says cost.
COMPARISONS = [
    ("sum vs fast-transformers", [FAST], "sum", dict.fromkeys(SHAPES, 3.5)),
    ("delta vs PyTorch loop", [LOOP], "delta", dict.fromkeys(SHAPES, 40) | {"MT": 25}),
    ("delta vs best chunkwise PyTorch", [*CHUNKWISE], "delta", dict.fromkeys(SHAPES, 6) | {"MT": 2.5}),
    ("cost of delta over sum", ["delta"], "sum", dict.fromkeys(SHAPES, 1.35)),
    ("cost of decay over delta", ["decay"], "delta", dict.fromkeys(SHAPES, 2)),
    ("cost of gated over decay", ["gated"], "decay", dict.fromkeys(SHAPES, 1)),
    ("delta vs SDPA", [SDPA], "delta", {"small": None, "medium": None, "1k": 10, "8k": 45}),
    ("two threads over one, delta", ["delta"], "delta, 2 threads", dict.fromkeys(list(SHAPES)[1:], 1.65)),
    ("two threads over one, sum", ["sum"], "sum, 2 threads", dict.fromkeys(list(SHAPES)[1:])),
    ("two threads over one, products of their own", PAIRS[:1], PAIRS[1], dict.fromkeys(list(SHAPES)[1:])),
]


def contenders(record):
    """Return {name: (function, form whose inputs it takes, whether it must agree with that form)}."""
    found = {form: (inputs.call(form), form, True) for form in OURS}
    found |= {LOOP: (peers.delta_loop, "delta", True), SDPA: (peers.softmax_attention, "sum", False)}
    found |= {name: (form, "delta", True) for name, form in CHUNKWISE.items()}
    try:
        found[FAST] = (peers.fast_transformers_sum(), "sum", True)
    except (ImportError, OSError) as error:
        for where in SHAPES:
            for stage in PASSES:
                record.miss(where, stage, FAST, f"fast-transformers cannot be imported: {error}")
    return found


def pairs_of_products():
    """Return two matrix products in turn, and on a thread each: the greatest gain of a second core."""
    matrix, helper = torch.randn(384, 384), ThreadPoolExecutor(1)
    multiply = partial(torch.mm, matrix, matrix)

    def at_once():
        other = helper.submit(multiply)
        multiply()
        other.result()

    return dict(zip(PAIRS, (Contender(lambda: (multiply(), multiply())), Contender(at_once)), strict=True))


def measure_shape(record, where, shape, found):
    say(f"{where}: checking every contender against the float64 reference")
    calls = {stage: {} for stage in PASSES}
    for name, (function, form, exact) in found.items():
        if name == SDPA and shape[3] != shape[4]:
            continue
        if exact:
            inputs.check(name, function, form, shape, whole=True)
        for stage, call in inputs.passes(function, form, shape).items():
            calls[stage][name] = Contender(call)
            if name in ("sum", "delta"):
                calls[stage][f"{name}, 2 threads"] = Contender(call, threads=2)
    calls[TRAINING] |= pairs_of_products()
    for stage, grad_mode in PASSES.items():
        with grad_mode():
            times = interleave(calls[stage], ROUNDS, f"{where}, {stage}", seconds=SECONDS)
        for name, seconds in times.items():
            record.add(where, stage, name, seconds)


def measure_steps(record, where, shape):
    """Measure a decoding step, 8 heads of d = 64: ours, PyTorch's, and SDPA over key-value caches."""
    tensors = inputs.draw("delta", shape)
    state = torch.randn(*shape[:2], 64, 64, generator=torch.Generator().manual_seed(3))
    exact = {name: x.double() for name, x in tensors.items()}
    expected = inputs.step("delta", exact, state.double(), "reference")()
    attend = torch.nn.functional.scaled_dot_product_attention
    steps = {"delta": Contender(inputs.step("delta", tensors, state))}
    steps["in place"] = Contender(partial(peers.step_in_place, *tensors.values(), state.clone()))
    with torch.no_grad():
        inputs.check_results("step in place", expected, peers.step_in_place(*tensors.values(), state.clone()))
        inputs.check_results("our decoding step", expected, steps["delta"].call())
        for context in CONTEXTS:
            cache = [torch.randn(shape[0], 8, context, 64) for _ in range(2)]
            steps[f"SDPA, cache of {context}"] = Contender(partial(attend, tensors["q"], *cache))
        for name, seconds in interleave(steps, ROUNDS, f"{STEP}, {where}", seconds=SECONDS).items():
            record.add(where, STEP, name, seconds)


def measure(record):
    found = contenders(record)
    for where, shape in SHAPES.items():
        measure_shape(record, where, shape, found)
    for where, shape in STEPS.items():
        measure_steps(record, where, shape)
    say("memory of delta at 8k, in a process of its own")
    record.add("8k", TRAINING, "delta", [alone("operators", **GIVE_BACK)], SIZES)


def measure_alone():
    """Return the peak memory of delta's forward + backward at 8k beyond the inputs, in sizes of q + k + v + out.

    It includes out, its gradient, the four gradients and all that is kept in between.
    """
    B, H, L, Dk, Dv = shape = SHAPES["8k"]
    rule = inputs.call("delta")
    inputs.training_step(rule, inputs.leaves("delta", (1, 8, 64, Dk, Dv)), torch.ones(1, 8, 64, Dv))  # loads the kernel
    chosen = inputs.leaves("delta", shape)
    before = memory("VmRSS")
    inputs.training_step(rule, chosen, torch.ones(B, H, L, Dv))
    # The peak of the whole process, at least that of the step.
    return (memory("VmHWM") - before) / (4 * B * H * L * 2 * (Dk + Dv))


def goals(record):
    rows = []
    for where in ("small", "medium", "1k"):
        goal = Goal(f"sum vs fast-transformers, {FORWARD}", where, 5)
        rows.append(compare(record, goal, (where, FORWARD, FAST), (where, FORWARD, "sum")))
    for what, slower, faster, bounds in COMPARISONS:
        for where, bound in bounds.items():
            peer = fastest(record, where, TRAINING, slower)
            label = what if slower == PAIRS[:1] else f"{what}, {TRAINING}"
            goal = Goal(label, where, bound, at_most=what.startswith("cost"))
            note = peer.removeprefix("delta, ") if len(slower) > 1 else ""
            rows.append(compare(record, goal, (where, TRAINING, peer), (where, TRAINING, faster), note=note))
    for what, bound in (("best PyTorch step", 2.5), *((f"SDPA with a cache of {n}", None) for n in CONTEXTS)):
        for where in STEPS:
            peer, goal = f"SDPA, cache of {what.split()[-1]}", Goal(f"{STEP}, delta vs {what}", where, bound)
            peer, note = (peer, "") if bound is None else ("in place", "in place")
            rows.append(compare(record, goal, (where, STEP, peer), (where, STEP, "delta"), note=note))
    goal = Goal(f"extra memory of delta, {TRAINING}, in {SIZES}", "8k", 6, at_most=True)
    return [*rows, goal.row(record.values("8k", TRAINING, "delta", SIZES), "peak resident memory, own process")]


UNIT = "time of the peer / time of ours"
PANELS = [
    Bars("Operators, one thread", UNIT, lambda row: " vs " in row[0] and STEP not in row[0]),
    Bars("Decoding step, one thread", UNIT, lambda row: " vs " in row[0] and STEP in row[0]),
]
