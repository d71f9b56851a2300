"""The backend fla: its arguments, in fla's layout and signatures, against stand-ins of fla's functions on the CPU.

With fla-core installed, the signatures are fla's own. The kernels need a GPU: test_cuda.py compares them there.
"""

import inspect
import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from subjects import RULES, cotangents, results, sample_inputs

from fairseq_fwp.ops import fla

SHAPE = (3, 2, 9, 4, 5)
HERE = [name for name in RULES if name not in ("decay", "fwm")]


def recurrence(q, k, v, decay, rate, erases, read, write, scale, initial_state, cu_seqlens):
    """Return out and the states of all documents, from tensors (B, L, H, ...) and logarithms of decays."""
    B, L, H, K = q.shape
    places = [0, *range(L, B * L + 1, L)] if cu_seqlens is None else cu_seqlens.tolist()
    assert cu_seqlens is None or (B == 1 and cu_seqlens.dtype == torch.int64)
    tokens = (q, k, v, decay, rate, read, write)
    q, k, v, decay, rate, read, write = (None if x is None else x.flatten(0, 1) for x in tokens)
    outs, states = [], []
    for number, (start, end) in enumerate(pairwise(places)):
        state = q.new_zeros(H, K, v.shape[-1]) if initial_state is None else initial_state[number]
        for t in range(start, end):
            removed = 0 if read is None else (read[t].unsqueeze(1) @ state) * write[t].unsqueeze(2)
            if decay is not None:
                state = decay[t].exp().view(H, -1, 1) * state
            value = v[t] - (k[t].unsqueeze(1) @ state).squeeze(1) if erases else v[t]
            value = value if rate is None else rate[t].unsqueeze(1) * value
            state = state + k[t].unsqueeze(2) * value.unsqueeze(1) + removed
            outs.append(scale * (q[t].unsqueeze(1) @ state).squeeze(1))
        states.append(state)
    return torch.stack(outs).view(B, L, H, -1), torch.stack(states)


def chunk_linear_attn(
    q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, cu_seqlens=None
):
    assert output_final_state and not normalize
    return recurrence(q, k, v, None, None, False, None, None, scale, initial_state, cu_seqlens)


def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
):
    assert output_final_state and g.dim() == 3
    return recurrence(q, k, v, g, None, False, None, None, scale, initial_state, cu_seqlens)


def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert output_final_state and g.shape == k.shape
    return recurrence(q, k, v, g, None, False, None, None, scale, initial_state, cu_seqlens)


def chunk_delta_rule(q, k, v, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert output_final_state
    return recurrence(q, k, v, None, beta, True, None, None, scale, initial_state, cu_seqlens)


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert output_final_state and g.dim() == 3
    return recurrence(q, k, v, g, beta, True, None, None, scale, initial_state, cu_seqlens)


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert output_final_state and g.shape == k.shape
    return recurrence(q, k, v, g, beta, True, None, None, scale, initial_state, cu_seqlens)


def chunk_gated_delta_product(
    q, k, v, g, beta, num_householder, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
):
    """The delta rule for N tokens each: the memory fades at the first of them, and the last one reads."""
    steps = num_householder
    assert output_final_state and k.shape[1] == q.shape[1] * steps
    queries = torch.stack([*[torch.zeros_like(q)] * (steps - 1), q], 2).flatten(1, 2)
    if g is not None:
        g = torch.stack([g, *[torch.zeros_like(g)] * (steps - 1)], 2).flatten(1, 2)
    places = None if cu_seqlens is None else cu_seqlens * steps
    out, state = recurrence(queries, k, v, g, beta, True, None, None, scale, initial_state, places)
    return out[:, steps - 1 :: steps], state


def chunk_rwkv7(r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert output_final_state
    return recurrence(r, k, v, w, None, False, a, b, scale, initial_state, cu_seqlens)


STAND_INS = {
    "linear_attn": chunk_linear_attn,
    "simple_gla": chunk_simple_gla,
    "gla": chunk_gla,
    "delta_rule": chunk_delta_rule,
    "gated_delta_rule": chunk_gated_delta_rule,
    "kda": chunk_kda,
    "gated_delta_product": chunk_gated_delta_product,
    "rwkv7": chunk_rwkv7,
}


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The backend with stand-ins in place of the package, for float32 on the CPU."""
    monkeypatch.setattr(fla, "DEVICES", ("cpu",))
    monkeypatch.setattr(fla, "DTYPES", (torch.float32,))
    for name, function in STAND_INS.items():
        module = ModuleType(f"fla.ops.{name}")
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


@pytest.mark.parametrize("state", [False, True], ids=["from nothing", "from a state"])
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("name", HERE)
def test_results_and_gradients_are_those_of_the_reference(on_the_cpu, name, documents, state):
    given = sample_inputs(name, SHAPE, torch.float32, state=state)
    first = None
    if documents:
        first = torch.zeros(SHAPE[0], SHAPE[2], dtype=torch.bool)
        first[0, [0, 5]] = first[1, [3, 8]] = True
    found, expected = (
        results(
            lambda backend=backend, **x: RULES[name].function(**x, first=first, backend=backend),
            given,
            cotangents(given),
        )
        for backend in ("fla", "reference")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", STAND_INS)
def test_the_stand_ins_have_the_arguments_of_fla(name):
    module = pytest.importorskip(f"fla.ops.{name}")
    ours, theirs = (
        inspect.signature(x).parameters for x in (STAND_INS[name], getattr(module, STAND_INS[name].__name__))
    )
    assert all(theirs[argument].default == parameter.default for argument, parameter in ours.items())


# fla's reference in PyTorch, with its names of our arguments; the first two take (B, H, L, D).
NAIVE = {
    "delta_rule": ("delta_rule.naive.delta_rule_recurrence", ("q", "k", "v", "beta")),
    "rwkv7": ("generalized_delta_rule.dplr.naive.dplr_recurrence", ("q", "k", "v", "alpha", "beta", "gk")),
    "gated_delta_rule": ("gated_delta_rule.naive.naive_recurrent_gated_delta_rule", ("q", "k", "v", "g", "beta")),
    "kda": ("kda.naive.naive_recurrent_kda", ("q", "k", "v", "g", "beta")),
    "gla": ("gla.naive.naive_recurrent_gla", ("q", "k", "v", "gk")),
    "simple_gla": ("simple_gla.naive.naive_recurrent_simple_gla", ("q", "k", "v", "g")),
}
OURS = {"rwkv7": ("r", "k", "v", "a", "b", "w"), "gla": ("q", "k", "v", "g")}


@pytest.mark.parametrize("name", NAIVE)
def test_the_stand_ins_compute_what_fla_defines(name):
    function, theirs = NAIVE[name]
    module, _, function = function.rpartition(".")
    naive = getattr(pytest.importorskip(f"fla.ops.{module}"), function)
    per_token = {"beta": name != "rwkv7", "g": name not in ("kda", "gla")}
    given = {}
    for argument, ours in zip(theirs, OURS.get(name, theirs), strict=True):
        x = torch.rand(2, 9, 3, 4)[..., 0 if per_token.get(argument) else slice(None)]
        given[argument, ours] = -x if argument in ("g", "gk") else x
    state = torch.randn(2, 3, 4, 4)
    heads_first = name in ("delta_rule", "rwkv7")
    inputs = {argument: x.transpose(1, 2) if heads_first else x for (argument, _), x in given.items()}
    expected, memory = naive(**inputs, initial_state=state, output_final_state=True)
    options = {"scale": 4**-0.5, "initial_state": state, "output_final_state": True}
    found = STAND_INS[name](**{ours: x for (_, ours), x in given.items()}, **options)
    torch.testing.assert_close(found, (expected.transpose(1, 2) if heads_first else expected, memory))


def refusal(name, dtype=torch.float32, **changes):
    given = sample_inputs(name, SHAPE, dtype, state=False) | changes
    with pytest.raises((RuntimeError, TypeError, ValueError)) as refused:
        RULES[name].function(**given, backend="fla")
    return str(refused.value)


def test_what_fla_does_not_take_is_refused(on_the_cpu, monkeypatch):
    assert "the rule must be one of sum_rule, " in refusal("decay")
    assert "the rule must be one of sum_rule, " in refusal("fwm")
    assert "q must be bfloat16 or float16, got torch.float64" in refusal("delta", torch.float64)
    assert "decay must be above 0, got 0;" in refusal("gated_delta", decay=torch.zeros(3, 2, 9))
    assert "decay must be above 0, got nan" in refusal("gla", decay=torch.full((3, 2, 9), float("nan")))
    assert "decay must have shape (B, H, L)" in refusal("delta_product_with_decay", decay=torch.ones(3, 2, 9, 4))
    assert "there must be tokens" in refusal(
        "sum", q=torch.ones(3, 2, 0, 4), k=torch.ones(3, 2, 0, 4), v=torch.ones(3, 2, 0, 5)
    )
    wide = torch.ones(1, 1, 1, 257)
    assert "keys of at most 256" in refusal("sum", q=wide, k=wide, v=wide)
    assert "sum_rule: v must have shape" in refusal("sum", v=wide)
    monkeypatch.setitem(sys.modules, "fla.ops.delta_rule", None)
    assert "needs the package fla-core" in refusal("delta")
    monkeypatch.setattr(fla, "DEVICES", ("cuda",))
    assert "tensors must be on a CUDA device, got cpu" in refusal("sum")
