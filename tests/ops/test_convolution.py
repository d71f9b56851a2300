"""The short convolution: its definition by a loop, gradients, operators, threads."""

import re

import pytest
import torch
from support.operator_bodies import use_bodies
from support.operator_fixtures import on_one_and_three_threads
from support.pairwise import looped

from fairseq_fwp.ops import convolution
from fairseq_fwp.ops.convolution import causal_conv1d

SHAPES = [(2, 9, 5, 4), (1, 1, 70, 4), (3, 2, 3, 4), (2, 17, 130, 1), (1, 40, 64, 7), (2, 0, 4, 3), (0, 5, 4, 3)]


def draw(batch, length, channels, width, dtype=torch.float64):
    drawn = (
        torch.randn(size, dtype=torch.float64) for size in ((batch, length, channels), (channels, width), (channels,))
    )
    return tuple(x.to(dtype).requires_grad_() for x in drawn)


def numbers(batch, length):
    return (torch.rand(batch, length) < 0.3).long().cumsum(1)


def with_other_strides(x):
    return x.as_strided(
        x.shape, [7 if size == 1 or x.numel() == 0 else y for size, y in zip(x.shape, x.stride(), strict=True)]
    )


def definition(x, weight, bias=None, sequence=None):
    width, out = weight.shape[1], []
    for t in range(x.shape[1]):
        total = torch.zeros_like(x[:, t]) if bias is None else bias.expand_as(x[:, t])
        for s in range(max(0, t - width + 1), t + 1):
            part = weight[:, s - t + width - 1] * x[:, s]
            total = total + (part if sequence is None else part * (sequence[:, s] == sequence[:, t]).unsqueeze(1))
        out.append(total)
    return torch.stack(out, 1) if out else x * 1.0


@pytest.fixture(params=["kernel", "reference"])
def backend(request, monkeypatch):
    """With the kernel, and as if it could not be built: the operators' bodies in Python."""
    if request.param == "kernel":
        return causal_conv1d
    use_bodies(monkeypatch, convolution)
    return causal_conv1d


@looped("with_bias", [True, False])
@looped("documents", [True, False])
@looped("shape", SHAPES)
def test_results_and_gradients_are_those_of_the_definition(backend, shape, documents, with_bias):
    given = draw(*shape)[: 2 + with_bias]
    sequence = numbers(*shape[:2]) if documents else None
    results = [function(*given, *[None] * (not with_bias), sequence) for function in (backend, definition)]
    torch.testing.assert_close(*results)
    weights = torch.randn_like(results[0])
    found, expected = (torch.autograd.grad(out, given, weights, materialize_grads=True) for out in results)
    torch.testing.assert_close(found, expected)


def test_second_derivatives():
    x, weight, bias = draw(2, 5, 3, 3)
    sequence = numbers(2, 5)
    assert torch.autograd.gradgradcheck(lambda *given: causal_conv1d(*given, sequence), (x, weight, bias))
    twice = causal_conv1d(causal_conv1d(x, weight), weight).pow(3).sum()
    found = [torch.autograd.grad(twice, (x, weight), create_graph=graph, retain_graph=True) for graph in (False, True)]
    torch.testing.assert_close(*found)


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    x, weight, bias = (y.detach() for y in draw(2, 30, 70, 4, dtype))
    out = causal_conv1d(x, weight, bias)
    exact = definition(x.double(), weight.double(), bias.double())
    assert out.dtype == dtype
    torch.testing.assert_close(
        out, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5 if dtype.itemsize == 4 else 1e-3
    )


def test_threads_batches_and_splits_change_no_bit():
    x, weight, bias = (y.detach() for y in draw(3, 200, 300, 4, torch.float32))

    def compute():
        leaves = [y.clone().requires_grad_() for y in (x, weight, bias)]
        out = causal_conv1d(*leaves)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    found = on_one_and_three_threads(compute)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(causal_conv1d(x[1:2], weight, bias), found[0][0][1:2])
    assert torch.equal(causal_conv1d(x[:, 97:], weight, bias)[:, 3:], found[0][0][:, 100:])
    first = (torch.arange(200) >= 97).long().expand(3, -1)
    assert torch.equal(causal_conv1d(x, weight, bias, first)[:, 97:], causal_conv1d(x[:, 97:], weight, bias))


def test_operators_and_layouts():
    x, weight, bias = draw(2, 9, 5, 4)
    arguments = (x, weight.detach().t().contiguous(), bias, numbers(2, 9))
    torch.library.opcheck(convolution._forward, arguments)
    wider = torch.cat([x.detach(), x.detach()], -1)
    torch.library.opcheck(convolution._forward, (wider[..., :5].requires_grad_(), *arguments[1:]))
    for strided in (
        x.detach().mT.contiguous().mT,
        wider[..., :5],
        wider[..., 5:],
        wider[:, :, ::2].repeat(1, 1, 2)[..., :5],
    ):
        torch.testing.assert_close(causal_conv1d(strided, weight, bias), causal_conv1d(strided.clone(), weight, bias))
    compiled = torch.compile(causal_conv1d, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight, bias), causal_conv1d(x, weight, bias))


# Shapes of x, weight, bias and sequence
# fmt: off
REFUSED = [
    ((9, 5), (5, 4), (5,), (2, 9), "x must have shape (B, L, D), got (9, 5)"),
    ((2, 9, 5), (1, 4), (5,), (2, 9), "weight must have shape (D = 5, W), got (1, 4)"),
    ((2, 9, 5), (5,), (5,), (2, 9), "weight must have shape (D = 5, W), got (5,)"),
    ((2, 9, 5), (5, 0), (5,), (2, 9), "weight must have at least one column, got none"),
    ((2, 9, 5), (5, 4), (1,), (2, 9), "bias must have shape (D = 5), got (1,)"),
    ((2, 9, 5), (5, 4), (5,), (1, 9), "sequence must have shape (B = 2, L = 9), got (1, 9)"),
    ((2, 9, 9), (9, 4), (9,), (9, 2), "sequence must have shape (B = 2, L = 9), got (9, 2)"),
]
# fmt: on


@looped("x, weight, bias, sequence, sentence", REFUSED)
def test_shapes_that_do_not_fit_are_refused(backend, x, weight, bias, sequence, sentence):
    """They are not broadcast."""
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        backend(torch.ones(x), torch.ones(weight), torch.ones(bias), torch.ones(sequence, dtype=torch.long))


def test_numbers_of_sequences_are_integers(backend):
    with pytest.raises(TypeError, match=r"^sequence must be integers, got torch.float32$"):
        backend(torch.ones(1, 3, 2), torch.ones(2, 1), None, torch.rand(1, 3))


@looped("shape", [(0, 5, 4, 3), (2, 0, 4, 3), (2, 5, 0, 3), (1, 1, 1, 2), (3, 4, 1, 2), (0, 0, 0, 1)])
def test_strides_without_a_meaning_change_nothing(backend, shape):
    """Those of sizes of one, and of tensors without numbers."""
    given, numbered = draw(*shape), numbers(*shape[:2])
    results = []
    for other in (False, True):
        x, weight, bias, sequence = (with_other_strides(x) if other else x for x in (*given, numbered))
        out = backend(x, weight, bias, sequence)
        first = torch.autograd.grad(out.sin().sum(), given, create_graph=True)
        second = torch.autograd.grad(sum((y.cos().sum() for y in first), out.sum()), given)
        once = torch.autograd.grad(backend(x, weight, bias, sequence).sin().sum(), given)
        results.append([out, *first, *second, *once])
    torch.testing.assert_close(*results, rtol=0, atol=0)
