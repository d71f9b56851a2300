"""`ops.explain` names each reason for which another backend runs, and the rule does as it says."""

import re
import sys
from contextlib import nullcontext

import pytest
import torch
from support.pairwise import looped
from support.subjects import sample_inputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.forward_ad import dual_level

from fairseq_fwp import ops
from fairseq_fwp.ops import fla
from fairseq_fwp.ops.kernels import backend, self_check

CURE = ops.KernelStatus(False, reason="there is no compiler", cure="install one")
# The rule, what is changed, the backend, and words of the other lines.
CASES = {
    "a kernel": ("delta", [], "kernel", ["not the reference: it runs only with", "not fla: .* on a CUDA device"]),
    "no kernel": (
        "fwm",
        [],
        "reference",
        ["not the kernel: fwm_rule has no compiled kernel", "not fla: .* must be one of sum_rule"],
    ),
    "too large": ("delta", [(backend, "GREATEST_SIZE", {"cpu": 4})], "reference", ["kernel: .* at most 4 dimensions"]),
    "not built": (
        "delta",
        [(backend, "load_kernels", lambda device: CURE)],
        "reference",
        ["not the kernel: no compiled kernel for cpu: there is no compiler; install one"],
    ),
    "wrong": (
        "delta",
        [(self_check, "CHECKED", ("cpu",)), (self_check, "find_faults", lambda device: {"delta_rule": "q is off"})],
        "reference",
        ["not the kernel: .* differs from the reference: q is off; use"],
    ),
    "traced": ("delta", [(torch.compiler, "is_compiling", lambda: True)], "kernel", ["a graph keeps the call as one"]),
}


@looped("name", CASES)
def test_the_reason_is_said_and_true(name):
    rule, changes, expected, said = CASES[name]
    function, inputs = getattr(ops, f"{rule}_rule"), sample_inputs(rule, (1, 1, 3, 5, 4))
    with pytest.MonkeyPatch.context() as patch:
        for change in changes:
            patch.setattr(*change)
        found = ops.explain(function, inputs["q"], inputs["v"])
        refused = expected == "reference"
        with pytest.raises(RuntimeError) if refused else nullcontext() as error:
            function(**inputs, backend="kernel")
    assert found.startswith(f"{rule}_rule, torch.float64 on cpu: the {expected}\n")
    assert not refused or f"not the kernel: {error.value}" in found
    assert all(re.search(words, found) for words in said), found


def test_what_runs_is_what_is_said(monkeypatch):
    """For the two reasons for which the loop runs in place of the operator; others are the operator's own."""
    inputs = sample_inputs("delta", (1, 1, 3, 5, 4))
    monkeypatch.setitem(ops.delta_rule.__dict__, "reference", lambda *given, **named: "the reference")
    for sizes in ({"cpu": 5}, {"cpu": 4}):
        monkeypatch.setattr(backend, "GREATEST_SIZE", sizes)
        monkeypatch.setattr(backend, "_warned", {"cpu"})
        runs = "the reference" if ops.delta_rule(**inputs) == "the reference" else "the kernel"
        assert ops.explain(ops.delta_rule, inputs["q"], inputs["v"]).splitlines()[0].endswith(runs)


def test_a_gpu_and_a_transform(monkeypatch):
    monkeypatch.setattr(backend, "load_kernels", lambda device: ops.KernelStatus(True))
    monkeypatch.setattr(self_check, "CHECKED", ())
    monkeypatch.setitem(sys.modules, "fla", None)
    with FakeTensorMode():
        q = torch.empty(1, 1, 3, 4, dtype=torch.float16, device="cuda")
        found = ops.explain(ops.delta_rule, q, q)
    assert "the kernel\n" in found and "needs the package fla-core" in found
    monkeypatch.setattr(fla, "_load", lambda function: None)
    with dual_level():
        found = ops.explain(ops.delta_rule, q, q)
    assert "no derivative in torch.func: use backend='reference'" in found
    assert found.endswith("not fla: it runs only with backend='fla'")
    with pytest.raises(TypeError, match=r"^the rule must be an ops\.Rule, got function$"):
        ops.explain(ops.mlstm_rule, q, q)
    with pytest.raises(TypeError, match=r"^the rule must be an ops\.Rule, got function$"):
        ops.states_after(ops.mlstm_rule, [1], q, q, q)
