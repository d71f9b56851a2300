"""Run the backend fla on a CPU: its Triton kernels in Triton's interpreter, in a process with TRITON_INTERPRET=1."""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from support.subjects import RULES, cotangents, relative_error, results, sample_inputs
from triton.runtime import autotuner

from fairseq_fwp.ops import fla

SHAPE = (1, 2, 70, 16, 16)  # two chunks
LIMIT = 1e-3  # about the last place of float16


class Number(int):
    """The number of a loop, which kernels convert as if it were a tensor of Triton."""

    def to(self, *_: Any, **__: Any) -> "Number":
        return self


def numbers(*bounds: Any) -> Iterator[Number]:
    """Iterate as range does, whose bounds may be tensors of one number."""
    whole = [int(x.handle.data.item()) if hasattr(x, "handle") else int(getattr(x, "value", x)) for x in bounds]
    return map(Number, range(*whole))


def prepare() -> None:
    """Change what Triton's interpreter cannot do, before the first kernels are imported."""
    tune = autotuner.Autotuner.__init__

    def first_of(self: Any, function: Any, names: Any, configs: Any, *more: Any, **named: Any) -> None:
        tune(self, function, names, configs[:1], *more, **named)  # a GPU would measure which one is best

    autotuner.Autotuner.__init__ = first_of
    fla.DEVICES = ("cpu",)
    load = fla._load

    def load_and_change(function: str) -> Any:
        loaded = load(function)
        for name, module in list(sys.modules.items()):
            if name.startswith("fla.ops"):
                vars(module).update(range=numbers, IS_GATHER_SUPPORTED=False)
        return loaded

    fla._load = load_and_change


def check(rule: str) -> None:
    """Check outputs and all gradients, with a state, without and with documents."""
    inputs = sample_inputs(rule, SHAPE, torch.float16)
    # The gradient of a decay is that of its logarithm, divided by it.
    inputs |= {name: 0.5 + 0.5 * x for name, x in inputs.items() if name in fla.DECAYS}
    exact = {name: x.double() for name, x in inputs.items()}
    gradients = cotangents(inputs)
    of_exact = tuple(x.double() for x in gradients)
    documents = torch.zeros(SHAPE[0], SHAPE[2], dtype=torch.bool)
    documents[0, [9, 33, 65]] = True
    for first in (None, documents):
        found = results(partial(RULES[rule].function, first=first, backend="fla"), inputs, gradients)
        for name, x in results(partial(RULES[rule].reference, first=first), exact, of_exact).items():
            error = relative_error(found[name], x)
            assert error < LIMIT, f"{name} of {rule}, documents={first is not None}: {error:.3g}"
