"""Our operators against their peers in one interleaved run: `python operators.py` (run.sh does it, after the tests).

float32, one thread but for the rows that say two. Shapes (B, H, L, Dk, Dv): Schlag et al.'s small and medium language
models (per layer), the big translation model with DPFP's 256 features, and one long sequence.
"""

import os

# Before torch: fast-transformers brings an OpenMP runtime of its own, which torch.set_num_threads does not reach.
os.environ["OMP_NUM_THREADS"] = "1"

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import peers
import torch
from report import (
    Contender,
    Goal,
    fastest,
    goal_row,
    interleave,
    memory,
    publish,
    ratios,
    say,
    table,
)

from fairseq_fwp import ops
from fairseq_fwp.modules.onednn import OneDnnLinear

SHAPES = {
    "small": (8, 8, 256, 16, 16),
    "medium": (8, 8, 384, 32, 32),
    "MT": (16, 16, 40, 256, 64),
    "1k": (1, 8, 1024, 64, 64),
    "8k": (1, 8, 8192, 64, 64),
}
LM_SHAPES = ("small", "medium", "1k")
# Of a shape's pass: where neighbours on the host slow a core down for a second at a time, five short rounds say little.
ROUNDS, SECONDS = 5, 25
CHUNKS = (16, 32, 64)
BACKEND = "kernel"
STEP_BATCHES = (1, 32)
CONTEXTS = (512, 2048, 8192)
PASSES = {"forward": torch.no_grad, "forward + backward": torch.enable_grad}
TRAINING = "forward + backward"
PAIRS = ["two products in turn", "two products at once"]


def inputs(shape, dtype=torch.float32):
    """q and k positive with sum 1, as the models' sum normalisation leaves them; beta in (0, 1)."""
    B, H, L, Dk, Dv = shape
    generator = torch.Generator().manual_seed(1)
    q, k, v, beta = (torch.randn(B, H, L, d, generator=generator) for d in (Dk, Dk, Dv, 1))
    tensors = {"q": q.softmax(-1), "k": k.softmax(-1), "v": v, "beta": beta.squeeze(-1).sigmoid()}
    decays = (torch.randn(B, H, L, d, generator=generator).add(4).sigmoid() for d in (Dk, Dv))
    tensors |= dict(zip(("key_decay", "value_decay"), decays, strict=True), gate=tensors["beta"].clone())
    return {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}


def first(rule, backend):
    return lambda *x: rule(*x, backend=backend)[0]


def forms():
    """{name: (function or the reason why there is none, names of its inputs, rule it must agree with)}."""
    found = {
        "sum": (first(ops.sum_rule, BACKEND), "q k v", "sum"),
        "delta": (first(ops.delta_rule, BACKEND), "q k v beta", "delta"),
        "gated": (first(ops.gated_rule, BACKEND), "q k v gate", "gated"),
        "decay": (first(ops.decay_rule, BACKEND), "q k v key_decay value_decay", "decay"),
        "delta, PyTorch loop": (peers.delta_loop, "q k v beta", "delta"),
        "softmax attention (SDPA)": (peers.softmax_attention, "q k v", None),
    }
    for chunk in CHUNKS:
        for inverse in ("solve", "doubling"):
            form = partial(peers.delta_chunkwise, chunk=chunk, inverse=inverse)
            found[f"delta, chunkwise PyTorch (C = {chunk}, {inverse})"] = (form, "q k v beta", "delta")
    try:
        found["sum, fast-transformers"] = (peers.fast_transformers_sum(), "q k v", "sum")
    except (ImportError, OSError) as error:
        found["sum, fast-transformers"] = (f"fast-transformers cannot be imported: {error}", "", None)
    return found


def check(name, form, names, rule, shape):
    """Output over the whole shape and gradients over its first 256 tokens, against the float64 reference."""
    reference = first(getattr(ops, f"{rule}_rule"), "reference")
    for length, backward in ((shape[2], False), (min(shape[2], 256), True)):
        cut = (*shape[:2], length, *shape[3:])
        results = []
        for function, dtype in ((reference, torch.float64), (form, torch.float32)):
            tensors = inputs(cut, dtype)
            chosen = [tensors[x] for x in names.split()]
            with torch.set_grad_enabled(backward):
                out = function(*chosen)
            results.append([out, *torch.autograd.grad(out.square().sum(), chosen)] if backward else [out])
        compare(f"{name} at {shape}", *results)


def compare(name, expected, found):
    """Stop unless both are the same tensors, to 1e-4 of the largest number."""
    for right, actual in zip(expected, found, strict=True):
        error = ((actual - right).abs().max() / right.abs().max()).item()
        if not error < 1e-4:
            raise SystemExit(f"{name} differs from the reference by {error:.1e}: nothing is reported.")


def training_step(form, chosen, gradient):
    torch.autograd.grad(form(*chosen), chosen, gradient)


def pairs_of_products():
    """Two products of matrices one after the other, and on a thread each: what a second core gives at the most."""
    matrix, helper = torch.randn(384, 384), ThreadPoolExecutor(1)
    multiply = partial(torch.mm, matrix, matrix)

    def in_turn():
        multiply()
        multiply()

    def at_once():
        other = helper.submit(multiply)
        multiply()
        other.result()

    return dict(zip(PAIRS, (Contender(in_turn), Contender(at_once)), strict=True))


def measure_shape(where, shape, found):
    """{pass: {contender: seconds of each round}} of one shape."""
    say(f"{where}: checking every contender against the float64 reference")
    tensors, contenders = inputs(shape), {name: {} for name in PASSES}
    gradient = torch.randn(*shape[:3], shape[4], generator=torch.Generator().manual_seed(2))
    for name, (form, names, rule) in found.items():
        if isinstance(form, str) or (name.startswith("softmax") and shape[3] != shape[4]):
            continue
        if rule:
            check(name, form, names, rule, shape)
        chosen = [tensors[x] for x in names.split()]
        calls = {"forward": partial(form, *chosen), TRAINING: partial(training_step, form, chosen, gradient)}
        for stage, call in calls.items():
            contenders[stage][name] = Contender(call)
            if name in ("sum", "delta"):
                contenders[stage][f"{name}, 2 threads"] = Contender(call, threads=2)
    contenders[TRAINING] |= pairs_of_products()
    measured = {}
    for stage, grad_mode in PASSES.items():
        with grad_mode():
            measured[stage] = interleave(contenders[stage], ROUNDS, f"{where}, {stage}", seconds=SECONDS)
    return measured


def shape_rows(where, measured, found):
    """The goals of one shape. A comparison: the slower contenders, of which the fastest counts, and the faster one."""
    chunkwise = [name for name in found if "chunkwise" in name]
    is_mt = where == "MT"
    plan = [
        (["sum, fast-transformers"], "sum", Goal("sum vs fast-transformers", where, 3.5)),
        (["delta, PyTorch loop"], "delta", Goal("delta vs PyTorch loop", where, 25 if is_mt else 40)),
        (chunkwise, "delta", Goal("delta vs best chunkwise PyTorch", where, 2.5 if is_mt else 6)),
        (["delta"], "sum", Goal("cost of delta over sum", where, 1.35, at_most=True)),
        (["decay"], "delta", Goal("cost of decay over delta", where, 2, at_most=True)),
        (["gated"], "decay", Goal("cost of gated over decay", where, 1, at_most=True)),
    ]
    if not is_mt:
        bound = {"1k": 10, "8k": 45}.get(where)
        plan.append((["softmax attention (SDPA)"], "delta", Goal("delta vs SDPA", where, bound)))
    if where != "small":
        plan.append((["delta"], "delta, 2 threads", Goal("two threads over one, delta", where, 1.65)))
        plan.append((["sum"], "sum, 2 threads", Goal("two threads over one, sum", where)))
        plan.append((PAIRS[:1], PAIRS[1], Goal("two threads over one, products of their own", where)))
    plan = [(TRAINING, *comparison) for comparison in plan]
    if where in LM_SHAPES:
        plan.insert(0, ("forward", ["sum, fast-transformers"], "sum", Goal("sum vs fast-transformers", where, 5)))
    rows = []
    for stage, slower, faster, goal in plan:
        times = measured[stage]
        goal = goal if slower == PAIRS[:1] else goal._replace(what=f"{goal.what}, {stage}")
        peer = fastest(times, slower)
        if peer is None:
            rows.append(goal_row(goal, found[slower[0]][0]))
        else:
            note = peer.removeprefix("delta, ") if len(slower) > 1 else ""
            rows.append(goal_row(goal, ratios(times[peer], times[faster]), note))
    return rows


def measure_steps(batch):
    """One decoding step, 8 heads of d = 64: ours, PyTorch's, and SDPA over key-value caches."""
    shape = (batch, 8, 1, 64, 64)
    q, k, v, beta = (inputs(shape)[name].detach() for name in ("q", "k", "v", "beta"))
    state = torch.randn(batch, 8, 64, 64, generator=torch.Generator().manual_seed(3))
    expected = ops.delta_rule(*(x.double() for x in (q, k, v, beta, state)), backend="reference")
    steps = {"delta": partial(ops.delta_rule, backend=BACKEND), **peers.STEPS}
    contenders = {}
    with torch.no_grad():
        for name, step in steps.items():
            results = zip(step(q, k, v, beta, state.clone()), expected, strict=True)
            if any((actual - right).abs().max() > 1e-4 for actual, right in results):
                raise SystemExit(f"the decoding step '{name}' differs from the reference: nothing is reported.")
            contenders[name] = Contender(partial(step, q, k, v, beta, state.clone()))
        for context in CONTEXTS:
            cache = [torch.randn(batch, 8, context, 64) for _ in range(2)]
            attend = partial(torch.nn.functional.scaled_dot_product_attention, q, *cache)
            contenders[f"SDPA, cache of {context}"] = Contender(attend)
        return interleave(contenders, ROUNDS, f"decoding step, batch {batch}", seconds=SECONDS)


def step_rows(batch, times):
    best = fastest(times, peers.STEPS)
    where, ours = f"B = {batch}, H = 8, d = 64", times["delta"]
    goal = Goal("decoding step, delta vs best PyTorch step", where, 2.5)
    rows = [goal_row(goal, ratios(times[best], ours), best)]
    for context in CONTEXTS:
        goal = Goal(f"decoding step, delta vs SDPA with a cache of {context}", where)
        rows.append(goal_row(goal, ratios(times[f"SDPA, cache of {context}"], ours)))
    return rows


def print_memory():
    """Peak memory beyond the inputs of delta's forward + backward at 8k, in sizes of q + k + v + out.

    All of it counts: out, its gradient, the four gradients and whatever is kept in between.
    """
    gradient = torch.ones(1, 8, 64, 64)
    small, shape = inputs((1, 8, 64, 64, 64)), SHAPES["8k"]
    rule = first(ops.delta_rule, BACKEND)
    training_step(rule, [small[x] for x in ("q", "k", "v", "beta")], gradient)  # loads the kernel
    tensors = inputs(shape)
    chosen = [tensors[x] for x in ("q", "k", "v", "beta")]
    before = memory("VmRSS")
    training_step(rule, chosen, torch.ones(*shape[:3], shape[4]))
    # The peak of the whole life of this process: never less than that of the step.
    extra = memory("VmHWM") - before
    B, H, L, Dk, Dv = shape
    print(extra / (4 * B * H * L * 2 * (Dk + Dv)))


def memory_row():
    say("memory of delta at 8k, in a process of its own")
    # Freed memory goes back at once, so that what is resident is what is in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "65536"}  # run.sh allows no mmap
    answer = subprocess.run([sys.executable, __file__, "memory"], env=environment, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"the memory of delta could not be measured: {answer.stderr.strip().splitlines()[-1]}")
    goal = Goal(f"extra memory of delta, {TRAINING}, in sizes of q + k + v + out", "8k", 6, at_most=True)
    return goal_row(goal, float(answer.stdout), "peak resident memory, own process")


def floors(shape):
    """{(rule, pass): (bytes, flops)} that cannot be avoided, token by token: inputs read once, results written once.

    Each product with the Dk x Dv state is 2 Dk Dv flops. sum: 2 forward (write, read), 5 more backward (rebuild the
    state, dq, the state's gradient, dk, dv). delta: 3 forward, 7 more backward.
    """
    B, H, L, Dk, Dv = shape
    tokens, product = B * H * L, 2 * Dk * Dv
    io = {"sum": 2 * Dk + 2 * Dv, "delta": 2 * Dk + 2 * Dv + 1}
    products = {"sum": (2, 7), "delta": (3, 10)}
    return {
        (rule, stage): (4 * tokens * io[rule] * times, tokens * product * products[rule][times // 2])
        # Backward reads q, k, v, (beta) and the gradient of out, and writes a gradient for each input: 3 x in all.
        for rule in io
        for stage, times in zip(PASSES, (1, 3), strict=True)
    }


def machine_rates():
    """(bytes a second of a copy, flops a second of the faster of torch's two matrix products), both on one thread."""
    source, target = torch.ones(2**26), torch.ones(2**26)
    matrix = torch.randn(1024, 1024)
    contenders = {
        "copy": Contender(partial(target.copy_, source)),
        "product by MKL": Contender(partial(torch.mm, matrix, matrix)),
        "product by oneDNN": Contender(partial(torch.nn.functional.linear, matrix, matrix)),
    }
    with torch.no_grad(), OneDnnLinear():
        times = interleave(contenders, ROUNDS, "speed of the machine")
    products = min(seconds for name, rounds in times.items() if name.startswith("product") for seconds in rounds)
    return 2 * 4 * 2**26 / min(times["copy"]), 2 * 1024**3 / products


def rounds_taken(measured):
    passes = (
        f"{where}, {stage}: {len(times['delta'])}"
        for where, stages in measured.items()
        for stage, times in stages.items()
    )
    return f"Rounds: {'; '.join(passes)}.\n"


def floor_rows(measured, rates):
    rows = []
    for where, shape in SHAPES.items():
        for (rule, stage), (moved, flops) in floors(shape).items():
            taken = min(measured[where][stage][rule])
            share = [f"{100 * work / rate / taken:.0f} %" for work, rate in zip((moved, flops), rates, strict=True)]
            rows.append([where, rule, stage, f"{moved / 1e6:.1f}", f"{flops / 1e9:.2f}", *share])
    return rows


def contender_rows(measured):
    """Every contender's time in times of our delta's, pass and shape."""
    names = dict.fromkeys(name for stages in measured.values() for times in stages.values() for name in times)
    names = [name for name in names if name not in PAIRS]
    rows = []
    for name in names:
        row = [name]
        for where in SHAPES:
            for stage in PASSES:
                times = measured[where][stage]
                row.append(f"{ratios(times[name], times['delta'])[0]:.2f}" if name in times else "-")
        rows.append(row)
    return rows


def main():
    found, measured, rows = forms(), {}, []
    for where, shape in SHAPES.items():
        measured[where] = measure_shape(where, shape, found)
        rows += shape_rows(where, measured[where], found)
    steps = {batch: measure_steps(batch) for batch in STEP_BATCHES}
    for batch, times in steps.items():
        rows += step_rows(batch, times)
    rows.append(memory_row())
    order = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: order.index(row[0]))
    rates = machine_rates()

    everything = measured | {f"B = {batch}": {"step": times} for batch, times in steps.items()}
    raw = [
        [where, stage, name, i, second]
        for where, stages in everything.items()
        for stage, times in stages.items()
        for name, seconds in times.items()
        for i, second in enumerate(seconds)
    ]
    publish(
        "operators",
        ["shape", "pass", "contender", "round", "seconds"],
        raw,
        rows,
        rounds_taken(everything),
        "Least work, and how much of the machine's own rate is reached, on one thread: of a copy "
        f"({rates[0] / 1e9:.0f} GB/s), and of a matrix product ({rates[1] / 1e9:.0f} GFLOP/s):\n",
        table(["shape", "rule", "pass", "MB", "GFLOP", "of copy", "of product"], floor_rows(measured, rates)),
        "Time of every contender in times of our delta's, median of rounds (one thread unless it says two):\n",
        table(
            ["contender", *(f"{shape}, {stage}" for shape in SHAPES for stage in PASSES)],
            contender_rows(measured),
        ),
    )


if __name__ == "__main__":
    try:
        print_memory() if sys.argv[1:] == ["memory"] else main()
    except RuntimeError as error:  # above all: no kernel could be built
        raise SystemExit(f"the operators cannot be measured: {error}") from error
