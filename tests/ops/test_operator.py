"""The operator of the family itself: inputs that no rule here uses, layouts, and documents to the last bit."""

import itertools
from functools import partial

import pytest
import torch
from pairwise import looped
from subjects import (
    BIT_SHAPES,
    COMBINATIONS,
    RULES,
    WITH_KERNEL,
    cotangents,
    kernel_or_auto,
    results,
    sample_combination,
    sample_inputs,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_fwp import ops
from fairseq_fwp.ops.fast_weights import Inputs, fast_weights, reference_of


@looped("shape", [(2, 2, 45, 5, 20), (1, 2, 40, 16, 16)], ids=str)
@looped("name", COMBINATIONS)
def test_every_combination_is_the_step_of_the_family(name, shape):
    inputs, erases = sample_combination(name, shape, torch.float64), COMBINATIONS[name][1]

    def by_step(**given):
        made = Inputs(**given, erases=erases)
        return reference_of(made)(*made.tokens, state=made.state, first=None)

    gradients = cotangents(inputs)
    found = results(lambda **given: fast_weights(**given, erases=erases), inputs, gradients)
    for which, x in results(by_step, inputs, gradients).items():
        torch.testing.assert_close(found[which], x, rtol=1e-11, atol=1e-11, msg=which)


@pytest.mark.parametrize(
    ("dtype", "device", "added"), [(torch.bfloat16, "cuda", True), (torch.float32, "cuda", False), (None, "cpu", False)]
)
def test_documents_in_bfloat16_on_a_gpu_have_decays_by_head(monkeypatch, dtype, device, added):
    """A GPU is not needed: the tensors have no numbers."""
    seen = []
    monkeypatch.setattr("fairseq_fwp.ops.fast_weights._operator", lambda *x: (seen.append(x[3]), *x[:3]))
    with FakeTensorMode():
        q, first = torch.empty(2, 3, 70, 16, dtype=dtype, device=device), torch.empty(2, 70, dtype=torch.bool)
        fast_weights(q, q, q, first=first)
        assert (seen[-1] is not None) == added
        fast_weights(q, q, q, decay=q, first=first)
        assert seen[-1] is q
        for given in ({}, {"value_decay": q, "first": first}, {"removal_key": q, "removal_rate": q, "first": first}):
            fast_weights(q, q, q, **given)
            assert seen[-1] is None


def test_layouts_may_differ():
    """A product of two inputs has the layout of one of them."""
    inputs = sample_inputs("rwkv7", (2, 3, 40, 6, 5))
    inputs["removal_key"] = inputs["removal_key"][:1, :1, :1].expand(2, 3, 40, 6)
    inputs["removal_rate"] = inputs["removal_rate"].mT.contiguous().mT
    packed = {name: x.contiguous() for name, x in inputs.items()}
    gradients = cotangents(inputs)
    expected = results(ops.rwkv7_rule_reference, packed, gradients)
    for name, x in results(kernel_or_auto("rwkv7"), inputs, gradients).items():
        torch.testing.assert_close(x, expected[name], rtol=1e-11, atol=1e-11, msg=name)


@looped("backend", ["kernel", "reference"])
def test_a_gate_is_in_the_dtype_of_q_or_of_the_state(backend):
    """The dtype of a gate only rounds the gate."""
    for rule in ("delta", "gated_delta", "gla", "decay", "rwkv7"):
        inputs = sample_inputs(rule, (1, 2, 8, 4, 4), torch.bfloat16)
        wide = {name: x.float() if name in RULES[rule].gates else x for name, x in inputs.items()}
        function, gradients = RULES[rule].function, cotangents(inputs)
        found = results(partial(function, backend=backend), wide, gradients)
        for name, x in results(partial(function, backend=backend), inputs, gradients).items():
            assert found[name].dtype == (torch.float32 if name[2:] in RULES[rule].gates else x.dtype), name
            assert torch.equal(found[name].to(x.dtype), x), name
        gate = next(iter(RULES[rule].gates))
        with pytest.raises(TypeError, match=rf"{gate} must have .*bfloat16, got .*float64"):
            function(**inputs | {gate: inputs[gate].double()}, backend=backend)


@pytest.mark.parametrize("rule", WITH_KERNEL)
def test_documents_change_no_bit(rule):
    """Each document gives the same as a separate sequence: every form of the kernels, in float32."""
    for shape in BIT_SHAPES:
        check_documents(rule, shape)


def check_documents(rule, shape):
    inputs = sample_inputs(rule, shape, torch.float32)
    function, (B, _, L, _, _) = kernel_or_auto(rule), shape
    first = torch.zeros(B, L, dtype=torch.bool)
    first[0, [0, 64, 65, 130]] = first[1, [100, L - 1]] = True
    out, final = function(**inputs, first=first)
    tokens = {name: x for name, x in inputs.items() if name != "state"}
    for row in range(B):
        begins = [0, *(t for t in first[row].nonzero().flatten().tolist() if t), L]
        state = None if first[row, 0] else inputs["state"][row : row + 1]
        for begin, end in itertools.pairwise(begins):
            some = {name: x[row : row + 1, :, begin:end] for name, x in tokens.items()}
            expected, after = function(**some, state=state if begin == 0 else None)
            assert torch.equal(out[row : row + 1, :, begin:end], expected), (row, begin)
        assert torch.equal(final[row : row + 1], after), row


@looped("steps", [1, 3])
@looped("decay", [None, "head", "key"])
def test_delta_product_of_other_numbers_of_steps(steps, decay):
    k, v = torch.rand(2, 3, 20, steps, 6).double() / 3, torch.randn(2, 3, 20, steps, 5).double()
    inputs = {"q": torch.randn(2, 3, 20, 6).double(), "k": k, "v": v, "beta": torch.rand(2, 3, 20, steps).double()}
    inputs["state"] = torch.randn(2, 3, 6, 5).double()
    if decay:
        inputs["decay"] = torch.rand(2, 3, 20, *[6] * (decay == "key")).double()
    gradients = torch.randn(2, 3, 20, 5).double(), torch.randn(2, 3, 6, 5).double()
    expected = results(ops.delta_product_rule_reference, inputs, gradients)
    for name, x in results(kernel_or_auto("delta_product"), inputs, gradients).items():
        torch.testing.assert_close(x, expected[name], rtol=1e-11, atol=1e-11, msg=name)


WRONG = {
    "v": torch.zeros(2, 3, 2, 7, 5),
    "beta": torch.zeros(2, 3, 2, 7),
    "first": torch.zeros(2, 7, 1, dtype=torch.bool),
}


@looped("name", WRONG)
@looped("backend", ["auto", "kernel", "reference"])
def test_delta_product_refuses_steps_in_the_place_of_tokens(name, backend):
    """(N, L) has as many numbers as (L, N)."""
    inputs = sample_inputs("delta_product", (2, 3, 7, 6, 5), torch.float32)
    with pytest.raises(ValueError, match=r"must have shape .* got"):
        ops.delta_product_rule(**{**inputs, name: WRONG[name]}, backend=backend)


@looped("backend", ["auto", "kernel", "reference"])
@pytest.mark.parametrize(("rule", "name"), [("decay", "key_decay"), ("rwkv7", "decay")])
def test_a_decay_by_key_is_not_one_by_head(rule, name, backend):
    inputs = sample_inputs(rule, (2, 3, 7, 6, 5), torch.float32)
    inputs[name] = inputs[name][..., 0]
    with pytest.raises(ValueError, match=f"{name} must have"):
        RULES[rule].function(**inputs, backend=backend)
