"""The backend fla: its arguments, in fla's layout and signatures, against stand-ins of fla's functions on the CPU.

With fla-core installed, the signatures are fla's own. The kernels need a GPU: test_cuda.py compares them there.
"""

import inspect
import re
import sys
from functools import partial
from importlib import import_module
from types import ModuleType

import pytest
import torch
from support.fla_functions import FUNCTIONS, stand_in
from support.pairwise import looped
from support.subjects import IN_FLA, RULES, cotangents, results, sample_inputs

from fairseq_fwp.ops import fla

SHAPE = (3, 2, 9, 4, 5)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The backend with stand-ins in place of the package, for float32 on the CPU."""
    monkeypatch.setattr(fla, "DEVICES", ("cpu",))
    monkeypatch.setattr(fla, "DTYPES", (torch.float32,))
    for function in FUNCTIONS:
        module, name = function.split(".")
        made = ModuleType(f"fla.ops.{module}")
        setattr(made, name, partial(stand_in, function))
        monkeypatch.setitem(sys.modules, made.__name__, made)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


@looped("name", IN_FLA)
@looped("documents", [False, True])
@looped("state", [False, True])
def test_results_and_gradients_are_those_of_the_reference(on_the_cpu, name, documents, state):
    given, first = sample_inputs(name, SHAPE, torch.float32, state=state), None
    if documents:
        first = torch.zeros(SHAPE[0], SHAPE[2], dtype=torch.bool)
        first[0, [0, 5]] = first[1, [3, 8]] = True
    found, expected = (
        results(partial(RULES[name].function, first=first, backend=backend), given, cotangents(given))
        for backend in ("fla", "reference")
    )
    torch.testing.assert_close(found, expected)


def theirs(path):
    module, _, name = path.rpartition(".")
    pytest.importorskip("fla")
    return getattr(import_module(f"fla.ops.{module}"), name)


@looped("function", FUNCTIONS)
def test_fla_has_the_arguments_of_the_stand_ins(function):
    more = {"normalize": False} if "linear" in function else {"num_householder": 1} if "product" in function else {}
    given = dict.fromkeys(
        [*FUNCTIONS[function][0].split(), "scale", "initial_state", "output_final_state", "cu_seqlens"]
    )
    inspect.signature(theirs(function)).bind(**given, **more)


# fla's definitions in PyTorch, with its names of the stand-in's tokens.
GATED = "gated_delta_rule.naive"
NAIVE = {
    "simple_gla.chunk_simple_gla": ("simple_gla.naive.naive_recurrent_simple_gla", "q k v g"),
    "gla.chunk_gla": ("gla.naive.naive_recurrent_gla", "q k v gk"),
    "delta_rule.chunk_delta_rule": ("delta_rule.naive.delta_rule_recurrence", "q k v beta"),
    "gated_delta_rule.chunk_gated_delta_rule": (f"{GATED}.naive_recurrent_gated_delta_rule", "q k v g beta"),
    "kda.chunk_kda": ("kda.naive.naive_recurrent_kda", "q k v g beta"),
    "rwkv7.chunk_rwkv7": ("generalized_delta_rule.dplr.naive.dplr_recurrence", "q gk k v alpha beta"),
}  # fmt: skip


@looped("function", NAIVE)
def test_the_stand_ins_compute_what_fla_defines(function):
    path, called = NAIVE[function]
    names, fades, _ = FUNCTIONS[function]
    given, state = {}, torch.randn(2, 3, 4, 4)
    for name in names.split():
        x = torch.rand(2, 9, 3, 4)
        x = x[..., 0] if name == "beta" or (name == "g" and fades == "one") else x
        given[name] = -x if name in ("g", "w") else x
    heads_first = function.startswith(("delta_rule", "rwkv7"))  # (B, H, L, D)
    arranged = [x.transpose(1, 2) if heads_first else x for x in given.values()]
    inputs = dict(zip(called.split(), arranged, strict=True))
    out, memory = theirs(path)(**inputs, initial_state=state, output_final_state=True)
    found = stand_in(function, **given, scale=4**-0.5, initial_state=state, output_final_state=True)
    torch.testing.assert_close(found, (out.transpose(1, 2) if heads_first else out, memory))


def test_what_fla_does_not_take_is_refused(on_the_cpu, monkeypatch):
    def refuses(name, sentence, dtype=torch.float32, **changes):
        given = sample_inputs(name, SHAPE, dtype, state=False) | changes
        with pytest.raises((RuntimeError, TypeError, ValueError), match=re.escape(sentence)):
            RULES[name].function(**given, backend="fla")

    wide, none, gate = torch.ones(1, 1, 1, 257), torch.ones(3, 2, 0, 4), torch.ones(3, 2, 9)
    refuses("decay", "the rule must be one of sum_rule, ")
    refuses("fwm", "the rule must be one of sum_rule, ")
    refuses("delta", "q must be bfloat16 or float16, got torch.float64", torch.float64)
    refuses("gated_delta", "decay must be above 0, got 0;", decay=0 * gate)
    refuses("gla", "decay must be above 0, got nan", decay=float("nan") * gate)
    refuses("gated_delta_product", "decay must have shape (B, H, L)", decay=torch.ones(3, 2, 9, 4))
    refuses("sum", "there must be tokens", q=none, k=none, v=none)
    refuses("sum", "keys of at most 256", q=wide, k=wide, v=wide)
    refuses("sum", "sum_rule: v must have", v=wide)
    monkeypatch.setitem(sys.modules, "fla.ops.delta_rule", None)
    refuses("delta", "needs the package fla-core")
    monkeypatch.setattr(fla, "DEVICES", ("cuda",))
    refuses("sum", "tensors must be on a CUDA device, got cpu")
