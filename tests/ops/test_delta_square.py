"""Laws of the delta rule on square states as wide as a vector, which the kernel keeps in registers.

Sizes are those of all vectors, so that each build has some of its own: 16 float32 or 8 float64 with AVX-512, half as
many with AVX, a quarter without.
"""

import functools

import pytest
import torch
from rule_cases import (
    RULES,
    check_accuracy,
    check_gradient_of_one_output,
    cotangents,
    relative_error,
    results,
    sample_inputs,
)

from fairseq_fwp import ops

reference = RULES["delta"].reference
kernel = functools.partial(ops.delta_rule, backend="kernel")
every_size = pytest.mark.parametrize("size", [2, 4, 8, 16])
every_state = pytest.mark.parametrize("state", [False, True], ids=["no_state", "state"])


def inputs_of(length, size, dtype=torch.float64, **more):
    return sample_inputs("delta", (2, 3, length, size, size), dtype, **more)


@every_size
@every_state
@pytest.mark.parametrize("length", [1, 2, 3, 64, 257])
def test_kernel_equals_the_reference(size, length, state):
    inputs = inputs_of(length, size, state=state)
    gradients = cotangents(inputs)
    expected = results(reference, inputs, gradients)
    for name, found in results(kernel, inputs, gradients).items():
        assert relative_error(found, expected[name]) <= 1e-13, name


@pytest.mark.parametrize("size", [4, 8, 16])
@every_state
@pytest.mark.parametrize("length", [1, 3, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_is_at_most_twice_that_of_the_loop(size, length, state, dtype):
    check_accuracy("delta", inputs_of(length, size, dtype, state=state))


@every_size
@pytest.mark.parametrize("index", [0, 1], ids=["out", "state"])
def test_gradient_of_one_output_alone(size, index):
    check_gradient_of_one_output("delta", inputs_of(5, size), index)


@every_size
@every_state
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_causality_is_bit_exact(size, state, dtype):
    inputs, other = (inputs_of(9, size, dtype, state=state, seed=seed) for seed in (0, 7))
    before = inputs.pop("state")
    out = kernel(**inputs, state=before)[0]
    for cut in (1, 2, 5, 8):
        prefix = {name: x[:, :, :cut] for name, x in inputs.items()}
        assert torch.equal(kernel(**prefix, state=before)[0], out[:, :, :cut]), cut
        changed = {name: torch.cat([x[:, :, :cut], other[name][:, :, cut:]], 2) for name, x in inputs.items()}
        assert torch.equal(kernel(**changed, state=before)[0][:, :, :cut], out[:, :, :cut]), cut


@every_size
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["q", "k", "v", "beta"])
@pytest.mark.parametrize("token", [0, 3, 5])
def test_what_is_not_finite_spreads_no_further_than_in_the_loop(size, where, token, value):
    inputs = inputs_of(6, size)
    gradients = cotangents(inputs)
    inputs[where][0, 1, token] = value
    expected, found = (results(function, inputs, gradients) for function in (reference, kernel))
    for name, truth in expected.items():
        finite = truth.isfinite()
        assert name != "out" or finite[0, 1, :token].all()
        torch.testing.assert_close(found[name][finite], truth[finite], rtol=1e-10, atol=1e-10, msg=name)


@every_size
@pytest.mark.parametrize("layout", ["tokens_first", "sliced", "expanded"])
def test_layout_and_threads_change_nothing(size, layout):
    inputs = inputs_of(33, size, torch.float32, layout=layout)
    gradients = tuple(x.mT.contiguous().mT for x in cotangents(inputs))
    packed = {name: None if x is None else x.contiguous() for name, x in inputs.items()}
    found = results(kernel, inputs, gradients)
    torch.set_num_threads(2)
    for name, x in results(kernel, packed, gradients).items():
        assert torch.equal(found[name], x), name


def test_rebuilt_states_are_those_of_the_forward_pass():
    """Later writes do not correct what the backward pass rebuilds: rounding of its own would add up over all tokens."""
    inputs = sample_inputs("delta", (1, 1, 4096, 16, 16), torch.float32)
    inputs["k"] /= inputs["k"].norm(dim=-1, keepdim=True)
    check_accuracy("delta", inputs)
