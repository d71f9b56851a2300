"""Laws of the quadratic form of the delta rule, which starts a sequence without a state, at sizes that take it."""

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
# (heads, L, Dk, Dv): tokens within one start, one that fills it, and beyond it; sizes on either side of whole vectors.
SHAPES = [(2, length, 256, 64) for length in (1, 2, 3, 4, 5, 31, 40, 63, 64, 65, 131)] + [
    (1, 37, 130, 70),
    (2, 33, 64, 64),
    (1, 64, 512, 96),
    (1, 50, 512, 17),
    (1, 19, 61, 300),
]


def inputs_of(shape, dtype=torch.float64, **more):
    return sample_inputs("delta", (2, *shape), dtype, **{"state": False, **more})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["no_state", "state"])
def test_kernel_equals_the_reference(shape, state):
    inputs = inputs_of(shape, state=state)
    gradients = cotangents(inputs)
    expected = results(reference, inputs, gradients)
    for name, found in results(kernel, inputs, gradients).items():
        assert relative_error(found, expected[name]) <= 1e-13, name


@pytest.mark.parametrize("shape", [(2, 40, 256, 64), (4, 131, 256, 64), (1, 33, 64, 64), (1, 64, 512, 96)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", [False, True], ids=["no_state", "state"])
def test_error_is_at_most_twice_that_of_the_loop(shape, dtype, state):
    check_accuracy("delta", inputs_of(shape, dtype, state=state))


@pytest.mark.parametrize("length", [5, 40, 70])
@pytest.mark.parametrize("index", [0, 1], ids=["out", "state"])
def test_gradient_of_one_output_alone(length, index):
    check_gradient_of_one_output("delta", inputs_of((2, length, 256, 64)), index)


@pytest.mark.parametrize("length", [40, 64, 70, 100])
@pytest.mark.parametrize("sizes", [(256, 64), (64, 64), (130, 33)], ids=str)
def test_causality_is_bit_exact(length, sizes):
    """Wherever a sequence is cut, also where the quadratic form gives way to the scan, and whatever follows the cut."""
    inputs, other = (inputs_of((1, length, *sizes), torch.float32, seed=seed) for seed in (0, 7))
    out = kernel(**inputs)[0]
    for cut in (1, 2, 3, 4, 6, 16, 39, 48, 63, 64, 65, 69):
        if cut >= length:
            break
        prefix = {name: None if x is None else x[:, :, :cut] for name, x in inputs.items()}
        assert torch.equal(kernel(**prefix)[0], out[:, :, :cut]), cut
        changed = {
            name: None if x is None else torch.cat([x[:, :, :cut], other[name][:, :, cut:]], 2)
            for name, x in inputs.items()
        }
        assert torch.equal(kernel(**changed)[0][:, :, :cut], out[:, :, :cut]), cut


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["q", "k", "v", "beta"])
@pytest.mark.parametrize("token", [0, 5, 6, 38, 39])
def test_what_is_not_finite_spreads_no_further_than_in_the_loop(where, token, value):
    """Every result that is finite in the loop is finite here, and the same: nothing is multiplied by a masking zero."""
    inputs = inputs_of((2, 40, 256, 64))
    gradients = cotangents(inputs)
    clean = results(kernel, inputs, gradients)
    inputs[where][0, 1, token] = value
    expected, found = (results(function, inputs, gradients) for function in (reference, kernel))
    for name, truth in expected.items():
        finite = truth.isfinite()
        assert name != "out" or finite[0, 1, :token].all()
        torch.testing.assert_close(found[name][finite], truth[finite], rtol=1e-10, atol=1e-10, msg=name)
        # The other sequences and heads, to the last bit.
        healthy = torch.ones(2, 2, dtype=torch.bool)
        healthy[0, 1] = False
        assert torch.equal(found[name][healthy], clean[name][healthy]), name


def test_what_is_not_read_gets_no_gradient():
    inputs = inputs_of((2, 40, 256, 64))
    of_out, of_state = (torch.zeros_like(x) for x in cotangents(inputs))
    of_out[:, :, :13] = 1
    found = results(kernel, inputs, (of_out, of_state))
    for name in ("q", "k", "v", "beta"):
        assert not found[f"d_{name}"][:, :, 13:].any() and found[f"d_{name}"][:, :, :13].any(), name


@pytest.mark.parametrize("layout", ["tokens_first", "sliced", "expanded"])
@pytest.mark.parametrize("length", [40, 70])
def test_layout_changes_nothing(layout, length):
    inputs = inputs_of((2, length, 136, 64), torch.float32, layout=layout)
    gradients = tuple(x.mT.contiguous().mT for x in cotangents(inputs))
    packed = {name: None if x is None else x.contiguous() for name, x in inputs.items()}
    found = results(kernel, inputs, gradients)
    for name, x in results(kernel, packed, gradients).items():
        assert torch.equal(found[name], x), name


def test_number_of_threads_changes_nothing():
    inputs = inputs_of((3, 70, 256, 64), torch.float32)
    gradients = cotangents(inputs)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(results(kernel, inputs, gradients))
    for name, x in found[0].items():
        assert torch.equal(found[1][name], x), name
