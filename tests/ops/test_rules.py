"""Laws that every update rule keeps, whichever implementation runs it; test_cuda.py holds them on a GPU too."""

import functools
import itertools

import pytest
import torch
from isolated import run_isolated
from rule_cases import (
    FADING,
    LAYOUTS,
    RULES,
    WITH_KERNEL,
    check_accuracy,
    cotangents,
    fastest_backend,
    generator_of,
    operands,
    relative_error,
    results,
    sample_inputs,
)
from torch.autograd import forward_ad

every_rule = pytest.mark.parametrize("rule", RULES)
every_kernel = pytest.mark.parametrize("rule", WITH_KERNEL)
# The loop, and what "auto" runs: the kernel, where the rule has one.
every_backend = pytest.mark.parametrize("backend", ["reference", "fastest"])
# Sizes below, at and beyond one vector and one block of columns, and lengths that leave every remainder modulo four.
SHAPES = [
    (2, 3, 0, 5, 7),
    (2, 3, 1, 5, 7),
    (1, 2, 2, 16, 32),
    (2, 2, 63, 17, 33),
    (1, 1, 64, 64, 64),
    (2, 1, 257, 9, 35),
    (1, 3, 66, 40, 3),
]


def with_backend(rule, backend):
    backend = fastest_backend(rule) if backend == "fastest" else backend
    return functools.partial(RULES[rule].function, backend=backend)


@every_rule
@every_backend
@pytest.mark.parametrize("state", [True, False])
def test_gradcheck(rule, backend, state):
    inputs = sample_inputs(rule, (2, 2, 6, 3, 5), state=state)
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if x is not None}

    def function(*tensors):
        return with_backend(rule, backend)(**dict(zip(leaves, tensors, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@every_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("state", [True, False], ids=["state", "no_state"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_kernel_equals_reference(rule, shape, state, dtype):
    inputs = sample_inputs(rule, shape, dtype, state=state or shape[2] == 0)
    gradients = cotangents(inputs)
    expected = results(RULES[rule].reference, inputs, gradients)
    found = results(with_backend(rule, "fastest"), inputs, gradients)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for name, truth in expected.items():
        assert found[name].shape == truth.shape and found[name].dtype == truth.dtype, name
        assert relative_error(found[name], truth.double()) <= tolerance, name


@every_rule
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 21, 16, 16), (1, 2, 9, 7, 37)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_layout_changes_nothing(rule, layout, shape, dtype):
    inputs = sample_inputs(rule, shape, dtype, layout=layout)
    # The cotangents come in any layout as well: the gradient of sum() is expanded from one number.
    gradients = tuple(x.mT.contiguous().mT for x in cotangents(inputs))
    packed = {name: x.contiguous() for name, x in inputs.items()}
    function = with_backend(rule, "fastest")
    found = results(function, inputs, gradients)
    for name, x in results(function, packed, gradients).items():
        assert torch.equal(found[name], x), name
    ones = (torch.ones(()).to(dtype).expand(gradients[0].shape), torch.ones_like(gradients[1]))
    for name, x in results(function, inputs, (ones[0].contiguous(), ones[1])).items():
        assert torch.equal(results(function, inputs, ones)[name], x), name


@every_rule
@pytest.mark.parametrize("state", [True, False], ids=["state", "no_state"])
def test_gradient_of_one_output_alone(rule, state):
    """No gradient reaches the other output then, and autograd passes none."""
    inputs = {
        name: None if x is None else x.requires_grad_()
        for name, x in sample_inputs(rule, (2, 2, 7, 5, 6), state=state).items()
    }
    leaves = [x for x in inputs.values() if x is not None]
    for index in (0, 1):
        weight = cotangents(inputs)[index]
        expected, found = (
            torch.autograd.grad(with_backend(rule, b)(**inputs)[index], leaves, weight, allow_unused=True)
            for b in ("reference", "fastest")
        )
        for name, x, truth in zip(inputs, found, expected, strict=False):
            torch.testing.assert_close(x, torch.zeros_like(x) if truth is None else truth, msg=name)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernel_is_as_accurate_as_the_reference(rule, dtype):
    """Error against float64, on the same rounded inputs, at most twice that of the reference in the same precision."""
    check_accuracy(rule, sample_inputs(rule, (1, 4, 300, 24, 40), dtype))


@every_kernel
@pytest.mark.parametrize("shape", [(2, 2, 33, 256, 64), (2, 2, 20, 512, 300), (2, 2, 60, 40, 512)], ids=str)
@pytest.mark.parametrize("state", [True, False], ids=["state", "no_state"])
def test_sums_over_hundreds_of_rows_are_as_accurate(rule, shape, state):
    """One running sum over the rows of a large state would be several times less accurate than a matrix product."""
    check_accuracy(rule, sample_inputs(rule, shape, torch.float32, state=state))


@every_rule
@pytest.mark.parametrize("values", [16, 20])
@pytest.mark.parametrize("forgetful", [False, True], ids=["", "forgetful"])
def test_no_drift_over_4096_tokens(rule, forgetful, values):
    check_accuracy(rule, sample_inputs(rule, (1, 1, 4096, 16, values), torch.float32, forgetful=forgetful))


@pytest.mark.slow
@every_rule
@pytest.mark.parametrize("values", [16, 20])
@pytest.mark.parametrize("forgetful", [False, True], ids=["", "forgetful"])
def test_no_drift_over_32768_tokens(rule, forgetful, values):
    check_accuracy(rule, sample_inputs(rule, (1, 1, 32768, 16, values), torch.float32, forgetful=forgetful))


@every_rule
@every_backend
@pytest.mark.parametrize("cut", [1, 13, 16, 29])
def test_halves_with_the_carried_state_equal_the_whole(rule, backend, cut):
    inputs = sample_inputs(rule, (2, 2, 30, 6, 20))
    gradients = cotangents(inputs)
    function = with_backend(rule, backend)

    def halves(state, **tokens):
        first, carried = function(**{name: x[:, :, :cut] for name, x in tokens.items()}, state=state)
        second, final = function(**{name: x[:, :, cut:] for name, x in tokens.items()}, state=carried)
        return torch.cat([first, second], 2), final

    found = results(halves, inputs, gradients)
    for name, x in results(function, inputs, gradients).items():
        torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-12, msg=name)


@every_rule
@every_backend
@pytest.mark.parametrize("cut", [1, 6, 7, 8, 9])
def test_causality_is_bit_exact(rule, backend, cut):
    function = with_backend(rule, backend)
    inputs = sample_inputs(rule, (1, 2, 19, 16, 33), torch.float32)
    other = sample_inputs(rule, (1, 2, 19, 16, 33), torch.float32, seed=7)
    state = inputs.pop("state")
    changed = {name: torch.cat([x[:, :, :cut], other[name][:, :, cut:]], 2) for name, x in inputs.items()}
    prefix = {name: x[:, :, :cut] for name, x in inputs.items()}
    out = function(**inputs, state=state)[0]
    assert torch.equal(function(**changed, state=state)[0][:, :, :cut], out[:, :, :cut])
    assert torch.equal(function(**prefix, state=state)[0], out[:, :, :cut])
    assert not torch.equal(function(**changed, state=state)[0][:, :, cut], out[:, :, cut])
    # Backwards: what is not read before the cut gets no gradient at all.
    gradient = torch.zeros_like(out)
    gradient[:, :, :cut] = 1
    found = results(function, {**inputs, "state": state}, (gradient, torch.zeros_like(state)))
    for name in inputs:
        assert not found[f"d_{name}"][:, :, cut:].any(), name


@every_backend
def test_read_after_write(backend):
    """By hand: k_1 = (1, 0) writes (2, 4); k_2 = (1, 1) writes (1, 3), of which the delta rule corrects half.

    The rules that forget start from a memory of ones.
    """
    q = torch.tensor([[[[1.0, 0.0], [2.0, 1.0]]]])
    k = torch.tensor([[[[1.0, 0.0], [1.0, 1.0]]]])
    v = torch.tensor([[[[2.0, 4.0], [1.0, 3.0]]]])
    beta = torch.tensor([[[1.0, 0.5]]])
    # Sum: W_1 = [[2, 4], [0, 0]], W_2 = [[3, 7], [1, 3]].
    out, state = with_backend("sum", backend)(q, k, v)
    assert out.tolist() == [[[[2, 4], [7, 17]]]] and state.tolist() == [[[[3, 7], [1, 3]]]]
    # Delta: W_1 the same; k_2 W_1 = (2, 4), so k_2 writes 0.5 ((1, 3) - (2, 4)) = (-0.5, -0.5).
    out, state = with_backend("delta", backend)(q, k, v, beta)
    assert out.tolist() == [[[[2, 4], [2.5, 6.5]]]] and state.tolist() == [[[[1.5, 3.5], [-0.5, -0.5]]]]
    # Gated: W_1 = 0.5 (1 + [[2, 4], [0, 0]]) = [[1.5, 2.5], [0.5, 0.5]], W_2 = 0.25 W_1 + 0.75 [[1, 3], [1, 3]].
    ones = torch.ones(1, 1, 2, 2)
    out, state = with_backend("gated", backend)(q, k, v, torch.tensor([[[0.5, 0.25]]]), ones)
    assert state.tolist() == [[[[1.125, 2.875], [0.875, 2.375]]]] and out.tolist() == [[[[1.5, 2.5], [3.125, 8.125]]]]
    # Decay: W_1 = [[0.125, 0.25], [0.5, 1]] + [[2, 4], [0, 0]], W_2 = [[0, 0], [0.25 0.5, 0.25 1]] + [[1, 3], [1, 3]].
    of_keys, of_values = torch.tensor([[[[0.25, 1.0], [0.0, 0.5]]]]), torch.tensor([[[[0.5, 1.0], [0.5, 0.5]]]])
    out, state = with_backend("decay", backend)(q, k, v, of_keys, of_values, ones)
    assert state.tolist() == [[[[1, 3], [1.125, 3.25]]]] and out.tolist() == [[[[2.125, 4.25], [3.125, 9.25]]]]


@every_backend
def test_unrelated_associations(backend):
    """A new value under k_2 leaves that under an orthogonal k_1 to the delta rule, but a share of it to the gated one.

    Schlag, Irie & Schmidhuber 2021 (arXiv 2102.11174), Appendix B.
    """
    generator = generator_of(0)
    k_1, k_2, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
    v_1, v_2, v_3 = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    memory = torch.outer(k_1, v_1) + torch.outer(k_2, v_2)
    beta = torch.tensor([[[0.25]]], dtype=torch.float64)
    write = (k_2[None, None, None], k_2[None, None, None], v_3[None, None, None])
    for rule, rate, of_unrelated in (("delta", beta, 1), ("gated", 1 - beta, 0.75)):
        out, state = with_backend(rule, backend)(*write, rate, memory[None, None])
        torch.testing.assert_close(out[0, 0, 0], 0.75 * v_2 + 0.25 * v_3)
        torch.testing.assert_close(k_1 @ state[0, 0], of_unrelated * v_1)


FORGETFUL = [(name, gate) for name, rule in RULES.items() for gate in rule.gates if gate in FADING]


@pytest.mark.parametrize(("rule", "gate"), FORGETFUL)
@every_backend
@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_all_or_nothing_kept(rule, gate, backend, kept):
    """Nothing divides by what is kept, and nothing takes its logarithm."""
    inputs = sample_inputs(rule, (2, 2, 70, 5, 6))
    inputs[gate] = torch.where(torch.rand(inputs[gate].shape, generator=generator_of(2)) < 0.3, kept, inputs[gate])
    assert (inputs[gate] == kept).any()
    gradients = cotangents(inputs)
    found = results(with_backend(rule, backend), inputs, gradients)
    for name, truth in results(RULES[rule].reference, inputs, gradients).items():
        assert relative_error(found[name], truth) < 1e-12, name
    # The derivative with respect to a rate of exactly 0 or 1 is that of its neighbours.
    step = 1e-4
    changed = []
    for sign in (1, -1):
        out, state = with_backend(rule, backend)(
            **{**inputs, gate: inputs[gate] + sign * step * (inputs[gate] == kept)}
        )
        changed.append((out * gradients[0]).sum() + (state * gradients[1]).sum())
    slope = found[f"d_{gate}"][inputs[gate] == kept].sum()
    torch.testing.assert_close((changed[0] - changed[1]) / (2 * step), slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", dict(FORGETFUL))
@pytest.mark.parametrize("kept", [0.01, 0.999])
def test_strong_and_weak_forgetting_over_thousands_of_tokens(rule, kept):
    """0.01 to the power of a chunk is below the smallest float32."""
    inputs = sample_inputs(rule, (1, 1, 3000, 16, 16), torch.float32)
    for gate in FADING & {*RULES[rule].gates}:
        inputs[gate] = torch.full_like(inputs[gate], kept)
    check_accuracy(rule, inputs)


@every_rule
@every_backend
def test_nothing_given_is_changed(rule, backend):
    inputs = sample_inputs(rule, (2, 2, 11, 16, 16), torch.float32)
    gradients = cotangents(inputs)
    before = {name: x.clone() for name, x in inputs.items()}
    of_before = tuple(x.clone() for x in gradients)
    results(with_backend(rule, backend), inputs, gradients)
    for name, x in inputs.items():
        assert torch.equal(x, before[name]), name
    assert all(torch.equal(x, y) for x, y in zip(gradients, of_before, strict=True))


@every_rule
@every_backend
@pytest.mark.parametrize("length", [0, 1])
def test_the_returned_state_is_new(rule, backend, length):
    inputs = sample_inputs(rule, (1, 2, length, 16, 16), torch.float32)
    state = inputs["state"].clone()
    with torch.no_grad():
        with_backend(rule, backend)(**inputs)[1].add_(1)
    assert torch.equal(inputs["state"], state)


@every_rule
@pytest.mark.parametrize("where", ["k", "v"])
def test_nan_stays_in_its_sequence_and_head(rule, where):
    inputs = sample_inputs(rule, (2, 3, 9, 16, 16), torch.float32)
    gradients = cotangents(inputs)
    function = with_backend(rule, "fastest")
    clean = results(function, inputs, gradients)
    inputs[where][1, 1, 4] = float("nan")
    spoilt = results(function, inputs, gradients)
    healthy = torch.ones(2, 3, dtype=torch.bool)
    healthy[1, 1] = False
    for name, x in clean.items():
        assert torch.equal(spoilt[name][healthy], x[healthy]), name
    assert spoilt["out"][1, 1, 4:].isnan().all() and not spoilt["out"][1, 1, :4].isnan().any()


# Tokens at multiples of which a split changes no bit: kSplit of cuda_ext/cpu/state_block.h.
SPLIT = 64
# Where states lie in registers, where sequences begin in the quadratic form, and neither.
BIT_SHAPES = [(3, 2, 200, 16, 16), (2, 2, 150, 64, 64), (2, 1, 140, 256, 64), (2, 1, 150, 17, 33), (3, 1, 200, 40, 3)]


def equal(found, expected):
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@every_kernel
@pytest.mark.parametrize("shape", BIT_SHAPES, ids=str)
@pytest.mark.parametrize("state", [True, False], ids=["state", "no_state"])
def test_batch_threads_and_splits_change_no_bit(rule, shape, state):
    """Outputs and states on a CPU: of a row by itself, by any number of threads, and split at multiples of SPLIT."""
    inputs = sample_inputs(rule, shape, torch.float32, state=state)
    function = with_backend(rule, "fastest")
    row = {name: None if x is None else x[1:2] for name, x in inputs.items()}
    out, final = function(**row)
    assert equal([x[1:2] for x in function(**inputs)], (out, final))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert equal(function(**row), (out, final)), threads
    torch.set_num_threads(1)
    initial = row.pop("state")
    for cut in range(SPLIT, shape[2], SPLIT):
        before, carried = function(**{name: x[:, :, :cut] for name, x in row.items()}, state=initial)
        after, last = function(**{name: x[:, :, cut:] for name, x in row.items()}, state=carried)
        assert equal((torch.cat([before, after], 2), last), (out, final)), cut


@every_kernel
@pytest.mark.parametrize("shape", BIT_SHAPES, ids=str)
def test_token_by_token_differs_by_rounding_alone(rule, shape):
    inputs = sample_inputs(rule, shape, torch.float32)
    function = with_backend(rule, "fastest")
    state, outs = inputs["state"], []
    for t in range(shape[2]):
        out, state = function(
            **{name: x[:, :, t : t + 1] for name, x in inputs.items() if name != "state"}, state=state
        )
        outs.append(out)
    expected, final = function(**inputs)
    for found, truth in ((torch.cat(outs, 2), expected), (state, final)):
        largest = truth.abs().amax((-2, -1), keepdim=True)
        assert ((found - truth).abs() <= 16 * torch.finfo(torch.float32).eps * largest).all()


@every_rule
@every_backend
@pytest.mark.parametrize("state", [True, False], ids=["state", "no_state"])
def test_documents_in_one_sequence_are_sequences(rule, backend, state):
    """What follows a first token knows nothing of what is before it, in results and in gradients."""
    inputs = sample_inputs(rule, (3, 2, 75, 5, 20), state=state)
    first = torch.zeros(3, 75, dtype=torch.bool)
    first[0, [0, 40]] = first[1, [1, 2, 33, 74]] = True
    gradients = cotangents(inputs)
    found = results(functools.partial(with_backend(rule, backend), first=first), inputs, gradients)

    def documents(state, **tokens):
        outs, states = [], []
        for row in range(3):
            begins = [0, *(t for t in first[row].nonzero().flatten().tolist() if t), 75]
            memory = None if state is None or first[row, 0] else state[row : row + 1]
            parts = []
            for begin, end in itertools.pairwise(begins):
                some = {name: x[row : row + 1, :, begin:end] for name, x in tokens.items()}
                part, memory = RULES[rule].reference(**some, state=memory if begin == 0 else None)
                parts.append(part)
            outs.append(torch.cat(parts, 2))
            states.append(memory)
        return torch.cat(outs), torch.cat(states)

    for name, x in results(documents, inputs, gradients).items():
        torch.testing.assert_close(found[name], x, rtol=1e-11, atol=1e-11, msg=name)


@every_rule
@pytest.mark.parametrize("shape", [(1, 1, 70, 64, 64), (2, 3, 300, 16, 16)], ids=str)
def test_number_of_threads_changes_nothing(rule, shape):
    """One sequence of one head is split by columns of the value, several by sequence and head."""
    inputs = sample_inputs(rule, shape, torch.float32)
    gradients = cotangents(inputs)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(results(with_backend(rule, "fastest"), inputs, gradients))
    for other in found[1:]:
        for name, x in found[0].items():
            torch.testing.assert_close(other[name], x, rtol=1e-5, atol=1e-6, msg=name)


@every_rule
@pytest.mark.parametrize("layout", ["contiguous", "tokens_first", "expanded"])
@pytest.mark.parametrize("state", [True, False], ids=["state", "no_state"])
def test_opcheck(rule, layout, state):
    inputs = sample_inputs(rule, (2, 2, 5, 3, 4), torch.float32, layout=layout, state=state)
    given = operands(rule, inputs) or (*inputs.values(), None)
    arguments = tuple(x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x for x in given)
    operator = torch.ops.fwp.fast_weights if RULES[rule].kernel else getattr(torch.ops.fwp, f"{rule}_rule")
    torch.library.opcheck(operator.default, arguments)


@every_rule
@pytest.mark.parametrize("backend", ["auto", "fastest"])
def test_compiles_into_one_graph(rule, backend):
    torch.compiler.reset()  # the functions of the other rules count against its limit of recompilations
    inputs = sample_inputs(rule, (2, 2, 10, 16, 8), torch.float32)
    gradients = cotangents(inputs)
    function = with_backend(rule, backend)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    found = results(compiled, inputs, gradients)
    for name, x in results(function, inputs, gradients).items():
        assert torch.equal(found[name], x), name


@every_rule
def test_second_derivatives(rule):
    """The operator refuses them; the reference gives them."""
    inputs = {name: x.requires_grad_() for name, x in sample_inputs(rule, (1, 1, 3, 2, 2)).items()}
    leaves = tuple(inputs.values())

    def reference(*tensors):
        return RULES[rule].reference(**dict(zip(inputs, tensors, strict=True)))

    assert torch.autograd.gradgradcheck(reference, leaves)
    out, _ = with_backend(rule, "fastest")(**inputs)
    (gradient,) = torch.autograd.grad((out**2).sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated.*backend='reference'"):
        gradient.sum().backward()


@every_rule
def test_derivatives_in_forward_mode(rule):
    """Silence would be a derivative of zero. The reference has them."""
    inputs = sample_inputs(rule, (2, 2, 7, 5, 6))
    with forward_ad.dual_level():
        dual = inputs | {"v": forward_ad.make_dual(inputs["v"], torch.ones_like(inputs["v"]))}
        assert forward_ad.unpack_dual(RULES[rule].reference(**dual)[0]).tangent is not None
        with pytest.raises(NotImplementedError, match="no derivative in forward mode: use backend='reference'"):
            RULES[rule].function(**dual)


def test_derivatives_in_forward_mode_before_anything_is_loaded():
    script = """
import torch
from fairseq_fwp import ops
x = torch.rand(1, 1, 3, 4)
try:
    print(torch.func.jvp(lambda v: ops.sum_rule(x, x, v)[0], (x,), (x,)))
except NotImplementedError as error:
    print(error)
"""
    assert "no derivative in forward mode" in run_isolated(script).stdout


@every_rule
@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_autocast(rule, backend, dtype):
    inputs = sample_inputs(rule, (1, 2, 6, 4, 4), dtype)
    function = with_backend(rule, backend)
    out, state = function(**inputs)
    assert out.dtype == dtype
    assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    with torch.autocast(out.device.type, torch.bfloat16):
        under_autocast = function(**inputs)
    assert torch.equal(under_autocast[0], out) and torch.equal(under_autocast[1], state)


@every_kernel
def test_backends_without_gradients_agree(rule):
    """Without gradients the kernel is called past autograd: the decoding step."""
    inputs = sample_inputs(rule, (3, 2, 1, 16, 32), torch.float32)
    with torch.no_grad():
        expected, found, direct = (RULES[rule].function(**inputs, backend=b) for b in ("reference", "kernel", "auto"))
    for x, y, z in zip(expected, found, direct, strict=True):
        torch.testing.assert_close(y, x)
        assert torch.equal(y, z)
