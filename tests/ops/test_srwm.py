"""Self-referential weight matrices: kernel and definition against the paper's equations, and their bits."""

from functools import partial

import pytest
import torch
from support.operator_bodies import results_and_gradients, use_bodies
from support.pairwise import looped

from fairseq_fwp.ops import srwm as operators
from fairseq_fwp.ops.srwm import srwm

B, H = 2, 3


def sample(length, dim, terms="", dtype=torch.float64):
    """Return the arguments: m marks, s a state."""
    given = {"x": torch.randn(B, length, H, dim), "weights": torch.randn(H, dim, 3 * dim + 4) / dim**0.5}
    if "s" in terms:
        given["change"] = 0.3 * torch.randn(B, H, dim, 3 * dim + 4)
    given = {name: x.to(dtype) for name, x in given.items()}
    if "m" in terms:
        given |= {"first": torch.rand(B, length) < 0.1, "padding": torch.rand(B, length) < 0.1}
    return given


def equations(x, weights, change=None, first=None, padding=None, backend=None):
    """Irie et al. 2022, with four rates: each of the four matrices of a head is written by itself."""
    (_, length, _, dim), outs = x.shape, torch.zeros_like(x)
    changes = torch.zeros(B, H, dim, 3 * dim + 4, dtype=x.dtype) if change is None else change
    ends = torch.zeros_like(changes)
    for b in range(B):
        for h in range(H):
            begin = weights[h].split([dim, dim, dim, 4], -1)
            matrices = [w + c for w, c in zip(begin, changes[b, h].split([dim, dim, dim, 4], -1), strict=True)]
            for t in range(length):
                if first is not None and first[b, t]:
                    matrices = begin
                if padding is not None and padding[b, t]:
                    continue
                y, q, k, rates = (x[b, t, h] @ w for w in matrices)
                outs = outs.index_put((torch.tensor(b), torch.tensor(t), torch.tensor(h)), y)
                q, k = q.softmax(0), k.softmax(0)
                matrices = [
                    w + torch.outer(k, rate.sigmoid() * (q @ w - k @ w))
                    for w, rate in zip(matrices, rates, strict=True)
                ]
            end = torch.cat([w - start for w, start in zip(matrices, begin, strict=True)], -1)
            ends = ends.index_put((torch.tensor(b), torch.tensor(h)), end)
    return outs, ends


def run(given, function=srwm, backend="auto"):
    """Return all results and gradients."""
    return results_and_gradients(partial(function, backend=backend), given)


# Tokens, the size of a head, and terms. Chunks have 32 tokens.
CASES = [(1, 1, ""), (33, 4, "m"), (70, 16, "ms"), (64, 17, "s"), (40, 40, "")]


@looped("dtype, most", [(torch.float64, 1e-12), (torch.float32, 3e-6)])
@looped("length, dim, terms", CASES)
@looped("backend", ["auto", "reference"])
def test_it_is_the_papers_equations(length, dim, terms, dtype, most, backend):
    given = sample(length, dim, terms, dtype)
    expected = run({name: x.double() if x.is_floating_point() else x for name, x in given.items()}, equations)
    for x, y in zip(run(given, backend=backend), expected, strict=True):
        assert x.dtype == dtype and (x.double() - y).abs().max() <= most * y.abs().max().clamp(min=1)


def test_bits_do_not_depend_on_batch_threads_and_splits():
    given = sample(150, 16, "ms", torch.float32)
    whole = run(given)
    of_row = {name: x if name == "weights" else x[1:] for name, x in given.items()}
    for x, y in zip(run(of_row)[:2], whole[:2], strict=True):
        assert torch.equal(x, y[1:])
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - threads % 2)
    assert all(map(torch.equal, run(given), whole))
    torch.set_num_threads(threads)
    out, change = [], given["change"]
    for tokens in torch.arange(150).split([1, 63, 86]):
        part = {name: given[name][:, tokens] for name in ("x", "first", "padding")}
        y, change = srwm(weights=given["weights"], change=change, **part)
        out.append(y)
    assert torch.equal(torch.cat(out, 1), whole[0]) and torch.equal(change, whole[1])


@looped("dim", [3, 16, 17])
def test_nan_stays_in_its_document(dim):
    given = sample(80, dim, dtype=torch.float32)
    given["x"][:, 40] = torch.nan
    given["x"].requires_grad_()
    begins = torch.zeros(B, 80, dtype=torch.bool)
    begins[:, [35, 50]] = True
    out = srwm(**given, first=begins)[0]
    (gradient,) = torch.autograd.grad(out.sum(), given["x"])
    for x in (out, gradient):
        assert x[:, :35].isfinite().all() and x[:, 50:].isfinite().all()


@looped("backend", ["auto", "reference"])
def test_nan_at_padding_reaches_no_gradient(backend):
    given = sample(3, 4, "s")
    weights = given["weights"].requires_grad_()
    given["x"][:, 1] = torch.nan
    out, change = srwm(**given, padding=torch.tensor([[False, True, False]] * B), backend=backend)
    (gradient,) = torch.autograd.grad(out.sum() + change.sum(), weights)
    assert gradient.isfinite().all()


def test_no_tokens():
    given = sample(0, 4, "s")
    out, change = srwm(**given)
    assert out.shape == (B, 0, H, 4) and torch.equal(change, given["change"])


def test_without_a_kernel(monkeypatch):
    """As if it could not be built: the operators' bodies in Python."""
    given = sample(35, 4, "ms")
    expected = run(given)
    use_bodies(monkeypatch, operators)
    for x, y in zip(run(given), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_a_required_kernel_is_of_a_cpu():
    given = {name: x.to("meta") for name, x in sample(3, 4, "s").items()}
    assert srwm(**given)[0].is_meta
    with pytest.raises(RuntimeError, match="no compiled kernel for meta: srwm has one for a CPU"):
        srwm(**given, backend="kernel")


def test_compiled():
    given = {name: x.requires_grad_() for name, x in sample(6, 4, "s").items()}
    compiled = torch.compile(srwm, backend="aot_eager", fullgraph=True)
    for x, y in zip(compiled(**given), srwm(**given), strict=True):
        torch.testing.assert_close(x, y)


WRONG = [
    ({"x": torch.zeros(2, 3, 4)}, "x must have shape"),
    ({"weights": torch.zeros(4, 2, 9)}, "weights must have shape"),
    ({"change": torch.zeros(2, 4, 2, 9)}, "change must have shape"),
    ({"first": torch.zeros(2, 3)}, "first and padding must be bool, got torch.float32"),
    ({"x": torch.zeros(2, 3, 4, 2).int()}, "x must be floating-point, got torch.int32"),
    ({"weights": torch.zeros(4, 2, 10).int()}, "weights must be floating-point on cpu, as x, got torch.int32 on cpu"),
    ({"change": torch.zeros(2, 4, 2, 10, device="meta")}, "change must be floating-point on cpu, .* got .* on meta"),
    ({"backend": "kernels"}, "backend must be one of auto, kernel, fla, reference, got 'kernels'"),
]


@looped("given, message", WRONG)
def test_wrong_shapes(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        srwm(**{"x": torch.zeros(2, 3, 4, 2), "weights": torch.zeros(4, 2, 10), **given})
