"""The rules that are measured, their inputs, and the check that comes before any measurement.

Shapes (B, H, L, Dk, Dv). Inputs are as the layers leave them: keys and queries positive with sum 1, rates in (0, 1),
and decays near one.
"""

import itertools
from functools import partial

import torch
from torch.nn.functional import normalize

from fairseq_fwp import ops
from fairseq_fwp.ops.arguments import PER_KEY, PER_TOKEN
from fairseq_fwp.ops.rules import RULES

FORWARD, TRAINING, STEP = "forward", "forward + backward", "decoding step"
# Forms that take as long as another one, by the decay's shape: dplr has rwkv7's kernel.
LEFT_OUT = {("dplr", PER_TOKEN), ("dplr", PER_KEY), ("gdn2", PER_TOKEN)}
LEFT_OUT |= {("gated_delta_product", PER_TOKEN), ("gated_delta_product", PER_KEY)}


def tensor_of(argument, shape):
    """Return the name in TENSORS of what a rule takes as an argument of that shape."""
    if "N" in shape:
        return f"two_{argument}"
    return "key_decay" if (argument, shape) == ("decay", PER_KEY) else argument


def measured_forms():
    """Return {form: the function in `ops`, the names of its inputs}, of the rules in the forms of their gates."""
    forms = {}
    for rule in RULES:
        name = rule.name.removesuffix("_rule")
        every = [dict(zip(rule.gates, shapes, strict=True)) for shapes in itertools.product(*rule.gates.values())]
        chosen = [gates for gates in every if (name, gates.get("decay")) not in LEFT_OUT]
        for gates in chosen:
            form = f"{name}, 2 steps" if "N" in rule.key else name
            if len(chosen) > 1:
                form += ", decay per key dimension" if gates["decay"] == PER_KEY else ", decay per head"
            shapes = {"k": rule.key, "v": rule.value, **gates}
            forms[form] = (name, " ".join(["q", *map(tensor_of, shapes, shapes.values())]))
    return forms


def near_one(x):
    return (x + 4).sigmoid()


def softmax(x):
    return x.softmax(-1)


def unit(x):
    return normalize(x, dim=-1)


# Sizes for each token and head, and the function that is applied to normal numbers.
TENSORS = {
    "q": ("Dk", softmax),
    "k": ("Dk", softmax),
    "v": ("Dv", torch.Tensor.clone),
    "beta": ("", torch.sigmoid),
    "gate": ("", torch.sigmoid),
    "decay": ("", near_one),
    "key_decay": ("Dk", near_one),
    "value_decay": ("Dv", near_one),
    "erase": ("Dk", torch.sigmoid),
    "write": ("Dv", torch.sigmoid),
    "two_k": ("N Dk", softmax),
    "two_v": ("N Dv", torch.Tensor.clone),
    "two_beta": ("N", torch.sigmoid),
    "removal_key": ("Dk", unit),
    "removal_rate": ("Dk", torch.sigmoid),
}


FORMS = measured_forms()


def draw(form, shape, dtype=torch.float32, device="cpu"):
    """Return {name: tensor} of a form's inputs, in its order; the same name always gives the same tensor."""
    B, H, L, Dk, Dv = shape
    sizes, tensors = {"Dk": Dk, "Dv": Dv, "N": 2}, {}
    for name in FORMS[form][1].split():
        size, function = TENSORS[name]
        generator = torch.Generator(device).manual_seed(list(TENSORS).index(name))
        x = torch.randn(B, H, L, *(sizes[n] for n in size.split()), generator=generator, device=device)
        tensors[name] = function(x).to(dtype)
    return tensors


def with_unit_keys(tensors):
    """Return inputs whose keys and queries have either sign and length one, as layers of today leave them."""
    return tensors | {name: unit(tensors[name] - tensors[name].mean(-1, keepdim=True)) for name in "qk"}


def leaves(form, shape, dtype=torch.float32, device="cpu"):
    """Return the same as a list of leaves for autograd."""
    return [x.requires_grad_() for x in draw(form, shape, dtype, device).values()]


def gradient_of_out(shape, dtype=torch.float32, device="cpu"):
    B, H, L, _, Dv = shape
    return torch.randn(B, H, L, Dv, device=device, dtype=dtype)


def call(form, backend="kernel"):
    """Return the function (*inputs) -> out."""
    rule = getattr(ops, f"{FORMS[form][0]}_rule")
    return lambda *inputs: rule(*inputs, backend=backend)[0]


def step(form, tensors, state, backend="kernel"):
    """Return a call without arguments: the form from a state, which returns out and the new state."""
    rule = getattr(ops, f"{FORMS[form][0]}_rule")
    return lambda: rule(*tensors.values(), state, backend=backend)


def training_step(function, inputs, gradient):
    return torch.autograd.grad(function(*inputs), inputs, gradient)


def training(function, form, shape, dtype=torch.float32, device="cpu"):
    """Return a call without arguments: forward + backward of a function on a form's inputs."""
    return partial(training_step, function, leaves(form, shape, dtype, device), gradient_of_out(shape, dtype, device))


def passes(function, form, shape, dtype=torch.float32):
    """Return {stage: a call without arguments} of a function on a form's inputs: forward + backward, and forward."""
    forward = partial(function, *draw(form, shape, dtype).values())
    return {TRAINING: training(function, form, shape, dtype), FORWARD: forward}


def products(size):
    """Return {name: call} of torch's two products of square matrices; the faster one depends on the processor."""
    from fairseq_fwp.modules.onednn import OneDnnLinear  # an earlier version, which before.py runs, has it elsewhere

    matrix = torch.randn(size, size)

    @torch.no_grad()
    def by_onednn():
        with OneDnnLinear():
            torch.nn.functional.linear(matrix, matrix)

    return {"product by MKL": lambda: torch.mm(matrix, matrix), "product by oneDNN": by_onednn}


def relative_error(found, truth):
    return ((found.double() - truth).norm() / truth.norm()).item()


def errors(function, form, shape, dtype=torch.float32, device="cpu", whole=False):
    """Return {out and the inputs, for their gradients: relative error} of a function, compared with float64.

    The first 256 tokens are compared, and with `whole` also `out` of all tokens.
    """
    B, H, L, *sizes = shape
    short = (B, H, min(L, 256), *sizes)
    tensors = draw(form, short, dtype, device)
    exact = [x.double().requires_grad_() for x in tensors.values()]
    generator = torch.Generator(device).manual_seed(len(TENSORS))
    gradient = torch.randn(*short[:3], sizes[1], generator=generator, device=device).to(dtype)
    out = call(form, "reference")(*exact)
    truth = [out, *torch.autograd.grad(out, exact, gradient.double())]
    inputs = [x.requires_grad_() for x in tensors.values()]
    out = function(*inputs)
    found = [out, *torch.autograd.grad(out, inputs, gradient)]
    compared = zip(["out", *tensors], found, truth, strict=True)
    result = {name: relative_error(x, y) for name, x, y in compared}
    if whole:
        inputs = draw(form, shape, dtype, device).values()
        with torch.no_grad():
            truth = call(form, "reference")(*(x.double() for x in inputs))
            result["out of all tokens"] = relative_error(function(*inputs), truth)
    return result


def check(name, function, form, shape, whole=False):
    """Stop unless out and all gradients agree with the float64 reference to 1e-4 of their length."""
    for of, error in errors(function, form, shape, whole=whole).items():
        if not error <= 1e-4:
            raise SystemExit(
                f"{of} of {name} at {shape} differs from the reference by {error:.1e}: nothing is reported."
            )


def check_results(name, expected, found):
    for right, actual in zip(expected, found, strict=True):
        if not relative_error(actual, right) <= 1e-4:
            raise SystemExit(f"{name} differs from the reference: nothing is reported.")
