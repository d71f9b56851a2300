"""Features of GPUs only: streams, graphs, several devices, device memory; the laws are in tests/laws."""

import pytest
import torch
from support.pairwise import looped
from support.subjects import (
    RULES,
    WITH_KERNEL,
    check_accuracy,
    check_errors,
    cotangents,
    kernel_or_auto,
    results,
    sample_inputs,
)
from test_operator import test_what_the_backward_pass_gets_may_have_any_strides  # noqa: F401, also on a GPU

from fairseq_fwp import ops
from fairseq_fwp.ops.kernels import self_check

pytestmark = pytest.mark.cuda
every_kernel = pytest.mark.parametrize("rule", WITH_KERNEL)
every_rule = pytest.mark.parametrize("rule", RULES)
SHAPE = (2, 3, 150, 24, 40)
# Extra memory of a training step, in sizes of the inputs and out: one more than on a CPU. Here kernels also keep 32 MiB
# of sums of slabs, and Dk numbers a token for a decay of one. tests/emulator counts it. delta_product runs several
# tokens for each.
MEMORY, MEMORY_OF_PRODUCT = 3, 4.5


@pytest.fixture(autouse=True)
def on_the_gpu():
    """The default device for the tensors of a test."""
    with torch.device("cuda"):
        yield


def kernel(rule):
    return kernel_or_auto(rule)


def assert_equal(found, expected):
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


def test_the_kernels_are_built():
    q = torch.ones(1, 1, 1, 4)
    assert ops.sum_rule(q, q, q, backend="kernel")[0].is_cuda
    assert ops.kernel_status()["cuda"].built


def test_the_kernels_pass_the_check_before_their_first_use():
    device = torch.device("cuda", torch.cuda.current_device())
    assert self_check._check_apart(str(device)) == {} == self_check.find_faults(str(device))


# Shapes of the emulator's tests, ragged and with a partial last chunk, and of the benchmarks, with fewer tokens. The
# last are few and long enough for segments.
CHUNK_SHAPES = [
    *((1, 2, 70, 16, 16), (2, 1, 95, 64, 40), (1, 1, 77, 128, 33), (1, 2, 300, 100, 17)),
    *((8, 40, 70, 64, 64), (40, 40, 96, 16, 16), (4, 40, 80, 128, 128)),
    *((1, 1, 2100, 16, 160), (1, 1, 2100, 64, 64), (1, 2, 2100, 128, 128)),
]


@pytest.mark.parametrize("rule", ["sum", "delta", "gla", "gla_by_key", "gated_delta", "gated_delta_by_key"])
@looped("shape", CHUNK_SHAPES, ids=str)
@looped("state", [True, False], ids=["state", "no_state"])
def test_chunks_on_tensor_cores(rule, shape, state):
    """Enough heads to fill a GPU, and few long ones, whose segments run side by side."""
    check_accuracy(rule, shape, torch.bfloat16, state=state, layout="tokens_first")


@every_kernel
@looped("dtype", [torch.float32, torch.bfloat16], ids=str)
@looped("shape", [SHAPE, (1, 2, 1000, 64, 64), (1, 1, 300, 128, 128)], ids=str)
def test_runs_are_bit_equal(rule, dtype, shape):
    inputs = sample_inputs(rule, shape, dtype)
    gradients = cotangents(inputs)
    first = results(kernel(rule), inputs, gradients)
    for _ in range(3):
        assert_equal(results(kernel(rule), inputs, gradients), first)


@every_kernel
def test_on_the_current_stream(rule):
    """A kernel runs after earlier work of its stream, and kernels of two streams do not affect each other."""
    given = [sample_inputs(rule, SHAPE, torch.float32, seed=seed) for seed in range(2)]
    gradients = cotangents(given[0])
    expected = [results(kernel(rule), inputs, gradients) for inputs in given]
    late = [{name: torch.zeros_like(x) for name, x in inputs.items()} for inputs in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    found = []
    for stream, inputs, empty in zip(streams, given, late, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(
                20_000_000
            )  # cycles: about 10 ms, during which a kernel on another stream would read zeros
            for name, x in inputs.items():
                empty[name].copy_(x)
            found.append(results(kernel(rule), empty, gradients))
    torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


def captured(function):
    """Return a graph of the function and the outputs of its replays, after the warm-up runs that PyTorch requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph, outputs


@every_kernel
@looped("state", [True, False], ids=["state", "no_state"])
@looped(
    ("shape", "dtype"), [(SHAPE, torch.float32), ((1, 2, 300, 64, 64), torch.bfloat16)], ids=["scans", "tensor_cores"]
)
def test_forward_and_backward_in_a_graph(rule, state, shape, dtype):
    inputs, other = (sample_inputs(rule, shape, dtype, state=state, seed=seed) for seed in range(2))
    gradients = cotangents(inputs)
    graph, found = captured(lambda: results(kernel(rule), inputs, gradients))
    for given in (other, sample_inputs(rule, shape, dtype, state=state, seed=2)):
        expected = results(kernel(rule), given, gradients)
        for name, x in inputs.items():
            if x is not None:
                x.copy_(given[name])
        graph.replay()
        assert_equal(found, expected)


@every_kernel
def test_decoding_in_a_graph(rule):
    """One captured step that reuses its state gives the same outputs as the whole sequence."""
    tokens = sample_inputs(rule, (2, 3, 20, 16, 32), torch.float32)
    state = tokens.pop("state")
    expected, last = kernel(rule)(**tokens, state=state)
    step = {name: x[:, :, :1].clone() for name, x in tokens.items()}
    memory = state.clone()
    with torch.no_grad():
        graph, (out, new) = captured(lambda: kernel(rule)(**step, state=memory))
        for t in range(20):
            for name, x in tokens.items():
                step[name].copy_(x[:, :, t : t + 1])
            graph.replay()
            memory.copy_(new)
            torch.testing.assert_close(out, expected[:, :, t : t + 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(memory, last, rtol=1e-4, atol=1e-5)


@every_kernel
@looped("shape", [(1, 1, 1, 64, 64), (64, 16, 1, 64, 64), (3, 2, 1, 300, 17)], ids=str)
@looped("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoding_step_is_as_accurate_as_the_loop(rule, shape, dtype):
    @torch.no_grad()
    def draw(n):
        inputs = sample_inputs(rule, shape, dtype, seed=n)
        exact = {name: x.double() for name, x in inputs.items()}
        steps = (RULES[rule].reference(**exact), RULES[rule].reference(**inputs), kernel(rule)(**inputs))
        return [dict(zip(("out", "state"), step, strict=True)) for step in steps]

    check_errors(f"{rule}, {shape}, {dtype}", draw, {})


@every_kernel
def test_sizes_beyond_the_kernels(rule):
    inputs = sample_inputs(rule, (1, 1, 3, 513, 4), torch.float32)
    with pytest.raises(RuntimeError, match=r"keys and values must have at most 512 dimensions .* got \(513, 4\)"):
        RULES[rule].function(**inputs, backend="kernel")


@every_kernel
def test_another_gpu_than_the_current_one(rule):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.device("cuda:1"):
        inputs = sample_inputs(rule, SHAPE, torch.float32)
        gradients = cotangents(inputs)
    assert torch.cuda.current_device() == 0
    found = results(kernel(rule), inputs, gradients)
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        expected = results(kernel(rule), inputs, gradients)
    assert all(x.device == torch.device("cuda:1") for x in found.values())
    assert_equal(found, expected)


@every_rule
@looped("grad", [True, False])
def test_tensors_of_two_devices_are_refused(rule, grad):
    inputs = sample_inputs(rule, SHAPE, torch.float32)
    for name in ("k", "state"):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=f"{name} must be on q's device = cuda:0"):
            RULES[rule].function(**{**inputs, name: inputs[name].cpu()})
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="k must be on q's device = cpu, got cuda:0"):
        RULES[rule].function(**{**inputs, "q": inputs["q"].cpu()})


@every_kernel
def test_extra_memory_at_8192_tokens(rule):
    """As test_memory.py on the CPU, for the memory that PyTorch has allocated."""
    inputs = sample_inputs(rule, (1, 8, 8192, 64, 64), torch.float32, state=False)
    leaves = {name: x if x is None else x.requires_grad_() for name, x in inputs.items()}
    given = [x for x in leaves.values() if x is not None]
    gradient, _ = cotangents(inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = kernel(rule)(**leaves)
    grads = torch.autograd.grad(out, given, gradient)
    extra = torch.cuda.max_memory_allocated() - before
    most = MEMORY_OF_PRODUCT if "N" in RULES[rule].key else MEMORY
    assert 0.9 < extra / (out.nbytes + sum(x.nbytes for x in given)) < most
    assert len(grads) == len(given)


@pytest.mark.slow
@every_kernel
def test_more_elements_than_32_bits_count(rule):
    """The last heads of tensors of more than 2^31 elements get the same results as without the others."""
    if torch.cuda.mem_get_info()[0] < 75e9:
        pytest.skip("needs 75 GB of GPU memory")
    last = sample_inputs(rule, (1, 8, 1024, 16, 16), torch.bfloat16, state=False)
    gradients = cotangents(last)
    expected = results(kernel(rule), last, gradients)

    def after_many(x):
        return None if x is None else torch.cat([x.new_zeros(1, 1 << 17, *x.shape[2:]), x], 1)

    many = {name: after_many(x) for name, x in last.items()}
    assert many["q"].numel() > 1 << 31
    found = results(kernel(rule), many, tuple(after_many(x) for x in gradients))
    assert_equal({name: x[:, -8:] for name, x in found.items()}, expected)
