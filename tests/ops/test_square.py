"""Laws of the rules on square states as wide as a vector, which kernels keep in registers.

Sizes are those of all vectors, so that each build has some of its own: 16 float32 or 8 float64 with AVX-512, half as
many with AVX, a quarter without.
"""

import pytest
import torch
from rule_cases import (
    RULES,
    WITH_KERNEL,
    check_accuracy,
    check_gradient_of_one_output,
    cotangents,
    kernel_or_auto,
    relative_error,
    results,
    sample_inputs,
)

# The sum rule keeps no state in registers.
SQUARE = [name for name in WITH_KERNEL if name != "sum"]
every_rule = pytest.mark.parametrize("rule", SQUARE)
every_argument = pytest.mark.parametrize(
    ("rule", "where"), [(rule, where) for rule in SQUARE for where in ("q", "k", "v", *RULES[rule].gates)]
)
every_size = pytest.mark.parametrize("size", [2, 4, 8, 16])
every_state = pytest.mark.parametrize("state", [False, True], ids=["no_state", "state"])


def inputs_of(rule, length, size, dtype=torch.float64, **more):
    return sample_inputs(rule, (2, 3, length, size, size), dtype, **more)


@every_rule
@every_size
@every_state
@pytest.mark.parametrize("length", [1, 2, 3, 64, 257])
def test_kernel_equals_the_reference(rule, size, length, state):
    inputs = inputs_of(rule, length, size, state=state)
    gradients = cotangents(inputs)
    expected = results(RULES[rule].reference, inputs, gradients)
    for name, found in results(kernel_or_auto(rule), inputs, gradients).items():
        assert relative_error(found, expected[name]) <= 1e-13, name


@every_rule
@pytest.mark.parametrize("size", [4, 8, 16])
@every_state
@pytest.mark.parametrize("length", [1, 3, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_is_at_most_twice_that_of_the_loop(rule, size, length, state, dtype):
    # A ratio of errors needs many numbers, also for a single token.
    check_accuracy(rule, sample_inputs(rule, (8, 8, length, size, size), dtype, state=state))


@every_rule
@every_size
@pytest.mark.parametrize("index", [0, 1], ids=["out", "state"])
def test_gradient_of_one_output_alone(rule, size, index):
    check_gradient_of_one_output(rule, inputs_of(rule, 5, size), index)


@every_rule
@every_size
@every_state
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_causality_is_bit_exact(rule, size, state, dtype):
    inputs, other = (inputs_of(rule, 9, size, dtype, state=state, seed=seed) for seed in (0, 7))
    before = inputs.pop("state")
    kernel = kernel_or_auto(rule)
    out = kernel(**inputs, state=before)[0]
    for cut in (1, 2, 5, 8):
        prefix = {name: x[:, :, :cut] for name, x in inputs.items()}
        assert torch.equal(kernel(**prefix, state=before)[0], out[:, :, :cut]), cut
        changed = {name: torch.cat([x[:, :, :cut], other[name][:, :, cut:]], 2) for name, x in inputs.items()}
        assert torch.equal(kernel(**changed, state=before)[0][:, :, :cut], out[:, :, :cut]), cut


@every_argument
@every_size
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("token", [0, 3, 5])
def test_what_is_not_finite_spreads_no_further_than_in_the_loop(rule, size, where, token, value):
    inputs = inputs_of(rule, 6, size)
    gradients = cotangents(inputs)
    inputs[where][0, 1, token] = value
    functions = RULES[rule].reference, kernel_or_auto(rule)
    expected, found = (results(function, inputs, gradients) for function in functions)
    for name, truth in expected.items():
        finite = truth.isfinite()
        assert name != "out" or finite[0, 1, :token].all()
        torch.testing.assert_close(found[name][finite], truth[finite], rtol=1e-10, atol=1e-10, msg=name)


@every_rule
@every_size
@pytest.mark.parametrize("layout", ["tokens_first", "sliced", "expanded"])
def test_layout_and_threads_change_nothing(rule, size, layout):
    inputs = inputs_of(rule, 33, size, torch.float32, layout=layout)
    gradients = tuple(x.mT.contiguous().mT for x in cotangents(inputs))
    packed = {name: None if x is None else x.contiguous() for name, x in inputs.items()}
    found = results(kernel_or_auto(rule), inputs, gradients)
    torch.set_num_threads(2)
    for name, x in results(kernel_or_auto(rule), packed, gradients).items():
        assert torch.equal(found[name], x), name


def test_rebuilt_states_are_those_of_the_forward_pass():
    """Of the delta rule. Later writes do not correct them: rounding of their own would add up over all tokens."""
    inputs = sample_inputs("delta", (1, 1, 4096, 16, 16), torch.float32)
    inputs["k"] /= inputs["k"].norm(dim=-1, keepdim=True)
    check_accuracy("delta", inputs)
