"""The recurrent delta rule on the emulator: its definition, in both orders of threads, and its bits."""

import ctypes
from functools import partial

import pytest
import torch
from emulator import SHARED_KIB, EmulatorError, _Pretended
from support.operator_bodies import replace_passes
from support.pairwise import looped
from test_recurrent_delta import run, sample

from fairseq_fwp.ops import recurrent_delta as operators
from fairseq_fwp.ops.fast_weights import KEPT_EVERY
from fairseq_fwp.ops.recurrent_delta import recurrent_delta


def launch(emulator, is_backward, sizes, marks, given, to, reverse=0):
    """Call a pass, whose structure has the sizes, then the addresses of arrays in the order of rule.h."""
    arrays = (marks, *given, *to)
    assert all(x is None or x.is_contiguous() for x in arrays)
    numbers = (*sizes, *(0 if x is None else x.data_ptr() for x in arrays))
    structure = (ctypes.c_int64 * len(numbers))(*numbers)
    call = emulator._library.emulator_recurrent_delta
    call.restype = ctypes.c_char_p
    machine = ctypes.byref(_Pretended(reverse, 132, SHARED_KIB))
    error = call(machine, given[1].dtype == torch.float64, is_backward, structure)
    if error is not None:
        raise EmulatorError(error.decode())
    for x in filter(lambda x: x is not None and x.numel(), to):
        emulator._check_guards(x)


def forward(emulator, x, weights, z, memory, output, marks, keeps, **how):
    batch, length, heads, gates = x.shape
    dim, chunks = gates // 3, -(-length // KEPT_EVERY) if keeps else 0
    last = emulator._empty(memory.shape, x.dtype).copy_(memory)
    out = emulator._empty((batch, length, heads, dim), x.dtype)
    saved = emulator._empty(x.shape if keeps else (0,), x.dtype)
    kept = emulator._empty((batch, heads, chunks, dim, dim), x.dtype)
    to = (last, out, saved if keeps else None, kept if keeps else None)
    launch(emulator, False, (batch, length, heads, dim), marks, (weights, output, x, z), to, **how)
    return out, last, saved, kept


def backward(emulator, weights, z, output, marks, last, out, saved, kept, d_out, d_last, **how):
    d_x, d_z, d_output = (emulator._empty(x.shape, x.dtype) for x in (saved, out, output))
    d_memory = emulator._empty(last.shape, last.dtype).copy_(d_last)
    given = (weights, output, last, out, saved, kept, d_out)
    launch(emulator, True, out.shape, marks, given, (d_x, d_z, d_memory, d_output), **how)
    return d_x, d_z, d_memory, d_output


def use_kernel(patch, emulator, **how):
    """Make later calls of the operator run on the emulator."""
    replace_passes(patch, operators, partial(forward, emulator, **how), partial(backward, emulator, **how))


@pytest.fixture
def with_kernel(emulator, monkeypatch):
    return partial(use_kernel, monkeypatch, emulator)


# Sizes below, at and beyond those of a kernel. Four tokens are loaded together, and a state is kept for each 32.
CASES = [(1, 1, "w"), (2, 3, "zs"), (3, 16, "wms"), (4, 5, "wzms"), (5, 17, "zms"), (31, 3, ""), (33, 16, "wm")]
CASES += [(64, 3, "wzs"), (65, 4, "zms"), (70, 16, "wzms"), (70, 20, "wms"), (35, 64, "wms"), (3, 64, "zms")]


LIMITS = {torch.float64: 1e-12, torch.float32: 3e-6}


def check(with_kernel, case, dtype):
    """Check outputs, states and all gradients, and that the order of threads changes no bit of them."""
    given = sample(*case, dtype)
    expected = run({name: x.double() if x.is_floating_point() else x for name, x in given.items()}, "reference")
    with_kernel()
    found = run(given)
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y).abs().max() <= LIMITS[dtype] * y.abs().max().clamp(min=1), case
    with_kernel(reverse=1)
    assert all(map(torch.equal, run(given), found)), case


@looped("dtype", LIMITS)
@looped("case", CASES)
def test_the_kernel_is_the_definition(with_kernel, case, dtype):
    check(with_kernel, case, dtype)


def test_every_length(with_kernel):
    """Up to two kept states and a rest, in one sequence with documents and padding."""
    given = sample(70, 3, "wms")
    given["first"][:, 0] = False  # a state before the first token
    with_kernel()
    of_head = {"weights": given["weights"][:1]} | {name: given[name][:1, :1] for name in ("memory", "output")}
    for length in range(1, 71):
        some = of_head | {"x": given["x"][:1, :length, :1]}
        some |= {name: given[name][:1, :length] for name in ("first", "padding")}
        for x, y in zip(run(some), run(some, "reference"), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def of_sums(results, leaf):
    return torch.autograd.grad([x.sum() for x in results], leaf)[0]


@looped("dtype", [torch.float64, torch.float32])
def test_bits_do_not_depend_on_batch_and_splits(with_kernel, dtype):
    """One token after another, as in decoding, has the bits of all at once, each by one launch."""
    given = sample(40, 17, "wzms", dtype)
    with_kernel()
    leaf = given["x"].requires_grad_()
    whole = recurrent_delta(**given)
    row = recurrent_delta(**{name: x if name == "weights" else x[1:] for name, x in given.items()})
    for x, y in zip((*row, of_sums(row, leaf)), (*whole, of_sums(whole, leaf)), strict=True):
        assert torch.equal(x[-1], y[-1])
    state, outs = {name: given.pop(name) for name in ("memory", "output")}, []
    for begin, end in ((0, 33), *((t, t + 1) for t in range(33, 40))):
        tokens = {name: x if name == "weights" else x[:, begin:end] for name, x in given.items()}
        out, *after = recurrent_delta(**tokens, **state)
        state = dict(zip(state, after, strict=True))
        outs.append(out)
    assert all(map(torch.equal, (torch.cat(outs, 1), *after), whole))


def test_only_differences_of_logits_matter(with_kernel):
    """Where all are small, numbers beyond the size of a head are not the greatest."""
    with_kernel()
    given = sample(5, 5, "w")
    moved = given["x"].clone()
    moved[..., :10] -= 1000
    for x, y in zip(run(given), run({**given, "x": moved}), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_nan_stays_in_its_document(with_kernel):
    with_kernel()
    for dim in (3, 16, 17):
        given = sample(80, dim, "wz", torch.float32)
        given["x"][:, 40] = torch.nan
        given["x"].requires_grad_()
        given["first"] = torch.zeros(2, 80, dtype=torch.bool)
        given["first"][:, [35, 50]] = True
        out = recurrent_delta(**given)[0]
        for x in (out, *torch.autograd.grad(out.sum(), given["x"])):
            assert x[:, :35].isfinite().all() and x[:, 50:].isfinite().all()


def test_a_pass_is_one_launch_of_sizes_that_fit(emulator, with_kernel):
    with_kernel()
    launches = emulator._library.emulator_launches
    before = launches()
    run(sample(3, 4, "wz"))
    assert launches() == before + 2
    some = sample(3, 4, "ws")
    for empty in (sample(0, 4, "ws"), {name: x if name == "weights" else x[:0] for name, x in some.items()}):
        out, memory, _ = recurrent_delta(**empty)
        assert out.numel() == 0 and torch.equal(memory, empty["memory"])
    with pytest.raises(EmulatorError, match="recurrent_delta takes heads of up to 64 numbers, got 65"):
        run(sample(1, 65, "w"))
