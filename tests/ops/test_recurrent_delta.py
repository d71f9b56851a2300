"""The recurrent delta rule: its kernel against the definition, and its bits."""

from functools import partial

import pytest
import torch
from support.operator_bodies import results_and_gradients, use_bodies
from support.pairwise import looped

from fairseq_fwp.ops import recurrent_delta as operators
from fairseq_fwp.ops.kernels import backend, self_check
from fairseq_fwp.ops.recurrent_delta import recurrent_delta

B, H = 2, 3


def sample(length, dim, terms, dtype=torch.float64):
    """Return the arguments of a rule: w its weights, z, m marks, s a state."""
    x = torch.randn(B, length, H, 3 * dim + 1, dtype=dtype)
    given = {"x": x, "weights": 0.5 * torch.randn(H, dim, 3 * dim + 1, dtype=dtype)} if "w" in terms else {"x": x}
    if "z" in terms:
        given["z"] = torch.randn(B, length, H, dim, dtype=dtype)
    if "s" in terms:
        given |= {"memory": torch.randn(B, H, dim, dim, dtype=dtype), "output": torch.randn(B, H, dim, dtype=dtype)}
    if "m" in terms:
        given |= {"first": torch.rand(B, length) < 0.1, "padding": torch.rand(B, length) < 0.1}
    return given


def run(given, backend="auto"):
    """Return all results and gradients."""
    return results_and_gradients(partial(recurrent_delta, backend=backend), given)


# Tokens, the size of a head, and terms. Chunks have 32 tokens.
CASES = [(1, 1, "w"), (33, 4, "z"), (70, 16, "wms"), (64, 17, "zms"), (100, 64, "wzms"), (40, 40, "")]


@looped("dtype, most", [(torch.float64, 1e-12), (torch.float32, 3e-6)])
@looped("length, dim, terms", CASES)
def test_the_kernel_is_the_definition(length, dim, terms, dtype, most):
    given = sample(length, dim, terms, dtype)
    expected = run({name: x.double() if x.is_floating_point() else x for name, x in given.items()}, "reference")
    for x, y in zip(run(given), expected, strict=True):
        assert (x.double() - y).abs().max() <= most * y.abs().max().clamp(min=1)


def test_bits_do_not_depend_on_batch_threads_and_splits():
    given = sample(150, 16, "wzms", torch.float32)
    whole = run(given)
    of_row = {name: x if name == "weights" else x[1:] for name, x in given.items()}
    for x, y in zip(run(of_row)[:3], whole[:3], strict=True):
        assert torch.equal(x, y[1:])
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - threads % 2)
    assert all(map(torch.equal, run(given), whole))
    torch.set_num_threads(threads)
    first, second = ({**given} for _ in range(2))
    for part, tokens in ((first, slice(None, 64)), (second, slice(64, None))):
        part |= {name: given[name][:, tokens] for name in ("x", "z", "first", "padding")}
    out, memory, output = recurrent_delta(**first)
    rest = recurrent_delta(**{**second, "memory": memory, "output": output})
    assert torch.equal(torch.cat([out, rest[0]], 1), whole[0])
    assert torch.equal(rest[1], whole[1]) and torch.equal(rest[2], whole[2])


def test_padding_changes_nothing_and_documents_begin_empty():
    given = sample(9, 5, "ws")
    begins, padding = (torch.arange(9).expand(B, 9) == 4), (torch.arange(9).expand(B, 9) >= 7)
    out, memory, output = recurrent_delta(**given, first=begins, padding=padding)
    alone = recurrent_delta(given["x"][:, 4:7], given["weights"])
    assert torch.equal(out[:, 4:7], alone[0]) and torch.equal(memory, alone[1]) and torch.equal(output, alone[2])
    assert torch.equal(out[:, 7:], output.unsqueeze(1).expand(-1, 2, -1, -1))


@looped("layout", [lambda x: x.t().contiguous().t(), lambda x: x[:1].expand(B, -1)])
def test_masks_in_any_layout(layout):
    given = sample(40, 5, "wms")
    masks = {name: layout(given[name]) for name in ("first", "padding")}
    dense = {name: mask.contiguous() for name, mask in masks.items()}
    for x, y in zip(run({**given, **masks}), run({**given, **dense}), strict=True):
        assert torch.equal(x, y)


@looped("dim", [3, 16, 17])
def test_nan_stays_in_its_document(dim):
    given = sample(80, dim, "wz", torch.float32)
    given["x"][:, 40] = torch.nan
    given["x"].requires_grad_()
    begins = torch.zeros(B, 80, dtype=torch.bool)
    begins[:, [35, 50]] = True
    out = recurrent_delta(**given, first=begins)[0]
    (gradient,) = torch.autograd.grad(out.sum(), given["x"])
    for x in (out, gradient):
        assert x[:, :35].isfinite().all() and x[:, 50:].isfinite().all()


def test_no_tokens():
    given = sample(0, 4, "ws")
    out, memory, output = recurrent_delta(**given)
    assert out.shape == (B, 0, H, 4) and torch.equal(memory, given["memory"]) and torch.equal(output, given["output"])


def test_without_a_kernel(monkeypatch):
    """As if it could not be built: the operators' bodies in Python."""
    given = sample(35, 4, "wzms")
    expected = run(given)
    use_bodies(monkeypatch, operators)
    for x, y in zip(run(given), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_what_the_kernel_does_not_take_runs_as_the_definition(monkeypatch):
    """Because it is too large, or because the check before the first use has found a fault."""
    given, faults = sample(3, 5, "wzms"), {"recurrent_delta": "out is off"}
    expected = recurrent_delta(**given, backend="reference")
    monkeypatch.setattr(self_check, "find_faults", lambda device: faults)
    for change, message in (
        (
            (operators, "GREATEST", {"cpu": 4}),
            "at most 4 dimensions for its kernels, got \\(5, 5\\)",
        ),
        ((self_check, "CHECKED", ("cpu",)), "differs from the reference: out is off"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            patch.setattr(backend, "_warned", set())
            patch.setattr(self_check, "_warned", set())
            with pytest.warns(RuntimeWarning, match=message):
                assert all(map(torch.equal, recurrent_delta(**given), expected))
            with pytest.raises(RuntimeError, match=message):
                recurrent_delta(**given, backend="kernel")


def test_compiled():
    given = sample(6, 4, "wz")
    compiled = torch.compile(recurrent_delta, backend="aot_eager", fullgraph=True)
    for x, y in zip(compiled(**given), recurrent_delta(**given), strict=True):
        torch.testing.assert_close(x, y)


WRONG = [
    ({"x": torch.zeros(2, 3, 4)}, "x must have shape"),
    ({"x": torch.zeros(2, 3, 4, 6)}, "x must have 3 d \\+ 1 numbers for each head, got 6"),
    ({"x": torch.zeros(2, 3, 4, 7), "weights": torch.zeros(4, 3, 7)}, "weights must have shape"),
    ({"x": torch.zeros(2, 3, 4, 7), "z": torch.zeros(2, 3, 4, 3)}, "z must have shape"),
    ({"x": torch.zeros(2, 3, 4, 7), "memory": torch.zeros(2, 4, 2, 3)}, "memory must have shape"),
    ({"x": torch.zeros(2, 3, 4, 7), "first": torch.zeros(2, 4, dtype=torch.bool)}, "first, padding must have shape"),
    ({"x": torch.zeros(2, 3, 4, 7), "first": torch.zeros(2, 3)}, "first and padding must be bool, got torch.float32"),
    ({"x": torch.zeros(2, 3, 4, 7).int()}, "x must be floating-point, got torch.int32"),
]


@looped("given, message", WRONG)
def test_wrong_shapes(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        recurrent_delta(**given)
