"""The rules of one operator against one another, a matrix product and ONNX Runtime (run.sh does it).

float32, one thread. Shapes (B, H, L, D): D is the size of keys and values. What a rule costs is counted in passes of
one multiplication and one addition over a head's memory, D x D: forward sum writes and reads, and delta also retrieves;
backward sum has five a token, and delta seven.
"""

from functools import partial

import operators
import torch
from onnx_peer import DOMAINS, linear_attention, pack
from report import Contender, Goal, goal_row, interleave, publish, ratios, say

from fairseq_fwp import ops

TRAINED = (1, 8, 1024, 64)
READ = ((1, 32, 512, 128), (1, 32, 512, 64), (4, 8, 256, 16), (1, 8, 1024, 64))
ROUNDS, SECONDS = 7, 25
TRAINING = "forward + backward"

# name: (rule, the names of its inputs, ONNX Runtime's rule for the same)
FORMS = {
    "sum": (ops.sum_rule, "q k v", "linear"),
    "gla, decay per head": (ops.gla_rule, "q k v decay", None),
    "gla, decay per key dimension": (ops.gla_rule, "q k v key_decay", "gated"),
    "delta": (ops.delta_rule, "q k v beta", "delta"),
    "gated_delta, decay per head": (ops.gated_delta_rule, "q k v decay beta", "gated_delta"),
    "gated_delta, decay per key dimension": (ops.gated_delta_rule, "q k v key_decay beta", None),
    "delta_product, 2 steps": (ops.delta_product_rule, "q two_k two_v two_beta", None),
    "rwkv7": (ops.rwkv7_rule, "q k v key_decay removal_key removal_rate", None),
}
# A rule, what it is held against, as often, and the largest ratio.
COSTS = (
    ("gla, decay per head", "sum", 1, 1.4),
    ("gla, decay per key dimension", "sum", 1, 1.8),
    ("delta", "sum", 1, None),
    ("gated_delta, decay per head", "delta", 1, 1.35),
    ("gated_delta, decay per key dimension", "delta", 1, 1.6),
    ("delta_product, 2 steps", "delta", 2, 1.1),
    ("rwkv7", "delta", 1, 2),
)
# Passes over the memory a token, forward and backward; least share of a product's rate of each.
PASSES = {"sum": (2, 5), "delta": (3, 7)}
SHARES = {"forward": 0.9, TRAINING: 0.8}


def inputs(shape, dtype=torch.float32):
    """As the layers leave them: keys of length one, decays near one, rates in (0, 1)."""
    B, H, L, D = shape
    found = operators.inputs((B, H, L, D, D), dtype)
    generator = torch.Generator().manual_seed(5)
    more = {
        "decay": torch.rand(B, H, L, generator=generator) * 0.1 + 0.9,
        "key_decay": torch.rand(B, H, L, D, generator=generator) * 0.1 + 0.9,
        "two_k": torch.randn(B, H, L, 2, D, generator=generator).softmax(-1),
        "two_v": torch.randn(B, H, L, 2, D, generator=generator),
        "two_beta": torch.rand(B, H, L, 2, generator=generator),
        "removal_key": torch.nn.functional.normalize(torch.randn(B, H, L, D, generator=generator), dim=-1),
        "removal_rate": torch.rand(B, H, L, D, generator=generator),
    }
    return found | {name: x.to(dtype).requires_grad_() for name, x in more.items()}


def check(name, shape):
    """Output and gradients of the first 256 tokens against the float64 reference."""
    rule, names, _ = FORMS[name]
    B, H, L, D = shape
    results = []
    for backend, dtype in (("reference", torch.float64), ("kernel", torch.float32)):
        tensors = inputs((B, H, min(L, 256), D), dtype)
        chosen = [tensors[x] for x in names.split()]
        out = rule(*chosen, backend=backend)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), chosen)])
    operators.compare(name, *results)


def measure_training():
    """{pass: {rule: seconds of each round}} at TRAINED, with a product of matrices among them."""
    tensors = inputs(TRAINED)
    gradient = torch.randn(*TRAINED, generator=torch.Generator().manual_seed(2))
    matrix = torch.randn(512, 512)
    contenders = {stage: {"product": Contender(partial(torch.mm, matrix, matrix))} for stage in SHARES}
    for name, (rule, names, _) in FORMS.items():
        check(name, TRAINED)
        form = operators.first(rule, "kernel")
        chosen = [tensors[x] for x in names.split()]
        contenders["forward"][name] = Contender(partial(form, *chosen))
        contenders[TRAINING][name] = Contender(partial(operators.training_step, form, chosen, gradient))
    with torch.no_grad():
        measured = {"forward": interleave(contenders["forward"], ROUNDS, "forward", seconds=SECONDS)}
    return measured | {TRAINING: interleave(contenders[TRAINING], ROUNDS, TRAINING, seconds=SECONDS)}


def training_rows(measured):
    where = f"{TRAINED[2]:,} tokens, {TRAINED[1]} heads of {TRAINED[3]}"
    rows = []
    for name, other, times, bound in COSTS:
        slow, fast = measured[TRAINING][name], [times * x for x in measured[TRAINING][other]]
        what = f"{name} over {other}" + (f" {times} times" if times > 1 else "") + f", {TRAINING}"
        rows.append(goal_row(Goal(what, where, bound, at_most=True), ratios(slow, fast)))
    B, H, L, D = TRAINED
    for stage, bound in SHARES.items():
        for name, passes in PASSES.items():
            needed = B * H * L * D * D * (passes[0] if stage == "forward" else sum(passes))
            # Seconds that the same multiplications take in a product of matrices.
            ideal = [x * needed / 512**3 for x in measured[stage]["product"]]
            goal = Goal(f"{name}, share of a product's rate, {stage}", where, bound)
            rows.append(goal_row(goal, ratios(ideal, measured[stage][name])))
    return rows


def peers(shape):
    """{(name, whose): the call} of every form that ONNX Runtime has too, all checked."""
    tensors = {name: x.detach() for name, x in inputs(shape).items()}
    B, H, _, D = shape
    state = torch.zeros(B, H, D, D)
    found = {}
    for name, (rule, names, theirs) in FORMS.items():
        if theirs is None:
            continue
        chosen = {x: tensors[x] for x in names.split()}
        right = rule(*(x.double() for x in chosen.values()), state.double(), backend="reference")
        found[name, "ours"] = Contender(partial(rule, *chosen.values(), state, backend="kernel"))
        operators.compare(name, right, found[name, "ours"].call())
        decay, beta = chosen.get("decay", chosen.get("key_decay")), chosen.get("beta")
        feed = pack(*(tensors[x] for x in "qkv"), state, decay, beta)
        for whose, domain in DOMAINS.items():
            session = linear_attention(theirs, (*shape, D), domain, decay is not None, beta is not None)
            out, after = session.run(None, feed)
            theirs_out = torch.from_numpy(out).unflatten(-1, (H, -1)).transpose(1, 2)
            operators.compare(f"{whose}, {theirs}", right, (theirs_out, torch.from_numpy(after)))
            found[name, whose] = Contender(partial(session.run, None, feed))
    return found


def peer_rows(shape, bound, raw):
    """The goal is against what the opset defines."""
    where = f"({', '.join(map(str, shape))})"
    with torch.no_grad():
        times = interleave(peers(shape), ROUNDS, f"ONNX Runtime at {where}", seconds=2 * SECONDS)
    raw += [[where, whose, name, i, x] for (name, whose), seconds in times.items() for i, x in enumerate(seconds)]
    bounds = dict(zip(DOMAINS, (bound, None), strict=True))
    return [
        goal_row(Goal(f"{name} vs {whose}, forward", where, bounds[whose]), ratios(seconds, times[name, "ours"]))
        for (name, whose), seconds in times.items()
        if whose in DOMAINS
    ]


def step_rows(raw):
    """One step of 32 sequences, which brings a new state, against a copy of the states alone."""
    shape = (32, 8, 1, 64)
    state = torch.randn(*shape[:2], 64, 64, generator=torch.Generator().manual_seed(3))
    tensors = {name: x.detach() for name, x in inputs(shape).items()}
    contenders = {
        name: Contender(partial(FORMS[name][0], *(tensors[x] for x in FORMS[name][1].split()), state, backend="kernel"))
        for name in ("sum", "delta", "gated_delta, decay per head")
    }
    with torch.no_grad():
        times = interleave(contenders | {"copy": Contender(state.clone)}, ROUNDS, "one step", seconds=10)
    raw += [["step", "ours", name, i, x] for name, seconds in times.items() for i, x in enumerate(seconds)]
    return [
        goal_row(
            Goal(f"decoding step, {name}, over a copy of its states", "B = 32, H = 8, d = 64", 1.3, at_most=True),
            ratios(times[name], times["copy"]),
        )
        for name in contenders
    ]


def main():
    torch.set_num_threads(1)
    say("checking every rule against the float64 reference")
    measured = measure_training()
    raw = [
        [stage, "ours", name, i, x]
        for stage, of in measured.items()
        for name, seconds in of.items()
        for i, x in enumerate(seconds)
    ]
    rows = training_rows(measured)
    for shape in READ:
        rows += peer_rows(shape, 8, raw)
    rows += peer_rows((1, 32, 1, 128), 2, raw)
    rows += step_rows(raw)
    publish("family", ["where", "whose", "rule", "round", "seconds"], raw, rows, "One thread, float32.\n")


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:  # above all: no kernel could be built
        raise SystemExit(f"the rules cannot be measured: {error}") from error
