"""Autograd of the compiled operators, which is compiled with their kernels (cuda_ext/bindings/autograd.h).

Gradients are tested in tests/laws; here are the other promises of autograd.
"""

import pytest
import torch
from pairwise import looped
from subjects import RULES, WITH_KERNEL, cotangents, kernel_or_auto, operands, results, sample_inputs
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

every_rule = looped("rule", WITH_KERNEL)
SHAPE = (2, 2, 7, 5, 6)


@every_rule
@looped("state", [True, False], ids=["state", "no_state"])
def test_no_python_between_forward_and_backward(rule, state):
    inputs = sample_inputs(rule, SHAPE, state=state)
    out, final = kernel_or_auto(rule)(**inputs | {"v": inputs["v"].requires_grad_()})
    for node in (out.grad_fn, final.grad_fn):
        assert node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


@every_rule
def test_any_input_alone(rule):
    """Each input in turn, including the state, is the only one that requires a gradient."""
    inputs = sample_inputs(rule, SHAPE)
    gradients = cotangents(inputs)
    expected = results(RULES[rule].reference, inputs, gradients)
    for name, x in inputs.items():
        leaf = x.clone().requires_grad_()
        out = kernel_or_auto(rule)(**inputs | {name: leaf})
        (found,) = torch.autograd.grad(out, leaf, gradients)
        torch.testing.assert_close(found, expected[f"d_{name}"], msg=name)


@every_rule
def test_a_saved_input_that_changes_is_noticed(rule):
    for name in ("k", "state"):
        leaves = {name: x.requires_grad_() for name, x in sample_inputs(rule, SHAPE).items()}
        inputs = {name: x.clone() for name, x in leaves.items()}
        out, _ = kernel_or_auto(rule)(**inputs)
        inputs[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@every_rule
def test_second_backward_needs_a_kept_graph(rule):
    inputs = {name: x.requires_grad_() for name, x in sample_inputs(rule, SHAPE).items()}
    out, _ = kernel_or_auto(rule)(**inputs)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


@every_rule
def test_checkpointing_changes_nothing(rule):
    inputs = sample_inputs(rule, SHAPE)
    gradients = cotangents(inputs)

    def recomputed(**leaves):
        return checkpoint(lambda: kernel_or_auto(rule)(**leaves), use_reentrant=False)

    expected = results(kernel_or_auto(rule), inputs, gradients)
    for name, x in results(recomputed, inputs, gradients).items():
        assert torch.equal(x, expected[name]), name


@every_rule
def test_operators_refuse_derivatives_in_forward_mode(rule):
    inputs = sample_inputs(rule, SHAPE)
    kernel_or_auto(rule)(**inputs)  # loads it
    with forward_ad.dual_level():
        q, k, v, *others = operands(rule, inputs)
        dual = forward_ad.make_dual(v, torch.ones_like(v))
        with pytest.raises(NotImplementedError, match="no derivative in forward mode: use backend='reference'"):
            torch.ops.fwp.fast_weights(q, k, dual, *others)


@every_rule
def test_under_vmap(rule):
    """It calls the operator with other values below its arguments on the dispatcher's stack."""
    each = [sample_inputs(rule, SHAPE, seed=seed) for seed in range(3)]
    together = {name: torch.stack([inputs[name] for inputs in each]) for name in each[0]}
    out, state = torch.vmap(lambda inputs: kernel_or_auto(rule)(**inputs))(together)
    for i, inputs in enumerate(each):
        expected = kernel_or_auto(rule)(**inputs)
        torch.testing.assert_close((out[i], state[i]), expected)
