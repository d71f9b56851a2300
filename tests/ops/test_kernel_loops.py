"""The loops in comments of the kernels are the rules, with their gradients: each is run as Python and compared."""

import re
import textwrap
from pathlib import Path

import torch
from support.pairwise import looped

from fairseq_fwp.ops.fast_weights import Inputs, reference_of

KERNELS = Path(__file__).resolve().parents[2] / "cuda_ext"
LOOP = re.compile(r"^//     for t in .*\n(?://      .*\n)+", re.MULTILINE)
L, DK, DV = 7, 5, 4
# The symbols of cuda_ext/rule.h, the operator's names, and their sizes for a token.
SYMBOLS = {"a": "decay", "z": "value_decay", "b": "rate", "y": "removal_key", "x": "removal"}
SIZES = {"q": DK, "k": DK, "v": DV, "a": DK, "z": DV, "b": None, "y": DK, "x": DK}
# By file: the terms of the rule, and whether it erases.
FILES = {
    "cpu/sum.h": [("", False)],
    "cpu/delta.h": [("b", True)],
    "cpu/forget.h": [("a", False), ("ab", True), ("az", False), ("ab", False), ("abyx", False)],
    "cuda/recurrent.cuh": [("", False), ("b", True), ("a", False), ("ab", True), ("az", False), ("abyx", False)],
}


def loops_of(file):
    """Return the program of each loop."""
    found = LOOP.findall((KERNELS / file).read_text())
    return [textwrap.dedent(loop.replace("//", "")) for loop in found]


@looped("file, terms, erases", [(file, *case) for file, cases in FILES.items() for case in cases])
def test_a_loop_is_the_rule_and_its_gradient(file, terms, erases):
    given = {name: torch.randn(L, *([size] if size else []), dtype=torch.float64) for name, size in SIZES.items()}
    state, d_out, d_state = (torch.randn(*size, dtype=torch.float64) for size in ((DK, DV), (L, DV), (DK, DV)))
    for name in SYMBOLS.keys() - set(terms):
        given[name] = torch.full_like(given[name], 0 if name in "yx" else 1)
    names = ["q", "k", "v", *(name for name in SYMBOLS if name in terms)]
    leaves = {name: given[name][None, None].requires_grad_() for name in names}
    inputs = Inputs(**{SYMBOLS.get(name, name): leaf for name, leaf in leaves.items()}, erases=erases)
    initial = state[None, None].requires_grad_()
    out, last = reference_of(inputs)(*inputs.tokens, state=initial, first=None)
    gradients = torch.autograd.grad([out, last], [*leaves.values(), initial], [d_out[None, None], d_state[None, None]])

    values = {name: x.detach().clone() for name, x in given.items()}
    memory = {**values, "L": L, "W": state.detach().clone(), "G": d_state.clone(), "d_out": d_out, "erases": erases}
    memory |= {f"d_{name}": torch.zeros_like(x) for name, x in values.items()}
    memory |= {"outer": torch.outer, "before": [None] * L, "out": torch.zeros(L, DV, dtype=torch.float64)}
    memory |= {name: torch.zeros_like(values["v"]) for name in ("e", "r", "d_r")}
    forward, *backward = loops_of(file)
    exec(forward, memory)
    close(memory["out"], out[0, 0])
    close(memory["W"], last[0, 0])
    for loop in backward:  # a later one may go through G again
        memory |= {"W": state.detach().clone()} | ({"G": d_state.clone()} if re.search(r"\bG =", loop) else {})
        exec(loop, memory)
    if backward:
        for name, gradient in zip((*(f"d_{name}" for name in names), "G"), gradients, strict=True):
            close(memory[name], gradient[0, 0])


def close(x, y):
    torch.testing.assert_close(x, y.detach(), rtol=1e-12, atol=1e-12)


def test_every_loop_is_run():
    with_loops = {str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.*h") if LOOP.search(path.read_text())}
    assert with_loops == FILES.keys()
    assert [len(loops_of(file)) for file in FILES] == [1, 3, 3, 2]
