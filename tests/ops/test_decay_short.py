"""Laws of the quadratic form of the rules that forget, which starts a sequence without a state, at sizes for it."""

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

every_rule = pytest.mark.parametrize("rule", ["decay", "gated"])
GATES = {"decay": ["key_decay", "value_decay"], "gated": ["gate"]}
START = 64  # tokens that take it, where Dk = 256 and Dv = 64; 32 where they are 130 and 33
# (heads, L, Dk, Dv): sizes on either side of whole vectors, of which some keep to the scan.
SHAPES = [(2, length, 256, 64) for length in (*range(1, 10), 31, 40, *range(START - 1, START + 4), 96, 97)] + [
    (1, 37, 130, 70),
    (2, 33, 64, 64),
    (1, 64, 512, 96),
    (1, 50, 512, 17),
    (1, 19, 61, 300),
    (1, 70, 131, 133),
]


def inputs_of(rule, shape, dtype=torch.float64, **more):
    return sample_inputs(rule, (2, *shape), dtype, **{"state": False, **more})


def kernel(rule):
    return functools.partial(RULES[rule].function, backend="kernel")


def check_against_the_loop(rule, inputs):
    gradients = cotangents(inputs)
    expected = results(RULES[rule].reference, inputs, gradients)
    for name, found in results(kernel(rule), inputs, gradients).items():
        assert relative_error(found, expected[name]) <= 1e-13, name


@every_rule
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_equals_the_reference(rule, shape):
    check_against_the_loop(rule, inputs_of(rule, shape))


@every_rule
@pytest.mark.parametrize("length", [40, 70])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 1.5])
def test_gates_may_be_any_number(rule, length, value):
    """Zero forgets all, one keeps all: a form with divisions or logarithms would fail at the one or the other."""
    inputs = inputs_of(rule, (2, length, 256, 64))
    for gate in GATES[rule]:
        inputs[gate][:, :, ::3] = value
        inputs[gate][0, 0] = value if value <= 1 else 1
    check_against_the_loop(rule, inputs)


@every_rule
@pytest.mark.parametrize("shape", [(2, 40, 256, 64), (4, 131, 256, 64), (1, 33, 64, 64), (1, 64, 512, 96)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_is_at_most_twice_that_of_the_loop(rule, shape, dtype):
    check_accuracy(rule, inputs_of(rule, shape, dtype))


@every_rule
@pytest.mark.parametrize("length", [5, 40, 64, 70])
@pytest.mark.parametrize("index", [0, 1], ids=["out", "state"])
def test_gradient_of_one_output_alone(rule, length, index):
    check_gradient_of_one_output(rule, inputs_of(rule, (2, length, 256, 64)), index)


@every_rule
@pytest.mark.parametrize("length", [40, 64, 70, 100])
@pytest.mark.parametrize("sizes", [(256, 64), (64, 64), (130, 33)], ids=str)
def test_causality_is_bit_exact(rule, length, sizes):
    """Wherever a sequence is cut, also where the quadratic form gives way to the scan, and whatever follows the cut."""
    inputs, other = (inputs_of(rule, (1, length, *sizes), torch.float32, seed=seed) for seed in (0, 7))
    out = kernel(rule)(**inputs)[0]
    for cut in (1, 2, 3, 4, 6, 16, 31, 32, 33, 39, 48, 63, 64, 65, 69):
        if cut >= length:
            break
        prefix = {name: None if x is None else x[:, :, :cut] for name, x in inputs.items()}
        assert torch.equal(kernel(rule)(**prefix)[0], out[:, :, :cut]), cut
        for rest in ({name: x if x is None else x[:, :, cut:] for name, x in other.items()}, float("nan")):
            changed = {name: None if x is None else x.clone() for name, x in inputs.items()}
            for name, x in changed.items():
                if x is not None:
                    x[:, :, cut:] = rest if isinstance(rest, float) else rest[name]
            assert torch.equal(kernel(rule)(**changed)[0][:, :, :cut], out[:, :, :cut]), cut


@pytest.mark.parametrize(
    ("rule", "where"), [(rule, x) for rule, gates in GATES.items() for x in ("q", "k", "v", *gates)]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("token", [0, 5, 6, 38, 39])
def test_what_is_not_finite_spreads_no_further_than_in_the_loop(rule, where, token, value):
    """Every result that is finite in the loop is finite here, and the same: nothing is multiplied by a masking zero."""
    inputs = inputs_of(rule, (2, 40, 256, 64))
    gradients = cotangents(inputs)
    clean = results(kernel(rule), inputs, gradients)
    inputs[where][0, 1, token] = value
    expected, found = (results(function, inputs, gradients) for function in (RULES[rule].reference, kernel(rule)))
    for name, truth in expected.items():
        finite = truth.isfinite()
        assert name != "out" or finite[0, 1, :token].all()
        torch.testing.assert_close(found[name][finite], truth[finite], rtol=1e-10, atol=1e-10, msg=name)
        # The other sequences and heads, to the last bit.
        healthy = torch.ones(2, 2, dtype=torch.bool)
        healthy[0, 1] = False
        assert torch.equal(found[name][healthy], clean[name][healthy]), name


@every_rule
def test_what_is_not_read_gets_no_gradient(rule):
    inputs = inputs_of(rule, (2, 40, 256, 64))
    of_out, of_state = (torch.zeros_like(x) for x in cotangents(inputs))
    of_out[:, :, :13] = 1
    found = results(kernel(rule), inputs, (of_out, of_state))
    for name in ("q", "k", "v", *GATES[rule]):
        assert not found[f"d_{name}"][:, :, 13:].any() and found[f"d_{name}"][:, :, :13].any(), name


@every_rule
@pytest.mark.parametrize("layout", ["tokens_first", "sliced", "expanded"])
@pytest.mark.parametrize("length", [40, 70])
def test_layout_changes_nothing(rule, layout, length):
    inputs = inputs_of(rule, (2, length, 136, 64), torch.float32, layout=layout)
    gradients = tuple(x.mT.contiguous().mT for x in cotangents(inputs))
    packed = {name: None if x is None else x.contiguous() for name, x in inputs.items()}
    found = results(kernel(rule), inputs, gradients)
    for name, x in results(kernel(rule), packed, gradients).items():
        assert torch.equal(found[name], x), name


@every_rule
def test_number_of_threads_changes_nothing(rule):
    inputs = inputs_of(rule, (3, 70, 256, 64), torch.float32)
    gradients = cotangents(inputs)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(results(kernel(rule), inputs, gradients))
    for name, x in found[0].items():
        assert torch.equal(found[1][name], x), name
