"""The operator of the family itself: inputs that no rule here uses, and autograd.

Gradients are tested in tests/laws. Here are the other promises of autograd, which is compiled with the kernels
(cuda_ext/bindings/autograd.h).
"""

from functools import partial

import pytest
import torch
from support.operator_fixtures import on_one_and_three_threads
from support.pairwise import looped
from support.subjects import (
    COMBINATIONS,
    RULES,
    WITH_KERNEL,
    cotangents,
    kernel_or_auto,
    operands,
    results,
    sample_inputs,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fairseq_fwp import ops
from fairseq_fwp.ops.fast_weights import Inputs, fast_weights

SHAPE = (2, 2, 7, 5, 6)
OPERATOR = torch.ops.fwp.fast_weights.default
every_kernel = looped("rule", WITH_KERNEL)


def assert_results(found, expected, **tolerance):
    """Compare results by name, to the last bit unless there is a tolerance."""
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


ROUNDED = {"rtol": 1e-11, "atol": 1e-11}


@looped("shape", [(2, 2, 45, 5, 20), (1, 2, 40, 16, 16)])
@looped("name", COMBINATIONS)
def test_every_combination_is_the_step_of_the_family(name, shape):
    case, inputs = COMBINATIONS[name], sample_inputs(name, shape)
    found, expected = (results(function, inputs, cotangents(inputs)) for function in (case.function, case.reference))
    assert_results(found, expected, **ROUNDED)


class Watched(FakeTensorMode):
    """Tensors without numbers, so that a GPU is not needed, and the last arguments of the operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is OPERATOR:
            self.given = Inputs(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)


@looped("dtype, device", [(torch.bfloat16, "cuda"), (torch.float32, "cuda"), (torch.bfloat16, "cpu")])
def test_documents_in_bfloat16_on_a_gpu_have_decays_by_head(dtype, device):
    with Watched() as watched:
        q = torch.empty(2, 3, 70, 16, dtype=dtype, device=device)
        first = torch.empty(2, 70, dtype=torch.bool, device=device)

        def decay(**given):
            fast_weights(q, q, q, **given)
            return watched.given.decay

        assert (decay(first=first) is not None) == (dtype == torch.bfloat16 and device == "cuda")
        assert decay(decay=q, first=first) is q and decay() is None
        for gates in ({"value_decay": q}, {"removal_key": q, "removal": q}):
            assert decay(**gates, first=first) is None


def test_what_the_backward_pass_gets_may_have_any_strides():
    """Also what the forward pass has left for it."""
    inputs = sample_inputs("gated_delta", (1, 2, 70, 16, 6), torch.float32)
    given = operands("gated_delta", inputs)
    more = *OPERATOR(*given)[2:], *cotangents(inputs)
    backward = torch.ops.fwp.fast_weights_backward.default
    expected = backward(*given, *more)
    for strided in (lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]], lambda x: torch.stack([x, x], -1)[..., 0]):
        assert all(map(torch.equal, backward(*given, *map(strided, more)), expected))


@every_kernel
@looped("shape", [(1, 2, 70, 16, 16), (1, 2, 70, 9, 20), (1, 2, 70, 48, 50)])
def test_without_a_gradient_nothing_is_kept(rule, shape):
    """That changes no bit of the results."""
    inputs = sample_inputs(rule, shape, torch.float32)
    assert [x.numel() for x in OPERATOR(*operands(rule, inputs), False)[2:4]] == [0, 0]
    with_gradient = kernel_or_auto(rule)(**inputs | {"v": inputs["v"].clone().requires_grad_()})
    assert all(map(torch.equal, kernel_or_auto(rule)(**inputs), with_gradient))


IN_CHUNKS = ("gla", "gla_by_key", "gated_delta", "gated_delta_by_key", "decay")
BY_COPIES = ((rule, (2, 2, 270, 24, 42)) for rule in ("sum", "delta", *IN_CHUNKS))


@looped("rule, shape", [*((rule, (1, 2, 70, 48, 50)) for rule in IN_CHUNKS), *BY_COPIES])
@looped("heads", [1, 2])
def test_bfloat16_is_computed_in_float32_and_rounded_once(monkeypatch, rule, shape, heads):
    """Without the tiles of a processor with AMX. heads: of q and k."""
    monkeypatch.setenv("FWP_CPU_TILES", "off")
    inputs = sample_inputs(rule, shape, torch.bfloat16)
    gradients = cotangents(inputs)
    inputs |= {name: inputs[name][:, :heads] for name in "qk"}
    found, of_three = on_one_and_three_threads(lambda: results(kernel_or_auto(rule), inputs, gradients))
    wide = {name: x.float() for name, x in inputs.items()}
    for name, x in results(kernel_or_auto(rule), wide, (gradients[0].float(), gradients[1])).items():
        assert torch.equal(found[name], x.to(found[name].dtype)) and torch.equal(found[name], of_three[name]), name


@looped("backend", ["kernel", "reference"])
@looped("rule", ["delta", "gated_delta", "gla", "decay", "rwkv7"])
def test_a_gate_is_in_the_dtype_of_q_or_of_the_state(rule, backend):
    """The dtype of a gate only rounds the gate."""
    inputs = sample_inputs(rule, (1, 2, 8, 4, 4), torch.bfloat16)
    wide = {name: x.float() if name in RULES[rule].gates else x for name, x in inputs.items()}
    function, gradients = partial(RULES[rule].function, backend=backend), cotangents(inputs)
    found = results(function, wide, gradients)
    for name, x in results(function, inputs, gradients).items():
        assert found[name].dtype == (torch.float32 if name[2:] in RULES[rule].gates else x.dtype), name
        assert torch.equal(found[name].to(x.dtype), x), name


@looped("steps", [1, 3])
@looped("decay", [None, (), (6,)])
def test_delta_product_of_other_numbers_of_steps(steps, decay):
    k, v = torch.rand(2, 3, 20, steps, 6).double() / 3, torch.randn(2, 3, 20, steps, 5).double()
    inputs = {"q": torch.randn(2, 3, 20, 6).double(), "k": k, "v": v, "beta": torch.rand(2, 3, 20, steps).double()}
    inputs["state"] = torch.randn(2, 3, 6, 5).double()
    function, inputs = ops.delta_product_rule, inputs
    if decay is not None:
        function = ops.gated_delta_product_rule
        inputs = {"q": inputs.pop("q"), "k": k, "v": v, "decay": torch.rand(2, 3, 20, *decay).double()} | inputs
    gradients = torch.randn(2, 3, 20, 5).double(), torch.randn(2, 3, 6, 5).double()
    expected = results(partial(function, backend="reference"), inputs, gradients)
    assert_results(results(partial(function, backend="kernel"), inputs, gradients), expected, **ROUNDED)


# Autograd.


@every_kernel
@looped("state", [True, False])
def test_no_python_between_forward_and_backward(rule, state):
    inputs = sample_inputs(rule, SHAPE, state=state)
    for result in kernel_or_auto(rule)(**inputs | {"v": inputs["v"].requires_grad_()}):
        assert result.grad_fn is not None
        assert not isinstance(result.grad_fn, torch.autograd.function.BackwardCFunction)


@every_kernel
def test_any_input_alone(rule):
    """Each input in turn, including the state, is the only one that requires a gradient."""
    inputs = sample_inputs(rule, SHAPE)
    gradients = cotangents(inputs)
    expected = results(RULES[rule].reference, inputs, gradients)
    for name, x in inputs.items():
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(kernel_or_auto(rule)(**inputs | {name: leaf}), leaf, gradients)
        torch.testing.assert_close(found, expected[f"d_{name}"], msg=name)


@every_kernel
def test_a_graph_is_kept_and_its_inputs_are_watched(rule):
    def out(inputs):
        return kernel_or_auto(rule)(**inputs)[0].sum()

    leaves = {name: x.requires_grad_() for name, x in sample_inputs(rule, SHAPE).items()}
    loss = out(leaves)
    for kept in (True, False):
        loss.backward(retain_graph=kept)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    for name in ("k", "state"):
        inputs = {name: x.clone() for name, x in leaves.items()}
        loss = out(inputs)
        inputs[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@every_kernel
def test_checkpointing_changes_nothing(rule):
    inputs = sample_inputs(rule, SHAPE)
    gradients = cotangents(inputs)

    def recomputed(**leaves):
        return checkpoint(lambda: kernel_or_auto(rule)(**leaves), use_reentrant=False)

    assert_results(results(recomputed, inputs, gradients), results(kernel_or_auto(rule), inputs, gradients))


@every_kernel
def test_under_vmap(rule):
    """It calls the operator with other values below its arguments on the dispatcher's stack."""
    each = [sample_inputs(rule, SHAPE, seed=seed) for seed in range(3)]
    together = {name: torch.stack([inputs[name] for inputs in each]) for name in each[0]}
    found = torch.vmap(lambda inputs: kernel_or_auto(rule)(**inputs))(together)
    expected = zip(*(kernel_or_auto(rule)(**inputs) for inputs in each), strict=True)
    torch.testing.assert_close(found, tuple(map(torch.stack, expected)))
