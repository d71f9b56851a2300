"""Laws of every update rule in every implementation: on a CPU, and on a GPU if there is one.

A subject is a rule in one form of its kernel:

- `scan`, token by token;
- `chunk`, many tokens at once, from 48 keys and values on: of rules that forget (of the others it is the scan);
- `square`, whose states as wide as a vector lie in registers (16 float32 or 8 float64 with AVX-512, half as many with
  AVX, a quarter without);
- `short`, the quadratic form that starts a sequence without a state.
"""

import functools
import itertools

import pytest
import torch
from support.isolated import run_isolated
from support.operator_fixtures import one_thread, poisoned_memory  # noqa: F401
from support.pairwise import looped, pairwise
from support.subjects import (
    BIT_SHAPES,
    FADING,
    LAYOUTS,
    RULES,
    WITH_KERNEL,
    at_odd_offset,
    check_accuracy,
    check_errors,
    cotangents,
    fastest_backend,
    generator_of,
    operands,
    relative_error,
    results,
    sample_inputs,
)
from torch.autograd import forward_ad

from fairseq_fwp import ops

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Sizes below, at and beyond one vector and one block of columns. Lengths that leave every remainder modulo four.
# Lengths that fill a start of the quadratic form (64 tokens for 256 by 64, 32 for 130 by 33), and beyond it.
SHAPES = {
    "scan": [
        *((2, 3, 0, 5, 7), (2, 3, 1, 5, 7), (1, 2, 2, 16, 32), (2, 2, 63, 17, 33)),
        *((2, 1, 257, 9, 35), (1, 3, 66, 40, 3)),
    ],
    "chunk": [(1, 1, 64, 64, 64), (2, 1, 35, 48, 51)],
    "square": [(2, 3, length, size, size) for length in (1, 2, 3, 64, 257) for size in (2, 4, 8, 16)],
    "short": [
        *((1, 2, length, 256, 64) for length in (*range(1, 10), 31, 40, *range(63, 68), 96, 97, 131)),
        *((2, 1, 37, 130, 70), (2, 2, 33, 64, 64), (1, 1, 64, 512, 96), (1, 1, 50, 512, 17), (2, 1, 19, 61, 300)),
        (2, 1, 70, 131, 133),
    ],
}
FEW = {
    "scan": [(2, 3, 21, 16, 17), (1, 2, 9, 7, 37)],
    "chunk": [(1, 2, 21, 48, 51)],
    "square": [(2, 3, 33, size, size) for size in (2, 4, 8, 16)],
    "short": [(2, 2, 40, 256, 64), (2, 1, 70, 136, 64)],
}
# Enough numbers for a ratio of errors, even for a single token.
ACCURATE = {
    "scan": [(1, 4, 300, 24, 40), (1, 1, 60, 40, 512)],
    "chunk": [(1, 2, 33, 256, 64), (1, 1, 20, 512, 300)],
    "square": [(8, 8, length, size, size) for length in (1, 3, 65) for size in (4, 8, 16)],
    "short": [(1, 2, 40, 256, 64), (1, 2, 131, 256, 64), (2, 1, 33, 64, 64), (1, 1, 64, 512, 96)],
}
every_rule = pytest.mark.parametrize("rule", RULES)
every_kernel = pytest.mark.parametrize("rule", WITH_KERNEL)
# The reference, and the implementation of "auto": the kernel, if the rule has one.
every_backend = looped("backend", ["reference", "fastest"])
every_form = looped("form", lambda rule: SHAPES if rule in WITH_KERNEL else ["scan"])


@pytest.fixture(autouse=True, params=["cpu", *["cuda"] * torch.cuda.is_available()])
def device(request):
    """The default device for the tensors of a test."""
    with torch.device(request.param):
        yield request.param


def with_backend(rule, backend):
    backend = fastest_backend(rule) if backend == "fastest" else backend
    return functools.partial(RULES[rule].function, backend=backend)


def fastest(rule):
    return with_backend(rule, "fastest")


@every_rule
@every_form
def test_the_kernel_equals_the_loop(rule, form, device):
    """Nothing given is changed."""
    cases = pairwise(
        lambda case: case["state"] or case["shape"][2] > 0,
        shape=SHAPES[form], state=[False, True], dtype=DTYPES[:2],
    )  # fmt: skip
    for case in cases:
        inputs = sample_inputs(rule, case["shape"], case["dtype"], state=case["state"])
        gradients = cotangents(inputs)
        given = [x for x in (*inputs.values(), *gradients) if x is not None]
        before = [x.clone() for x in given]
        expected = results(RULES[rule].reference, inputs, gradients)
        exact = 1e-13 if form in ("square", "short") and device == "cpu" else 1e-12
        tolerance = {torch.float64: exact, torch.float32: 2e-5}[case["dtype"]]
        for name, found in results(fastest(rule), inputs, gradients).items():
            assert found.shape == expected[name].shape and found.dtype == expected[name].dtype, (name, case)
            assert relative_error(found, expected[name].double()) <= tolerance, (name, case)
        assert equal(given, before), case


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=pytest.mark.slow if "product_with" in rule else ()) for rule in RULES]
)
@every_form
def test_error_is_at_most_twice_that_of_the_loop(rule, form):
    """Errors are measured against float64 on the same rounded inputs; a plain running sum would be less accurate."""
    for case in pairwise(shape=ACCURATE[form], dtype=DTYPES[1:], state=[False, True]):
        if form != "chunk" or case["dtype"] == torch.float32:
            check_accuracy(rule, **case)


def test_errors_are_judged_over_several_draws():
    """One bad draw is chance. An error in all draws is refused, in a sentence with the case and both errors."""
    truth = torch.ones(100, dtype=torch.float64)

    def check(*ratios):  # of both errors in each draw
        found = iter([truth, 1 - 0.01 * one, 1 - 0.01 * one * ratio] for ratio in ratios)
        check_errors("a rule, its shape", lambda n: [{"out": x} for x in next(found)], {})

    one = torch.ones(100)
    check(1.6)
    check(2.3, 1, 1)
    said = r"out \(100,\) in torch.float32 of a rule, its shape: error 0.021, of the reference 0.01, allowed 0.02, in 8"
    with pytest.raises(AssertionError, match=said):
        check(*[2.1] * 8)


@every_rule
@looped("state", [True, False])
def test_gradcheck(rule, state):
    inputs = sample_inputs(rule, (1, 2, 5, 3, 2), state=state)
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if x is not None}

    def function(*tensors):
        return fastest(rule)(**dict(zip(leaves, tensors, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


@every_rule
@every_form
def test_gradient_of_one_output_alone(rule, form):
    """The other output gets no gradient: autograd passes None."""
    for case in pairwise(shape=FEW[form], index=[0, 1], state=[False, True]):
        inputs = sample_inputs(rule, case["shape"], state=case["state"])
        leaves, weight = [x.requires_grad_() for x in inputs.values() if x is not None], cotangents(inputs)
        i = case["index"]
        expected, found = (
            torch.autograd.grad(function(**inputs)[i], leaves, weight[i], materialize_grads=True)
            for function in (RULES[rule].reference, fastest(rule))
        )
        torch.testing.assert_close(found, expected, msg=lambda said, case=case: f"{case}: {said}")


@every_rule
@every_backend
def test_halves_with_the_carried_state_equal_the_whole(rule, backend):
    inputs = sample_inputs(rule, (2, 2, 30, 6, 20))
    gradients = cotangents(inputs)
    function = with_backend(rule, backend)
    expected = results(function, inputs, gradients)
    for cut in (1, 13, 16, 29):

        def halves(state, cut=cut, **tokens):
            first, carried = function(**{name: x[:, :, :cut] for name, x in tokens.items()}, state=state)
            second, final = function(**{name: x[:, :, cut:] for name, x in tokens.items()}, state=carried)
            return torch.cat([first, second], 2), final

        found = results(halves, inputs, gradients)
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-12, msg=f"{name}, cut at {cut}")


def check_causality(function, inputs, other, cuts):
    """Tokens before a cut give the same results to the last bit, with any tokens after it."""
    state = inputs.pop("state")
    out = function(**inputs, state=state)[0]
    for cut in (cut for cut in cuts if cut < out.shape[2]):
        prefix = {name: x[:, :, :cut] for name, x in inputs.items()}
        assert torch.equal(function(**prefix, state=state)[0], out[:, :, :cut]), cut
        for rest in (other, {name: torch.full_like(x, float("nan")) for name, x in inputs.items()}):
            changed = {name: torch.cat([x[:, :, :cut], rest[name][:, :, cut:]], 2) for name, x in inputs.items()}
            found = function(**changed, state=state)[0]
            assert torch.equal(found[:, :, :cut], out[:, :, :cut]), cut
            assert not torch.equal(found[:, :, cut], out[:, :, cut]), cut


CAUSAL = {
    "scan": [(1, 2, 19, 16, 33)],
    "chunk": [(1, 1, 19, 48, 51)],
    "square": [(2, 3, 9, size, size) for size in (2, 4, 8, 16)],
    "short": [(2, 1, length, *sizes) for length, sizes in ((40, (256, 64)), (70, (130, 33)), (100, (64, 64)))],
}


@every_rule
@every_form
def test_causality_is_bit_exact(rule, form):
    """Of the reference, too."""
    cuts = (1, 2, 3, 5, 6, 7, 8, 9, 16, 31, 32, 33, 39, 48, 63, 64, 65, 69)
    for case in pairwise(shape=CAUSAL[form], state=[False, True], dtype=DTYPES[:2]):
        given = {"dtype": case["dtype"], "state": case["state"]}
        inputs, other = (sample_inputs(rule, case["shape"], seed=seed, **given) for seed in (0, 7))
        check_causality(fastest(rule), inputs, other, cuts)
    if form == "scan":
        inputs, other = (sample_inputs(rule, (1, 2, 9, 4, 5), torch.float32, seed=seed) for seed in (0, 7))
        check_causality(RULES[rule].reference, inputs, other, (1, 5, 8))


@every_rule
@every_form
def test_what_is_not_read_gets_no_gradient(rule, form):
    for shape in FEW[form]:
        inputs = sample_inputs(rule, shape, torch.float32, state=False)
        of_out, of_state = (torch.zeros_like(x) for x in cotangents(inputs))
        of_out[:, :, :8] = 1
        found = results(fastest(rule), inputs, (of_out, of_state))
        for name in (name for name, x in inputs.items() if x is not None):
            assert not found[f"d_{name}"][:, :, 8:].any() and found[f"d_{name}"][:, :, :8].any(), (name, shape)


@every_rule
@every_form
def test_what_is_not_finite_spreads_no_further_than_in_the_loop(rule, form):
    """Every result that is finite in the reference is finite and equal here: masking does not multiply by zero.

    Other sequences and heads are the same to the last bit.
    """
    shapes = {"scan": [(2, 3, 9, 6, 5)], "square": [(2, 3, 6, size, size) for size in (2, 4, 8, 16)]}
    shapes |= {"chunk": [(1, 2, 18, 48, 51)], "short": [(1, 2, 40, 256, 64), (2, 2, 43, 64, 64)]}
    tokens = [0, 5, 6, 38, -1] if form == "short" else [0, 3, 5]
    numbers = [float("nan"), float("inf")]
    for case in pairwise(where=["q", "k", "v", *RULES[rule].gates], token=tokens, number=numbers, shape=shapes[form]):
        inputs = sample_inputs(rule, case["shape"], state=form != "short")
        gradients = cotangents(inputs)
        clean = results(fastest(rule), inputs, gradients)
        inputs[case["where"]][0, 1, case["token"]] = case["number"]
        expected, found = (results(function, inputs, gradients) for function in (RULES[rule].reference, fastest(rule)))
        healthy = torch.ones(case["shape"][:2], dtype=torch.bool)
        healthy[0, 1] = False
        for name, truth in expected.items():
            finite = truth.isfinite()
            assert name != "out" or finite[0, 1, : case["token"]].all(), case
            torch.testing.assert_close(
                found[name][finite], truth[finite], rtol=1e-10, atol=1e-10, msg=f"{name}, {case}"
            )
            assert torch.equal(found[name][healthy], clean[name][healthy]), (name, case)


@every_rule
@every_form
def test_layout_changes_nothing(rule, form):
    """Nor does alignment. The last shape is long enough for a GPU's tensor cores in bfloat16."""
    shapes = [*FEW[form], *[(1, 2, 70, 16, 24)] * (form == "scan")]
    for case in pairwise(shape=shapes, layout=LAYOUTS, dtype=[torch.float32, torch.bfloat16], state=[False, True]):
        inputs = sample_inputs(rule, case["shape"], case["dtype"], layout=case["layout"], state=case["state"])
        # Gradients of outputs come in any layout too: the gradient of sum() is expanded from one number.
        arrange = at_odd_offset if case["layout"] == "odd" else lambda x: x.mT.contiguous().mT
        gradients = tuple(map(arrange, cotangents(inputs)))
        packed = {name: None if x is None else x.contiguous().clone() for name, x in inputs.items()}
        found = results(fastest(rule), inputs, gradients)
        for name, x in results(fastest(rule), packed, tuple(x.clone() for x in gradients)).items():
            assert torch.equal(found[name], x), (name, case)
        ones = (torch.ones(()).to(case["dtype"]).expand(gradients[0].shape), torch.ones_like(gradients[1]))
        expanded = results(fastest(rule), inputs, ones)
        for name, x in results(fastest(rule), inputs, (ones[0].contiguous(), ones[1])).items():
            assert torch.equal(expanded[name], x), (name, case)


@every_rule
@every_backend
def test_a_head_of_q_and_k_serves_several_heads_as_its_copies_do(rule, backend):
    for shape in ((2, 4, 33, 5, 7), (1, 6, 18, 64, 50)):
        copies = 2 if shape[1] == 4 else 3
        inputs = sample_inputs(rule, shape)
        shared = inputs | {name: inputs[name][:, ::copies].contiguous() for name in "qk"}
        copied = inputs | {name: shared[name].repeat_interleave(copies, 1) for name in "qk"}
        found, expected = (results(with_backend(rule, backend), x, cotangents(inputs)) for x in (shared, copied))
        for name in ("out", "state"):
            assert torch.equal(found[name], expected[name]), name
        for name in ("d_q", "d_k"):
            expected[name] = expected[name].unflatten(1, (-1, copies)).sum(2)
        torch.testing.assert_close(found, expected)


@every_rule
@every_backend
def test_states_after_some_tokens_are_those_of_the_shorter_sequences(rule, backend):
    inputs, lengths = sample_inputs(rule, (2, 2, 33, 6, 5)), (1, 20, 33)
    first = torch.zeros(2, 33, dtype=torch.bool)
    first[1, [7, 20]] = True
    function = with_backend(rule, backend)

    def ends(**given):
        parts = [{name: x if name == "state" else x[:, :, :n] for name, x in given.items()} for n in lengths]
        states = [function(**x, first=first[:, :n])[1] for x, n in zip(parts, lengths, strict=True)]
        return torch.stack(states, 2), function(**given, first=first)[0]

    def asked(**given):
        out, state, states = ops.states_after(RULES[rule].function, lengths, **given, first=first, **function.keywords)
        assert torch.equal(state, states[:, :, -1])
        return states, out

    gradients = (torch.randn(2, 2, 3, 6, 5, dtype=torch.float64), cotangents(inputs)[0])
    torch.testing.assert_close(results(asked, inputs, gradients), results(ends, inputs, gradients))


@every_rule
@every_form
def test_the_number_of_threads_changes_no_bit_of_heads_and_little_of_columns(rule, form, device):
    """Several sequences are split by sequence and head, one sequence with one head by columns of the value."""
    if device != "cpu":
        return
    shapes = {"scan": (2, 3, 66, 17, 16), "square": (2, 3, 33, 16, 16), "short": (2, 3, 70, 256, 64)}
    shapes["chunk"] = (2, 3, 40, 48, 51)
    for shape, tolerance in ((shapes[form], 0), ((1, 1, 70, 64, 64), 1e-5)):
        inputs = sample_inputs(rule, shape, torch.float32, state=form != "short")
        gradients = cotangents(inputs)
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(fastest(rule), inputs, gradients))
        for name, x in found[0].items():
            for other in found[1:]:
                torch.testing.assert_close(other[name], x, rtol=tolerance, atol=tolerance / 10, msg=f"{name}, {shape}")


@every_rule
@every_backend
def test_the_returned_state_is_new(rule, backend):
    for length in (0, 1):
        inputs = sample_inputs(rule, (1, 2, length, 16, 16), torch.float32)
        state = inputs["state"].clone()
        with torch.no_grad():
            with_backend(rule, backend)(**inputs)[1].add_(1)
        assert torch.equal(inputs["state"], state), length


# Bits.

# A split at multiples of this many tokens changes no bit: kSplit of cuda_ext/cpu/state_block.h.
SPLIT = 64


def equal(found, expected):
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@every_kernel
@looped("state", [True, False])
def test_batch_threads_and_splits_change_no_bit(rule, state, device):
    """Outputs and states on a CPU are the same for a single row, any number of threads, and splits at SPLIT."""
    if device != "cpu":  # a GPU has other threads, and its blocks depend on the batch
        return
    for shape in BIT_SHAPES:
        inputs = sample_inputs(rule, shape, torch.float32, state=state)
        function = fastest(rule)
        row = {name: None if x is None else x[1:2] for name, x in inputs.items()}
        out, final = function(**row)
        assert equal([x[1:2] for x in function(**inputs)], (out, final)), shape
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert equal(function(**row), (out, final)), (threads, shape)
        torch.set_num_threads(1)
        initial = row.pop("state")
        for cut in range(SPLIT, shape[2], SPLIT):
            before, carried = function(**{name: x[:, :, :cut] for name, x in row.items()}, state=initial)
            after, last = function(**{name: x[:, :, cut:] for name, x in row.items()}, state=carried)
            assert equal((torch.cat([before, after], 2), last), (out, final)), (cut, shape)


@every_kernel
def test_token_by_token_differs_by_rounding_alone(rule):
    for shape in BIT_SHAPES:
        inputs = sample_inputs(rule, shape, torch.float32)
        function = fastest(rule)
        state, outs = inputs["state"], []
        for t in range(shape[2]):
            token = {name: x[:, :, t : t + 1] for name, x in inputs.items() if name != "state"}
            out, state = function(**token, state=state)
            outs.append(out)
        expected, final = function(**inputs)
        for found, truth in ((torch.cat(outs, 2), expected), (state, final)):
            largest = truth.abs().amax((-2, -1), keepdim=True)
            assert ((found - truth).abs() <= 16 * torch.finfo(torch.float32).eps * largest).all(), shape


def by_documents(function, first, state, **tokens):
    """Return the results of a separate call for each document."""
    rows = []
    for row in range(len(first)):
        begins = [0, *(t for t in first[row].nonzero().flatten().tolist() if t), first.shape[1]]
        memory, outs = None if state is None or first[row, 0] else state[row : row + 1], []
        for begin, end in itertools.pairwise(begins):
            some = {name: x[row : row + 1, :, begin:end] for name, x in tokens.items()}
            out, memory = function(**some, state=memory if begin == 0 else None)
            outs.append(out)
        rows.append((torch.cat(outs, 2), memory))
    return tuple(map(torch.cat, zip(*rows, strict=True)))


@every_rule
@every_backend
@looped("state", [True, False])
def test_documents_in_one_sequence_are_sequences(rule, backend, state):
    """Tokens from a `first` token on do not depend on tokens before it, in results and in gradients."""
    inputs = sample_inputs(rule, (3, 2, 75, 5, 20), state=state)
    first = torch.zeros(3, 75, dtype=torch.bool)
    first[0, [0, 40]] = first[1, [1, 2, 33, 74]] = True
    gradients = cotangents(inputs)
    found = results(functools.partial(with_backend(rule, backend), first=first), inputs, gradients)
    expected = results(functools.partial(by_documents, RULES[rule].reference, first), inputs, gradients)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-11, atol=1e-11, msg=name)


@every_kernel
def test_documents_change_no_bit(rule, device):
    """Of a CPU: every form of the kernels, in float32."""
    for shape in BIT_SHAPES if device == "cpu" else ():
        inputs, first = sample_inputs(rule, shape, torch.float32), torch.zeros(shape[0], shape[2], dtype=torch.bool)
        first[0, [0, 64, 65, 130]] = first[1, [100, shape[2] - 1]] = True
        found = fastest(rule)(**inputs, first=first)
        assert equal(found, by_documents(fastest(rule), first, **inputs)), shape


# Long sequences, and rules that forget.


def test_rebuilt_states_are_those_of_the_forward_pass():
    """Errors of the delta rule: later writes do not correct them, so separate rounding would add up over tokens."""

    def of_length_one(inputs):
        inputs["k"] /= inputs["k"].norm(dim=-1, keepdim=True)

    check_accuracy("delta", (1, 1, 4096, 16, 16), torch.float32, of_length_one)


@pytest.mark.slow
@every_rule
@pytest.mark.parametrize("values", [16, 20])
@pytest.mark.parametrize("forgetful", [False, True], ids=["", "forgetful"])
def test_no_drift_over_32768_tokens(rule, forgetful, values):
    check_accuracy(rule, (1, 1, 32768, 16, values), torch.float32, forgetful=forgetful)


FORGETFUL = [(name, gate) for name, rule in RULES.items() for gate in rule.gates if gate in FADING]


@pytest.mark.parametrize(("rule", "gate"), FORGETFUL)
@looped("kept", [0.0, 1.0])
def test_all_or_nothing_kept(rule, gate, kept):
    """No kernel divides by a decay or takes its logarithm."""
    for shape, backend in itertools.product([(2, 2, 70, 5, 6), (1, 2, 40, 256, 64)], ["reference", "fastest"]):
        inputs = sample_inputs(rule, shape, state=shape[3] == 5)
        chosen = torch.rand(inputs[gate].shape, generator=generator_of(2)) < 0.3
        inputs[gate] = torch.where(chosen, kept, inputs[gate])
        gradients = cotangents(inputs)
        found = results(with_backend(rule, backend), inputs, gradients)
        for name, truth in results(RULES[rule].reference, inputs, gradients).items():
            assert relative_error(found[name], truth) < 1e-12, (name, shape, backend)
        # The derivative with respect to a rate of exactly 0 or 1 is that of rates close to it.
        step, changed = 1e-4, []
        for sign in (1, -1):
            moved = {**inputs, gate: inputs[gate] + sign * step * chosen}
            out, state = with_backend(rule, backend)(**moved)
            changed.append((out * gradients[0]).sum() + (state * gradients[1]).sum())
        slope = found[f"d_{gate}"][chosen].sum()
        torch.testing.assert_close((changed[0] - changed[1]) / (2 * step), slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ["decay", "gated"])
def test_gates_may_be_any_number(rule):
    for length, value in itertools.product((40, 70), (-0.5, 1.5)):
        inputs = sample_inputs(rule, (2, 2, length, 256, 64), state=False)
        for gate in RULES[rule].gates:
            inputs[gate][:, :, ::3] = value
            inputs[gate][0, 0] = min(value, 1)
        gradients = cotangents(inputs)
        expected = results(RULES[rule].reference, inputs, gradients)
        for name, found in results(fastest(rule), inputs, gradients).items():
            assert relative_error(found, expected[name]) <= 1e-13, (name, length, value)


@pytest.mark.slow
@pytest.mark.parametrize("rule", dict(FORGETFUL))
@looped("kept", [0.01, 0.999])
def test_strong_and_weak_forgetting_over_thousands_of_tokens(rule, kept):
    """0.01 to the power of a chunk is below the smallest float32."""

    def forget(inputs):
        for gate in FADING & inputs.keys():
            inputs[gate] = torch.full_like(inputs[gate], kept)

    check_accuracy(rule, (1, 1, 3000, 16, 16), torch.float32, forget)


# PyTorch.


@every_rule
def test_opcheck(rule):
    """Layouts only change strides, which the fake operator predicts."""
    for case in pairwise(layout=["contiguous", "tokens_first", "expanded"], state=[True, False]):
        inputs = sample_inputs(rule, (2, 2, 5, 3, 4), torch.float32, **case)
        given = operands(rule, inputs) or (*inputs.values(), None)
        arguments = tuple(x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x for x in given)
        operator = torch.ops.fwp.fast_weights if RULES[rule].kernel else getattr(torch.ops.fwp, f"{rule}_rule")
        whole = case["layout"] == "contiguous" and rule in ("decay", "dplr", "fwm")  # every operator and argument
        some = {} if whole else {"test_utils": ("test_schema", "test_faketensor")}
        torch.library.opcheck(operator.default, arguments, **some)


@pytest.mark.parametrize(("rule", "backend"), [*((rule, "auto") for rule in RULES), ("delta", "kernel")])
def test_compiles_into_one_graph(rule, backend):
    torch.compiler.reset()  # the functions of other rules count towards its limit of recompilations
    inputs = sample_inputs(rule, (2, 2, 10, 16, 8), torch.float32)
    gradients = cotangents(inputs)
    function = with_backend(rule, backend)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    found = results(compiled, inputs, gradients)
    for name, x in results(function, inputs, gradients).items():
        assert torch.equal(found[name], x), name


@every_rule
def test_second_derivatives(rule):
    """The operator refuses second derivatives; the reference has them."""
    inputs = {name: x.requires_grad_() for name, x in sample_inputs(rule, (1, 1, 3, 2, 2)).items()}
    leaves = tuple(inputs.values())

    def reference(*tensors):
        return RULES[rule].reference(**dict(zip(inputs, tensors, strict=True)))

    assert torch.autograd.gradgradcheck(reference, leaves)
    out, _ = fastest(rule)(**inputs)
    (gradient,) = torch.autograd.grad((out**2).sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated.*backend='reference'"):
        gradient.sum().backward()


@every_rule
def test_forward_mode_and_torch_func(rule):
    """Without an error derivatives would be zero. The reference has them."""
    inputs = sample_inputs(rule, (2, 2, 7, 5, 6))
    given = operands(rule, inputs)  # loads the kernel
    with forward_ad.dual_level():
        dual = inputs | {"v": forward_ad.make_dual(inputs["v"], torch.ones_like(inputs["v"]))}
        assert forward_ad.unpack_dual(RULES[rule].reference(**dual)[0]).tangent is not None
        with pytest.raises(NotImplementedError, match="no derivative in forward mode: use backend='reference'"):
            RULES[rule].function(**dual)
        if given:
            q, k, v, *others = given
            with pytest.raises(NotImplementedError, match="no derivative in forward mode: use backend='reference'"):
                torch.ops.fwp.fast_weights(q, k, forward_ad.make_dual(v, torch.ones_like(v)), *others)

    def loss(v, function):
        return function(**inputs | {"v": v})[0].square().sum()

    found = torch.func.grad(loss)(inputs["v"], RULES[rule].reference)
    v = inputs["v"].clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(loss(v, fastest(rule)), v)[0])
    with pytest.raises(NotImplementedError, match=r"no derivative in torch\.func: use backend='reference'"):
        torch.func.grad(loss)(inputs["v"], RULES[rule].function)


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
def test_dtypes_and_autocast(rule, backend):
    for dtype in DTYPES:
        inputs = sample_inputs(rule, (1, 2, 6, 4, 4), dtype)
        function = with_backend(rule, backend)
        out, state = function(**inputs)
        assert out.dtype == dtype
        assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        with torch.autocast(out.device.type, torch.bfloat16):
            assert equal(function(**inputs), (out, state))
        with torch.no_grad():  # as in a decoding step: the kernel is called without autograd
            assert equal(function(**inputs), (out, state))
