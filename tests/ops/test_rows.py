"""Gates and normalisation of rows: their formulas, gradients, dtypes, layouts, threads, and PyTorch in their place."""

import re

import pytest
import torch
import torch.nn.functional as F
from support.operator_fixtures import on_one_and_three_threads
from support.pairwise import looped

from fairseq_fwp.ops import operator, rows
from fairseq_fwp.ops.kernels import KernelStatus

SHAPES = [(7, 5), (1, 1), (3, 2, 64), (2, 3, 2, 37), (70, 33), (1, 130, 1, 16)]
OPENINGS = {"none": None, "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}


@pytest.fixture(params=["kernel", "PyTorch"])
def backend(request, monkeypatch):
    """With kernels, whose functions must be called, or as if there were no compiler."""
    if request.param == "PyTorch":
        monkeypatch.setattr(operator, "load_kernels", lambda device: KernelStatus(False))
    else:
        for name in ("_define_gated_silu", "_define_normalized"):
            monkeypatch.setattr(rows, name, None)


def draw(*shape, dtype=torch.float64):
    return (2 * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_()


def norm_formula(x, weight, gate, opening, epsilon):
    out = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
    return out if opening is None else out * opening(gate)


def compare(found, expected, inputs):
    """Compare two results, and their gradients for random weights."""
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad(out, inputs, weights) for out in (found, expected)]
    torch.testing.assert_close(*gradients)


@looped("shape", SHAPES)
def test_gated_silu(backend, shape):
    x = draw(*shape[:-1], 2 * shape[-1])
    first, second = x[..., : shape[-1]], x[..., shape[-1] :]
    compare(rows.gated_silu(x), first / (1 + (-first).exp()) * second, [x])


@looped("opening", list(OPENINGS))
@looped("shape", SHAPES)
def test_rms_norm(backend, shape, opening):
    function = OPENINGS[opening]
    x, weight, gate = draw(*shape), draw(shape[-1]), draw(*shape)
    inputs = [x, weight, *([] if function is None else [gate])]
    given = () if function is None else (gate, function)
    compare(rows.rms_norm(x, weight, 0.3, *given), norm_formula(x, weight, gate, function, 0.3), inputs)


@looped("shape", SHAPES)
def test_unit_length(backend, shape):
    x = draw(*shape)
    compare(rows.unit_length(x, 0.3), x / (x.square().sum(-1, keepdim=True) + 0.3).sqrt(), [x])


def test_heads_before_tokens_in_memory(backend):
    x, weight, gate = draw(2, 3, 50, 20), draw(20), draw(2, 50, 60)
    out = rows.rms_norm(x.transpose(1, 2), weight, 1e-6, gate.unflatten(-1, (3, 20)))
    compare(out, norm_formula(x.transpose(1, 2), weight, gate.view(2, 50, 3, 20), F.silu, 1e-6), [x, weight, gate])
    assert out.is_contiguous()


def test_other_layouts(backend):
    x, gate, weight = draw(5, 40, 8), draw(5, 40, 8), draw(20)
    for view in (
        lambda y: y.mT[..., :20],  # columns far from each other
        lambda y: y.mT[:, ::2, 20:],
        lambda y: y.mT.contiguous()[..., 1:21],
        lambda y: y.mT.expand(3, 5, 8, 40)[..., :20],  # the same rows several times
        lambda y: y.view(5, 2, 20, 8).permute(3, 0, 1, 2),
    ):
        found = rows.rms_norm(view(x), weight, 1e-6, view(gate))
        compare(found, norm_formula(view(x), weight, view(gate), F.silu, 1e-6), [x, weight, gate])
    for lonely in (
        x[:1, :20].mT,
        x[0, 0, :1].expand(3, 20),
        x.flatten()[::2][:20],
        x.as_strided((2, 2, 4, 20), (1, 2, 3, 1)),
    ):
        found = rows.rms_norm(lonely, weight, 1e-6)
        compare(found, norm_formula(lonely, weight, None, None, 1e-6), [x, weight])
    odd = x.mT[..., ::2]
    compare(rows.gated_silu(odd), F.silu(odd[..., :10]) * odd[..., 10:], [x])


SIZES = [(6, 4), (4, 6), (1, 6, 4), (2, 3, 4), (3, 2, 4), (4, 3, 2), (2, 1, 4), (4,), (1,), (), (2, 3, 1), (0, 4)]


@looped("of_x", [shape for shape in SIZES if shape])
@looped("of_gate", SIZES)
def test_a_gate_of_another_shape_is_broadcast_or_refused(backend, of_x, of_gate):
    x, weight, gate = draw(*of_x), draw(of_x[-1]), draw(*of_gate)
    try:
        expected = norm_formula(x, weight, gate, F.silu, 0.3)
    except RuntimeError:
        sentence = f"gate must have the shape of x = {of_x}, or one that is broadcast with it, got {of_gate}"
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            rows.rms_norm(x, weight, 0.3, gate)
    else:
        compare(rows.rms_norm(x, weight, 0.3, gate), expected, [x, weight, gate])


REFUSED = [
    (rows.gated_silu, [(2, 3)], "x must have shape (..., 2 F), got (2, 3)"),
    (rows.gated_silu, [(2, 1)], "x must have shape (..., 2 F), got (2, 1)"),
    (rows.gated_silu, [()], "x must have shape (..., 2 F), got ()"),
    (lambda x: rows.unit_length(x, 0.3), [()], "x must have shape (..., D), got ()"),
    (lambda x, weight: rows.rms_norm(x, weight, 0.3), [(), (1,)], "x must have shape (..., D), got ()"),
    (lambda x, weight: rows.rms_norm(x, weight, 0.3), [(3, 4), (1,)], "weight must have shape (D = 4), got (1,)"),
    (lambda x, weight: rows.rms_norm(x, weight, 0.3), [(3, 4), (3, 4)], "weight must have shape (D = 4), got (3, 4)"),
]


@looped("compute, shapes, sentence", REFUSED)
def test_other_shapes_are_refused(backend, compute, shapes, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        compute(*(draw(*shape) for shape in shapes))


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_in_other_dtypes_are_rounded_once(dtype):
    x, gate, weight = (draw(*shape, dtype=dtype).detach() for shape in ((9, 130), (9, 130), (130,)))
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    if dtype == torch.float16:  # there is no kernel, and PyTorch rounds the parts of a result
        tolerance *= 3
    wide = [y.double() for y in (x, weight, gate)]
    found = {
        "SwiGLU": (rows.gated_silu(x), F.silu(wide[0][:, :65]) * wide[0][:, 65:]),
        "gated": (rows.rms_norm(x, weight, 1e-6, gate), norm_formula(*wide, F.silu, 1e-6)),
        "length": (rows.unit_length(x, 1e-6), F.normalize(wide[0], dim=-1)),
    }
    for out, exact in found.values():
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=1e-6)


def test_gradients_in_bfloat16():
    x, gate, weight = (draw(*shape, dtype=torch.bfloat16) for shape in ((9, 130), (9, 130), (130,)))
    wide = [y.detach().double().requires_grad_() for y in (x, weight, gate)]
    weights = torch.randn(9, 130).bfloat16()
    found = torch.autograd.grad(rows.rms_norm(x, weight, 1e-6, gate), (x, weight, gate), weights)
    exact = torch.autograd.grad(norm_formula(*wide, F.silu, 1e-6), wide, weights.double())
    for gradient, right in zip(found, exact, strict=True):
        torch.testing.assert_close(gradient.double(), right, rtol=2**-8, atol=2**-8 * right.abs().max().item() / 16)


def test_silu_of_any_number():
    steps = torch.linspace(-120, 120, 200_001)
    x = torch.cat([steps, torch.tensor([0.0, -0.0, 1e-30, 1e30, torch.inf, -1e38, -torch.inf])]).requires_grad_()
    y = rows.gated_silu(torch.stack([x, torch.ones_like(x)], -1)).squeeze(-1)
    exact = F.silu(x.double())
    torch.testing.assert_close(y.double(), exact, rtol=3e-7, atol=1e-36, equal_nan=True)
    assert torch.equal(y[-7:-5], torch.zeros(2))
    gradients = (torch.autograd.grad(out.sum(), x)[0][x.isfinite()] for out in (y, exact))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
    for dtype in rows.DTYPES:
        given = torch.tensor([[torch.nan, 1.0], [1.0, torch.nan], [1.0, 1.0]], dtype=dtype)
        assert rows.gated_silu(given).isnan().flatten().tolist() == [True, True, False]
    any_nan = torch.tensor([0x7FC00001, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32).unsqueeze(1)
    assert rows.rms_norm(torch.ones(3, 1), torch.ones(1), 1e-5, any_nan, torch.sigmoid).isnan().all()


def test_second_derivatives():
    x, weight, gate = draw(3, 4), draw(4), draw(3, 4)
    assert torch.autograd.gradgradcheck(rows.gated_silu, x)
    assert torch.autograd.gradgradcheck(lambda *given: rows.rms_norm(*given[:2], 0.1, given[2]), (x, weight, gate))
    assert torch.autograd.gradgradcheck(lambda x: rows.rms_norm(x, weight.detach(), 0.1), x)
    assert torch.autograd.gradgradcheck(lambda x: rows.unit_length(x, 0.1), x)


def test_gradients_with_a_graph_are_those_without():
    """Also where an input depends on another one: that is another operation's part of the gradient."""
    x, weight, gate = draw(1, 3, 2, 4), draw(4), draw(1, 3, 2, 4)
    for out in (
        lambda: rows.rms_norm(rows.rms_norm(x, weight, 0.1), weight, 0.1),
        lambda: rows.rms_norm(x, weight, 0.1, gate * x),
        lambda: rows.rms_norm(x, x.mean((0, 1, 2)) + weight, 0.1, gate),
        lambda: rows.unit_length(rows.gated_silu(rows.gated_silu(x)), 0.1) * weight.sum() * gate.sum(),
    ):
        gradients = [
            torch.autograd.grad(out().pow(3).sum(), (x, weight, gate), create_graph=graph, materialize_grads=True)
            for graph in (False, True)
        ]
        torch.testing.assert_close(*gradients)


def test_threads_and_batches_change_no_bit():
    x, weight, gate = (draw(*shape, dtype=torch.float32) for shape in ((3, 200, 300), (300,), (3, 200, 300)))

    def compute():
        outs = rows.rms_norm(x, weight, 1e-6, gate), rows.gated_silu(x)
        return [*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), (x, weight, gate))]

    found = on_one_and_three_threads(compute)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(rows.rms_norm(x[1:2, 7:], weight, 1e-6, gate[1:2, 7:]), found[0][0][1:2, 7:])
    assert torch.equal(rows.gated_silu(x[2, 199]), found[0][1][2, 199])


def test_transforms_compilation_and_empty_rows():
    x, weight, gate = draw(2, 3, 4), draw(4), draw(2, 3, 4)

    def both(x, gate):
        return rows.gated_silu(x), rows.rms_norm(x, weight, 1e-6, gate), rows.unit_length(x, 1e-6)

    expected = both(x, gate)
    torch.testing.assert_close(torch.vmap(both)(x, gate), expected)
    torch.testing.assert_close(torch.compile(both, backend="aot_eager", fullgraph=True)(x, gate), expected)
    assert [y.shape for y in both(x[:, :0], gate[:, :0])] == [(2, 0, 2), (2, 0, 4), (2, 0, 4)]
    with torch._subclasses.FakeTensorMode() as mode:
        assert rows.gated_silu(mode.from_tensor(x)).shape == (2, 3, 2)


def test_operators_name_what_they_take():
    x = torch.randn(3, 4)
    rows.gated_silu(x)
    heads = x.view(1, 3, 1, 4)
    for wrong, words in {
        lambda: torch.ops.fwp.gated_silu(x[:, :3]): "even number of columns",
        lambda: torch.ops.fwp.gated_silu(x.half()): "float32, float64 or bfloat16",
        lambda: torch.ops.fwp.gated_silu(torch.randn(4, 3).t()): "must be contiguous",
        lambda: torch.ops.fwp.normalize_rows(x, None, None, "silu", 1.0, 0.0): "shape",
        lambda: torch.ops.fwp.normalize_rows(heads, x[0, :3], None, "silu", 1.0, 0.0): "weight must be contiguous",
        lambda: torch.ops.fwp.normalize_rows(heads, None, heads, "tanh", 1.0, 0.0): "silu or sigmoid",
    }.items():
        with pytest.raises(RuntimeError, match=words):
            wrong()
    empty = torch.randn(4, 2, 3, 0).mT  # whose strides have no meaning
    assert torch.ops.fwp.normalize_rows(empty, None, None, "silu", 1.0, 0.0).shape == (4, 2, 0, 3)
