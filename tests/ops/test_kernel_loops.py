"""The programs in comments of the kernels are the rules, loops with gradients: each is run as Python and compared."""

import re
import textwrap
from pathlib import Path

import torch
from support.pairwise import looped

from fairseq_fwp.ops.fast_weights import Inputs, reference_of

KERNELS = Path(__file__).resolve().parents[2] / "cuda_ext"
LOOP = re.compile(r"^//     for t in .*\n(?://      .*\n)+", re.MULTILINE)
PROGRAM = re.compile(r"^//.* program of one chunk.*\n//\n((?://     .*\n)+)", re.MULTILINE)
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
CHUNKS = {
    "cpu/forget_chunk.h": [("a", False), ("ab", True), ("az", False), ("ab", False), ("abyx", False)],
    "cuda/chunks.cuh": [("", False), ("b", True), ("a", False), ("ab", True)],  # a decay by head
    "cuda/chunk_keys.cuh": [("a", False), ("ab", True), ("az", False), ("abyx", False)],
}


def programs_of(file, pattern=LOOP):
    """Return the programs in the comments of a file."""
    found = pattern.findall((KERNELS / file).read_text())
    return [textwrap.dedent(program.replace("//", "")) for program in found]


def cases_of(files):
    return [(file, *case) for file, cases in files.items() for case in cases]


def draw(terms):
    """Return what a token has, by its symbols: zeros and ones for terms that a rule does not have."""
    given = {name: torch.randn(L, *([size] if size else []), dtype=torch.float64) for name, size in SIZES.items()}
    for name in SYMBOLS.keys() - set(terms):
        given[name] = torch.full_like(given[name], 0 if name in "yx" else 1)
    return given


@looped("file, terms, erases", cases_of(FILES))
def test_a_loop_is_the_rule_and_its_gradient(file, terms, erases):
    given = draw(terms)
    state, d_out, d_state = (torch.randn(*size, dtype=torch.float64) for size in ((DK, DV), (L, DV), (DK, DV)))
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
    forward, *backward = programs_of(file)
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


def products(factors):
    """Return [t][s], the product of the factors of s + 1 to t; the last column and row are those of -1."""
    ones = torch.ones_like(factors[0])
    of = [[factors[s + 1 : t + 1].prod(0) if s < t else ones for s in (*range(L), -1)] for t in (*range(L), -1)]
    return torch.stack([torch.stack(row) for row in of])


@looped("file, terms, erases", cases_of(CHUNKS))
def test_a_chunk_is_the_rule(file, terms, erases):
    given, state = draw(terms), torch.randn(DK, DV, dtype=torch.float64)
    if by_head := file == "cuda/chunks.cuh":
        given["a"] = given["a"][:, :1].expand(L, DK)
    names = ["q", "k", "v", *(name for name in SYMBOLS if name in terms)]
    inputs = Inputs(**{SYMBOLS.get(name, name): given[name][None, None] for name in names}, erases=erases)
    out, last = reference_of(inputs)(*inputs.tokens, state=state[None, None], first=None)

    q, k, v, x, b = (given[name] for name in "qkvxb")
    memory = {**given, "Q": q, "K": k, "V": v, "B": b[:, None] * k, "W": state.clone(), "L": L}
    memory |= {"erases": erases, "removes": "x" in terms, "outer": torch.outer, "solve": torch.linalg.solve}
    memory |= {"I": torch.eye(L, dtype=torch.float64), "upto": torch.tril, "below": lambda scores: scores.tril(-1)}
    memory |= {"read": lambda q, F, k: torch.einsum("ti,tsi,si->ts", q, F, k)}
    memory |= {"fade": lambda P, Z, v: torch.einsum("ts,tsj,sj->tj", P, Z, v)}
    memory |= {name: torch.zeros_like(v) for name in ("r", "out", "written", "removed")}
    memory["writers"] = [(k, memory["written"]), (x, memory["removed"])]
    F, Z = products(given["a"]), products(given["z"])
    if file == "cpu/forget_chunk.h":
        memory |= {"F": F, "Z": Z}
    else:
        F = F[..., :1] if by_head else F
        F_before, c_before = F.roll(1, 0)[:L, :L], F.roll(1, 0)[:L, -1]
        memory |= {"F": F[:L, :L, 0] if by_head else F[:L, :L], "c": F[:L, -1], "w": F[L - 1, :L], "c_C": F[L - 1, -1]}
        memory |= {"F_before": F_before, "c_before": c_before}
        memory |= {"Z": Z[:L, :L], "Z_start": Z[:L, -1], "w_of_value": Z[L - 1, :L], "z_C": Z[L - 1, -1]}
    (program,) = programs_of(file, PROGRAM)
    exec(program, memory)
    close(memory["out"], out[0, 0])
    close(memory["W"], last[0, 0])


def test_every_loop_is_run():
    def found(pattern):
        return {str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.*h") if pattern.search(path.read_text())}

    assert found(LOOP) == FILES.keys() | {"cpu/forget_chunk.h"} and found(PROGRAM) == CHUNKS.keys()
    assert [len(programs_of(file)) for file in FILES] == [1, 3, 3, 2]
