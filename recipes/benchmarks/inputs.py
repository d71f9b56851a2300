"""The rules that are measured, their inputs, and the check that comes before any measurement.

Shapes (B, H, L, Dk, Dv). Inputs are as the layers leave them: keys and queries positive with sum 1, rates in (0, 1),
and decays near one.
"""

import torch
from torch.nn.functional import normalize

from fairseq_fwp import ops

FORWARD, TRAINING, STEP = "forward", "forward + backward", "decoding step"
# What is measured: the function in `ops`, the names of its inputs.
FORMS = {
    "sum": ("sum", "q k v"),
    "gated": ("gated", "q k v gate"),
    "gla, decay per head": ("gla", "q k v decay"),
    "gla, decay per key dimension": ("gla", "q k v key_decay"),
    "delta": ("delta", "q k v beta"),
    "decay": ("decay", "q k v key_decay value_decay"),
    "gated_delta, decay per head": ("gated_delta", "q k v decay beta"),
    "gated_delta, decay per key dimension": ("gated_delta", "q k v key_decay beta"),
    "delta_product, 2 steps": ("delta_product", "q two_k two_v two_beta"),
    "rwkv7": ("rwkv7", "q k v key_decay removal_key removal_rate"),
    "fwm": ("fwm", "q k v beta"),
}


def draw(shape, dtype=torch.float32, device="cpu"):
    """{name: tensor} of all inputs in FORMS, always the same ones."""
    B, H, L, Dk, Dv = shape
    generator = torch.Generator(device).manual_seed(1)

    def randn(*size):
        return torch.randn(B, H, L, *size, generator=generator, device=device)

    found = {
        "q": randn(Dk).softmax(-1),
        "k": randn(Dk).softmax(-1),
        "v": randn(Dv),
        "beta": randn().sigmoid(),
        "key_decay": (randn(Dk) + 4).sigmoid(),
        "value_decay": (randn(Dv) + 4).sigmoid(),
        "decay": (randn() + 4).sigmoid(),
        "two_k": randn(2, Dk).softmax(-1),
        "two_v": randn(2, Dv),
        "two_beta": randn(2).sigmoid(),
        "removal_key": normalize(randn(Dk), dim=-1),
        "removal_rate": randn(Dk).sigmoid(),
    }
    return {name: x.to(dtype) for name, x in found.items()} | {"gate": found["beta"].to(dtype, copy=True)}


def chosen(names, tensors, gradients=True):
    """The inputs of one form, each with a copy of its own."""
    return [tensors[name].clone().requires_grad_(gradients) for name in names.split()]


def call(form, backend="kernel"):
    """(*inputs) -> out"""
    rule = getattr(ops, f"{FORMS[form][0]}_rule")
    return lambda *inputs: rule(*inputs, backend=backend)[0]


def step(form, tensors, state, backend="kernel"):
    """A call without arguments: the form from a state, which returns out and the new state."""
    rule, names = FORMS[form]
    inputs = [tensors[name].detach() for name in names.split()]
    return lambda: getattr(ops, f"{rule}_rule")(*inputs, state, backend=backend)


def training_step(function, inputs, gradient):
    return torch.autograd.grad(function(*inputs), inputs, gradient)


def relative_error(found, truth):
    return ((found.double() - truth).norm() / truth.norm()).item()


def errors(function, form, shape, dtype=torch.float32, device="cpu", heads=None, swap=lambda x: x, whole=False):
    """{out and the inputs, for their gradients: relative error} of a function against the float64 reference.

    Of the first 256 tokens, and of `out` of all where `whole`. heads: of x to those that are compared, for the function
    is given all: how a kernel lays out its work depends on their number. swap: to the function's own layout and back.
    """
    heads = heads or (lambda x: x)
    B, H, L, Dk, Dv = shape
    tensors = draw((B, H, min(L, 256), Dk, Dv), dtype, device)
    names = FORMS[form][1]
    exact = [heads(tensors[name]).double().requires_grad_() for name in names.split()]
    gradient = torch.randn(tensors["v"].shape, generator=torch.Generator(device).manual_seed(2), device=device).to(
        dtype
    )
    out = call(form, "reference")(*exact)
    truth = [out, *torch.autograd.grad(out, exact, heads(gradient).double())]
    inputs = [swap(tensors[name]).contiguous().requires_grad_() for name in names.split()]
    out = function(*inputs)
    found = [out, *torch.autograd.grad(out, inputs, swap(gradient).contiguous())]
    result = {
        name: relative_error(heads(swap(x)), y)
        for name, x, y in zip(["out", *names.split()], found, truth, strict=True)
    }
    if whole:
        inputs = [draw(shape, dtype, device)[name] for name in names.split()]
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
