"""The CUDA kernels' logic on the CPU, with the emulator: everything except speed and a GPU's memory model."""

from functools import partial

import pytest
import torch
from emulator import CHUNK, RULES, EmulatorError, prepare
from operator_cases import CASES, ONE_OF_A_FORM, as_double, cotangents_of, make_case, make_combination, reference
from support.pairwise import looped
from support.subjects import COMBINATIONS, at_odd_offset, check_errors, relative_error
from test_cuda import CHUNK_SHAPES, MEMORY

from fairseq_fwp.kernel_checks import LONG
from fairseq_fwp.ops.fast_weights import segments_of

every_rule = pytest.mark.parametrize("rule", CASES)


def some_fast(*fast, among=CASES):
    """Run a test for all these rules; those that are not named only at night."""
    return [pytest.param(rule, marks=() if rule in fast else pytest.mark.slow) for rule in among]


# Sizes below, at and beyond a thread's rows, a warp's, a slab of columns, a buffer of tokens and a chunk. The last
# three have more rows, one way or the other, than the ordinary tiles can hold.
SHAPES = [
    (2, 3, 0, 5, 7),
    (2, 3, 1, 5, 7),
    (1, 2, 2, 16, 32),
    (2, 2, 63, 17, 33),
    (1, 1, 64, 64, 64),
    (2, 1, 131, 9, 35),
    (3, 3, 33, 1, 3),
    (1, 1, 37, 128, 24),
    (1, 1, 5, 70, 20),
    (1, 1, 5, 300, 20),
    (1, 1, 5, 20, 300),
    (1, 1, 3, 512, 128),
]
HOPPER = 227  # KiB of shared memory that a block has on an H100


def of_gates(dtype):
    """Return the floors of gates in float32, whose gradients are as exact as those in `dtype`."""
    return dict.fromkeys(("d_decay", "d_value_decay", "d_rate", "d_removal_key", "d_removal"), torch.finfo(dtype).eps)


OF_GATES = of_gates(torch.bfloat16)
# Few heads and long enough for segments. At night, also wide values, whose columns take several blocks.
SEGMENTED = [(rule, (1, 1, 2060, 20, 33), True) for rule in ("sum", "gla")]
AT_NIGHT = [
    (rule, *case)
    for rule in CASES
    for case in (
        *(((1, 1, 2060, 20, 33), True), ((1, 2, 2300, 16, 16), False), ((1, 1, 2100, 16, 256), True)),
        *(((1, 1, 2060, 64, 48), False), ((1, 1, 2060, 128, 32), True)),
    )
]
SEGMENTED += [pytest.param(*case, marks=pytest.mark.slow) for case in AT_NIGHT if case not in SEGMENTED]
# Three sequences, without segments and with them. Many heads have none, in no batch.
BATCHES = [(rule, (3, 2, 300, 16, 33)) for rule in CASES]
BATCHES += [("sum", (3, 22, 1030, 16, 16)), ("delta", (3, 1, 2060, 16, 33))]
BATCHES += [
    pytest.param(rule, shape, marks=pytest.mark.slow)
    for rule in CASES
    for shape in ((3, 1, 2060, 16, 33), (3, 16, 2060, 16, 16))
    if (rule, shape) not in BATCHES
]
UNIT = {torch.float64: 1e-14, torch.float32: 5e-6}


def check_other_orders_and_gpus(emulator, given, erases, gradients, found):
    """Check that results are equal to `found` with threads in reverse, and on a GPU of one multiprocessor."""
    for how in ({"reverse": 1}, {"multiprocessors": 1}, {"multiprocessors": 1, "reverse": 1}):
        other = emulator.results(given, erases, gradients, shared_kib=HOPPER, **how)
        for name, x in found.items():
            assert torch.equal(other[name], x), name


def check_absent_gradients(emulator, given, erases):
    """A missing gradient of the outputs counts as zeros."""
    gradients, results = cotangents_of(given), emulator.forward(given, erases)
    for index in (0, 1):
        absent = tuple(None if i == index else x for i, x in enumerate(gradients))
        zeros = tuple(torch.zeros_like(x) if i == index else x for i, x in enumerate(gradients))
        expected = emulator.backward(given, erases, results, zeros)
        for name, x in emulator.backward(given, erases, results, absent).items():
            assert torch.equal(x, expected[name]), name


@every_rule
@pytest.mark.parametrize("dtype, state", [(torch.float64, True), (torch.float32, False)], ids=str)
def test_equals_reference_in_both_orders_of_threads_and_on_any_gpu(emulator, rule, dtype, state):
    """Plans for one multiprocessor have wide tiles and slabs and many heads a block; for 132 they have few."""
    for shape in SHAPES:
        check_equal(emulator, rule, shape, dtype, state)


def check_equal(emulator, rule, shape, dtype, state):
    given, erases = make_case(rule, shape, dtype, state=state or shape[2] == 0)
    gradients = cotangents_of(given)
    truth = reference(as_double(given), erases, [x.double() for x in gradients])
    found = emulator.results(given, erases, gradients, shared_kib=HOPPER)
    for name, x in truth.items():
        assert found[name].shape == x.shape and found[name].isfinite().all(), name
        assert relative_error(found[name], x) < UNIT[dtype], name
    check_other_orders_and_gpus(emulator, given, erases, gradients, found)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_what_no_rule_needs_equals_the_reference(emulator, name):
    given, erases = make_combination(name, (2, 3, 45, 9, 12), torch.float64)
    gradients = cotangents_of(given)
    found = emulator.results(given, erases, gradients)
    for which, x in reference(given, erases, gradients).items():
        assert relative_error(found[which], x) < 1e-13, which


@every_rule
def test_documents_in_one_sequence(emulator, rule):
    """A document does not depend on earlier tokens, and gives them no gradient."""
    for state in [True, False]:
        given, erases = make_case(rule, (3, 2, 75, 9, 12), torch.float64, state=state)
        given["first"] = torch.rand(3, 75) < 0.05
        given["first"][0, [0, 32, 33, 74]], given["first"][1] = True, False
        gradients = cotangents_of(given)
        found = emulator.results(given, erases, gradients)
        for name, x in reference(given, erases, gradients).items():
            assert relative_error(found[name], x) < 1e-13, name
        check_other_orders_and_gpus(emulator, given, erases, gradients, found)


def check_accuracy(emulator, rule, shape, dtype, change=lambda given: None, floors=None, **options):
    """Check errors as on the CPU; return arguments and results of the first draw. `change` changes the arguments."""
    drawn = []

    def draw(n):
        given, erases = make_case(rule, shape, dtype, seed=2 * n, **options)
        change(given)
        gradients = cotangents_of(given, 2 * n + 1)
        truth = reference(as_double(given), erases, [x.double() for x in gradients])
        found = emulator.results(given, erases, gradients, shared_kib=HOPPER)
        drawn.append((given, erases, gradients, found))
        return truth, reference(given, erases, gradients), found

    check_errors(f"{rule}, {shape}, {dtype}, {options}", draw, floors or {})
    return drawn[0]


@every_rule
def test_as_accurate_as_the_reference(emulator, rule):
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        floors = {} if dtype == torch.float32 or rule not in ("gated", "rwkv7") else of_gates(dtype)
        check_accuracy(emulator, rule, (1, 2, 130, 24, 40), dtype, floors=floors)


@pytest.mark.parametrize("rule", some_fast(*ONE_OF_A_FORM))
def test_chunks_on_tensor_cores(emulator, rule):
    """In bfloat16, with rows of whole 16-byte pieces and without, the state and its gradient are exact."""
    shapes = [(1, 2, 70, 16, 16), (2, 1, 95, 64, 40), (1, 1, 77, 128, 33), (1, 1, 300, 100, 17)]
    for shape, state in zip(shapes, [True, False] * 2, strict=True):
        options = {"floors": OF_GATES, "state": state, "layout": "tokens_first"}
        drawn = check_accuracy(emulator, rule, shape, torch.bfloat16, **options)
        check_other_orders_and_gpus(emulator, *drawn)
        check_absent_gradients(emulator, *drawn[:2])


@pytest.mark.parametrize("rule", some_fast("delta", "gla", "decay", "gdn2_by_key"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_chunks_of_numbers_in_three_parts(emulator, rule, dtype):
    """All rules, with decays by key, by head, or none, and with documents."""

    def begin(given):
        given["first"] = torch.rand(shape[0], shape[2]) < 3 / shape[2]
        given["first"][0, [0, 32, 33]] = True

    for shape, state in [((2, 1, 95, 24, 40), True), ((1, 1, 130, 64, 17), False)]:
        drawn = check_accuracy(emulator, rule, shape, dtype, begin, of_gates(dtype), state=state)
        in_chunks = emulator.workspace_bytes(prepare(*drawn[:2])[0], shape, dtype, False, shared_kib=HOPPER) > 0
        assert in_chunks
        check_other_orders_and_gpus(emulator, *drawn)
        check_absent_gradients(emulator, *drawn[:2])


def remember(rule, given):
    """Let what was written long ago still matter, across several segments."""
    if "delta" in rule:
        given["rate"] = (0.02 * torch.rand(given["rate"].shape)).bfloat16()
    if "decay" in given:
        given["decay"] = 1 - 0.001 * torch.rand(given["decay"].shape)


@pytest.mark.parametrize(("rule", "shape", "state"), SEGMENTED, ids=str)
def test_segments_side_by_side(emulator, rule, shape, state):
    """Few long sequences."""
    change = partial(remember, rule)
    drawn = check_accuracy(emulator, rule, shape, torch.bfloat16, change, OF_GATES, state=state)
    assert segments_of(*shape[1:3]) == 4
    check_other_orders_and_gpus(emulator, *drawn)
    check_absent_gradients(emulator, *drawn[:2])


@pytest.mark.parametrize(("rule", "shape"), BATCHES, ids=str)
def test_other_sequences_change_no_bit(emulator, rule, shape):
    """Nor do blocks that share a head's columns, or teams its chunks: a GPU with few heads has more of both."""
    given, erases = make_case(rule, shape, torch.bfloat16)
    gradients = cotangents_of(given)
    whole = emulator.results(given, erases, gradients)
    alone = {name: x[1:2] for name, x in given.items()}
    for multiprocessors in (1, 132):
        own = tuple(x[1:2] for x in gradients)
        for name, x in emulator.results(alone, erases, own, multiprocessors=multiprocessors).items():
            assert torch.equal(x, whole[name][1:2]), (name, multiprocessors)


@every_rule
def test_other_sequences_change_no_output_of_a_scan(emulator, rule):
    """On one multiprocessor, four sequences have wider tiles than one."""
    given, erases = make_case(rule, (4, 2, 40, 16, 33), torch.float32)
    whole = emulator.forward(given, erases, multiprocessors=1)
    alone = emulator.forward({name: x[1:2] for name, x in given.items()}, erases, multiprocessors=1)
    for name, x in alone.items():
        assert torch.equal(x, whole[name][1:2]), name


@pytest.mark.parametrize("rule", some_fast("sum", "delta", "gated_delta_by_key", among=CASES))
def test_the_backward_pass_reads_what_segments_have_left(emulator, rule):
    """Transitions that are not one. The start states only if no other states are kept. ``decay`` has no segments."""
    given, erases = make_case(rule, (1, 1, 2060, 16, 16), torch.bfloat16)
    if given["q"].dtype != torch.bfloat16:
        pytest.skip("float32 has no segments")
    results, gradients = emulator.forward(given, erases), cotangents_of(given)
    read = {"states": rule in ("sum", "delta"), "transitions": rule not in ("sum", "decay")}
    for part, columns in (("states", slice(16)), ("transitions", slice(16, None))):
        spoilt = results["segments"].clone()
        spoilt[..., columns, :] = torch.nan
        found = emulator.backward(given, erases, results | {"segments": spoilt}, gradients)
        assert any(x.isnan().any() for x in found.values()) == read[part], part


def test_long_cases_of_a_gpu_run_in_segments():
    """Those of its tests and of the check before the first use, with narrow, ordinary and wide keys."""
    of_check = [tuple(size[name] for name in ("B", "H", "L", "Dk", "Dv")) for size in LONG]
    found = {shape[3:] for shape in (*CHUNK_SHAPES, *of_check) if segments_of(*shape[1:3])}
    assert found == {(16, 16), (16, 160), (64, 64), (128, 128)}


# Shapes, and decays from those given and random numbers: close to 1 in float32, which bfloat16 would round to 1, with
# rates in float32; in bfloat16, where an error of their products would add up over the chunks; nothing kept, and all.
DECAYS = {
    "float32": ((1, 2, 300, 64, 40), lambda decay, x: 1 - 0.01 * x),
    "long memory": ((1, 1, 900, 20, 24), lambda decay, x: (1 - 0.004 * x).bfloat16()),
    "nothing": ((1, 2, 95, 24, 40), lambda decay, x: torch.where(x < 0.3, 0.0, decay)),
    "all": ((1, 2, 95, 24, 40), lambda decay, x: torch.where(x < 0.3, 1.0, decay)),
}


@pytest.mark.parametrize("rule", ["gla", "gla_by_key", "gated_delta", "gated_delta_by_key", "decay", "dplr_by_key"])
@pytest.mark.parametrize("kind", DECAYS)
def test_decays_in_chunks(emulator, rule, kind):
    """The gradients of gates in float32 are as exact as bfloat16."""
    shape, of = DECAYS[kind]

    def change(given):
        for name in ("decay", "value_decay"):
            if name in given:
                given[name] = of(given[name], torch.rand(given[name].shape))
        if kind == "float32" and rule not in ("decay", "dplr_by_key"):  # these have no rates
            given["rate"] = torch.rand(shape[:3])

    check_accuracy(emulator, rule, shape, torch.bfloat16, change, OF_GATES if kind == "float32" else None)


@pytest.mark.parametrize("rule", some_fast(*ONE_OF_A_FORM))
@pytest.mark.parametrize(
    "shape", [(2, 2, 165, 24, 40), pytest.param((1, 1, 2100, 16, 16), marks=pytest.mark.slow)], ids=str
)
def test_documents_in_chunks(emulator, rule, shape):
    """One may begin at any token of a chunk. A rule without decays gets decays of one, as in ``fast_weights``."""

    def begin(given):
        of_decay = given["decay"].shape if "decay" in given else shape[:3]
        given["decay"] = (1 - 0.05 * torch.rand(of_decay) * ("decay" in given)).to(given["q"].dtype)
        given["first"] = torch.rand(shape[0], shape[2]) < 2 / shape[2]
        given["first"][0, [0, 32, 33, 63, 90]] = True

    given, *_, found = drawn = check_accuracy(emulator, rule, shape, torch.bfloat16, begin, OF_GATES)
    check_other_orders_and_gpus(emulator, *drawn)
    assert not found["d_decay"].transpose(0, 1)[:, given["first"]].any()


@every_rule
def test_sums_over_hundreds_of_rows_are_as_accurate(emulator, rule):
    for shape in [(2, 4, 12, 512, 24), (2, 4, 12, 24, 512)]:
        check_accuracy(emulator, rule, shape, torch.float32)


FADING = [rule for rule in CASES if rule not in ("sum", "delta")]


# Heads enough for wide tiles, and for medium ones, with one warp for a head's columns or several. For the last state,
# the backward pass runs in windows of 64 tokens, with sums over the columns of 32 blocks.
@pytest.mark.parametrize("rule", some_fast("decay", among=FADING))
@pytest.mark.parametrize(
    "shape", [(32, 16, 11, 9, 64), (4, 33, 11, 57, 62), (2, 16, 35, 64, 64), (1, 2, 70, 300, 128)], ids=str
)
def test_sums_over_columns(emulator, rule, shape):
    def begin(given):
        given["first"] = torch.rand(shape[0], shape[2]) < 0.05

    *arguments, found = check_accuracy(emulator, rule, shape, torch.float32, begin)
    for how in ({"reverse": 1, "multiprocessors": 1}, {"shared_kib": 99}):
        for name, x in emulator.results(*arguments, **how).items():
            assert torch.equal(found[name], x), (name, how)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "forgetful"), [*((rule, False) for rule in CASES), ("delta", True)])
def test_no_drift_over_4096_tokens(emulator, rule, forgetful):
    check_accuracy(emulator, rule, (1, 1, 4096, 16, 16), torch.float32, forgetful=forgetful)


@pytest.mark.slow
def test_no_drift_of_chunks(emulator):
    check_accuracy(emulator, "delta", (1, 1, 8192, 16, 16), torch.bfloat16, forgetful=True)


@every_rule
@pytest.mark.parametrize("layout, dtype", [("tokens_first", torch.float64), ("expanded", torch.bfloat16)], ids=str)
def test_layout_changes_nothing(emulator, rule, layout, dtype):
    """Strides of batch, head and token are arbitrary; the last dimension is contiguous."""
    given, erases = make_case(rule, (2, 3, 21, 16, 12), dtype, layout=layout)
    of_out, of_state = cotangents_of(given)
    packed = {name: x.contiguous() for name, x in given.items()}
    expected = emulator.results(packed, erases, (of_out, of_state))
    strided = of_out.transpose(1, 2).contiguous().transpose(1, 2)
    for name, x in emulator.results(given, erases, (strided, of_state)).items():
        assert torch.equal(expected[name], x), name


@every_rule
@looped("dtype", [torch.float32, torch.bfloat16])
def test_alignment_changes_nothing(emulator, rule, dtype):
    """Neither in scans nor on tensor cores. That includes what the forward pass has left for the backward pass."""
    for shape in [(2, 3, 21, 16, 12), (1, 2, 70, 16, 24)]:
        given, erases = make_case(rule, shape, dtype)
        gradients = cotangents_of(given)
        aligned = emulator.forward(given, erases)
        odd = {name: at_odd_offset(x) for name, x in given.items()}
        found = emulator.forward(odd, erases)
        for name, x in aligned.items():
            assert torch.equal(found[name], x), (name, shape)
        left = {name: at_odd_offset(x) for name, x in found.items()}
        found = emulator.backward(odd, erases, left, tuple(map(at_odd_offset, gradients)))
        for name, x in emulator.backward(given, erases, aligned, gradients).items():
            assert torch.equal(found[name], x), (name, shape)


@every_rule
def test_an_absent_gradient_is_zero(emulator, rule):
    for state in [True, False]:
        check_absent_gradients(emulator, *make_case(rule, (2, 2, 37, 5, 6), torch.float64, state=state))


def pick(given, tokens):
    return {name: x if name == "state" else x[:, :, tokens] for name, x in given.items()}


@every_rule
def test_decoding_token_by_token_equals_the_whole(emulator, rule):
    given, erases = make_case(rule, (2, 2, 6, 20, 12), torch.float64)
    whole, state = emulator.forward(given, erases), given["state"]
    for t in range(6):
        step = emulator.forward(pick(given, slice(t, t + 1)) | {"state": state}, erases)
        state = step["state"]
        torch.testing.assert_close(step["out"][:, :, 0], whole["out"][:, :, t], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, whole["state"], rtol=1e-12, atol=1e-12)


@every_rule
def test_a_prefix_is_bit_equal(emulator, rule):
    for cut in [1, 15, 16, 31, 33]:
        given, erases = make_case(rule, (1, 2, 40, 16, 33), torch.float32)
        out = emulator.forward(given, erases)["out"]
        assert torch.equal(emulator.forward(pick(given, slice(cut)), erases)["out"], out[:, :, :cut])


@every_rule
def test_empty_dimensions(emulator, rule):
    for shape in [(0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 2, 3, 0, 5), (2, 2, 3, 4, 0), (1, 1, 3, 0, 300)]:
        given, erases = make_case(rule, shape, torch.float64)
        for name, x in emulator.results(given, erases, cotangents_of(given)).items():
            assert not x.any(), name  # nor NaN
    for shape in [(0, 2, 70, 16, 16), (2, 0, 2100, 16, 16)]:  # in chunks and segments
        given, erases = make_case(rule, shape, torch.bfloat16)
        assert emulator.results(given, erases, cotangents_of(given))["out"].shape == (*shape[:3], 16)


@every_rule
@pytest.mark.parametrize(
    "dtype, shape, at", [(torch.float32, (2, 3, 9, 16, 16), 4), (torch.bfloat16, (2, 2, 70, 24, 20), 40)]
)
def test_nan_stays_in_its_sequence_and_head(emulator, rule, dtype, shape, at):
    """In the forward pass it does not reach earlier tokens, or on the tensor cores earlier chunks, either."""
    earlier = at // CHUNK * CHUNK if shape[2] > CHUNK else at
    for where in ["k", "v"]:
        given, erases = make_case(rule, shape, dtype)
        gradients = cotangents_of(given)
        clean = emulator.results(given, erases, gradients)
        given[where] = given[where].clone()
        given[where][1, 1, at] = float("nan")
        spoilt = emulator.results(given, erases, gradients)
        healthy = torch.ones(shape[:2], dtype=torch.bool)
        healthy[1, 1] = False
        for name, x in clean.items():
            assert torch.equal(spoilt[name][healthy], x[healthy]), name
        assert torch.equal(spoilt["out"][1, 1, :earlier], clean["out"][1, 1, :earlier])
        assert spoilt["out"][1, 1, at:].isnan().all()


@pytest.mark.parametrize("rule", FADING)
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_all_or_nothing_kept(emulator, rule, rate):
    given, erases = make_case(rule, (1, 2, 70, 5, 6), torch.float64)
    for name in {"decay", "value_decay"} & given.keys():
        given[name] = torch.where(torch.rand(given[name].shape) < 0.3, rate, given[name])
    gradients = cotangents_of(given)
    found = emulator.results(given, erases, gradients)
    for name, x in reference(given, erases, gradients).items():
        assert relative_error(found[name], x) < 1e-13, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_of_half_precision(emulator, dtype):
    """One token without a state: out = (q . k) v, rounded once; with q . k = 1, out is v to the last bit."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    v = bits[bits.isfinite()].reshape(-1, 8)
    one = torch.ones(len(v), 1, 1, 1, dtype=dtype)
    given = {"q": one, "k": one, "v": v[:, None, None]}
    assert torch.equal(emulator.forward(given, False)["out"][:, 0, 0], v)
    # A float32 state with a query of one is rounded as in PyTorch, ties and infinities included.
    state = (torch.randint(-(2**31), 2**31, (len(v), 1, 1, 8), dtype=torch.int64).to(torch.int32)).view(torch.float32)
    state[:64, 0, 0] = (v[:64].float() + v[:64].float().nextafter(torch.tensor(torch.inf))) / 2
    state[64:128, 0, 0] = (v[64:128].float() + v[65:129].float()) / 2
    given |= {"k": 0 * one, "v": torch.zeros_like(v)[:, None, None], "state": state}
    found, expected = emulator.forward(given, False)["out"].squeeze(), state.to(dtype).squeeze()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


@every_rule
def test_sizes_beyond_the_kernels_are_refused(emulator, rule):
    given, erases = make_case(rule, (1, 1, 1, 513, 2), torch.float64)
    with pytest.raises(EmulatorError, match=r"up to 512 elements, got Dk = 513 and Dv = 2"):
        emulator.forward(given, erases)


@pytest.mark.parametrize("rule", some_fast("delta", "decay", "rwkv7"))
@looped("dtype", [torch.float32, torch.bfloat16])
def test_the_greatest_sizes_fit_every_gpu(emulator, rule, dtype):
    """It fits into the 99 KiB of GPUs of compute capability 8.6, 8.9 and 12.0, with heads for all teams of a block."""
    for shape in [(2, 8, 2, 512, 1), (2, 8, 2, 1, 512), (1, 2, 2, 512, 512)]:  # the last has one team
        given, erases = make_case(rule, shape, dtype)
        gradients = cotangents_of(given)
        expected = emulator.results(given, erases, gradients)
        for name, x in emulator.results(given, erases, gradients, multiprocessors=1, shared_kib=99).items():
            assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("rule", ["gated", "decay"])
@pytest.mark.parametrize("multiprocessors", [132, 1])
def test_what_a_gpu_has_no_shared_memory_for_is_refused(emulator, rule, multiprocessors):
    """It holds for float64 beyond 256 elements, with as many heads as teams."""
    how = {"multiprocessors": multiprocessors, "shared_kib": 99}
    given, erases = make_case(rule, (2, 8, 2, 257, 20), torch.float64)
    results = emulator.forward(given, erases, **how)
    sentence = (
        r"a state of 257 x 20 in float64 takes \d+ KiB of shared memory here, of which this GPU has 99 KiB "
        "for a block; use float32, smaller heads or the reference"
    )
    with pytest.raises(EmulatorError, match=sentence):
        emulator.backward(given, erases, results, cotangents_of(given), **how)
    given, erases = make_case(rule, (2, 8, 2, 256, 20), torch.float64)
    emulator.results(given, erases, cotangents_of(given), **how)


def test_workspace_is_of_the_order_of_the_tokens(emulator):
    """The memory is for 8,192 tokens of 8 heads and Dk = Dv = 64, in sizes of q + k + v + out.

    On tensor cores there are scores of all pairs of tokens in a chunk, and a gradient of the state for each chunk. Sums
    over columns of several blocks take at most 32 MiB more. Sum and delta in float32 rebuild the states there that
    other rules have kept.
    """
    tokens, states = 8 * 8192, 8 * 8192 // CHUNK * 64 * 64 * 4
    for dtype, most in ((torch.float32, 0.5), (torch.bfloat16, 1.0)):
        for rule in RULES:
            allowed = most * 4 * tokens * 64 * dtype.itemsize + 2**25
            if rule == "removal" or dtype == torch.float32:
                allowed += tokens * 768 + states
            if rule in ("sum", "delta") and dtype == torch.float32:
                allowed += states
            assert emulator.workspace_bytes(rule, (1, 8, 8192, 64, 64), dtype) <= allowed, rule


@every_rule
def test_memory_is_below_the_bound_of_a_gpu(emulator, rule):
    """The law of test_cuda.py, from the sizes of all arrays that both passes make."""
    tokens, heads, size = 8192, 8, 64
    given, erases = make_case(rule, (1, heads, 1, size, size), torch.float32, state=False)
    name, parts = prepare(given, erases)
    gradients = [x for part, x in parts.items() if part != "rate" or "rate" in given]
    retrieved = [given["v"]] if erases or name == "removal" else []
    states = heads * size * size * 4 * (tokens // CHUNK if name not in ("sum", "delta") else 0)
    inputs = tokens * sum(x.nbytes for x in (*given.values(), given["v"]))
    made = tokens * sum(x.nbytes for x in (given["v"], *retrieved, *gradients)) + states
    made += emulator.workspace_bytes(name, (1, heads, tokens, size, size), torch.float32)
    assert 0.9 < made / inputs < MEMORY
