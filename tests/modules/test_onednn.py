"""oneDNN's linear layers: which ones are replaced, and equal results."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.pairwise import looped
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_fwp.modules import onednn
from fairseq_fwp.modules.onednn import MIN_ROWS, OneDnnLinear, faster_linear


class Calls(TorchDispatchMode):
    """Record the names of all operators that run, and the weights of oneDNN's."""

    def __init__(self):
        super().__init__()
        self.names, self.weights = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        if "mkldnn" in str(func):
            self.weights.append(args[1])
        return func(*args, **(kwargs or {}))


def derivatives(layer, x):
    """Return outputs and the gradients of inputs and parameters, of first and of second order."""
    x = x.clone().requires_grad_()
    inputs, out = [x, *layer.parameters()], layer(x)
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(value.square().sum() for value in first), inputs)
    return [out, *torch.autograd.grad(layer(x).square().sum(), inputs), *first, *second]


@looped("bias", [True, False])
@looped("shape", [(3, 7, 24), (5, 24), (1, 24), (24,), (0, 24)])
@looped("columns", [8, 40])
def test_it_computes_what_torch_does(columns, shape, bias):
    """Outputs and gradients of both orders agree with float64, also without any rows."""
    layer, x = nn.Linear(24, columns, bias=bias), torch.randn(shape)
    with OneDnnLinear(), Calls() as calls:
        found = derivatives(layer, x)
    assert any("mkldnn" in name for name in calls.names)
    for value, expected in zip(found, derivatives(layer.double(), x.double()), strict=True):
        allowed = 1e-4 * expected.abs().max().item() if expected.numel() else 0
        torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=allowed)


def test_weights_have_no_gaps():
    """Weights with gaps, such as a part of a matrix or of the logits' gradient, are copied: oneDNN is slow on them."""
    for x, weight in (
        (torch.randn(9, 4), torch.randn(12, 6)[:, :4]),
        (torch.randn(6, 9, 4).transpose(0, 2), torch.randn(6, 20).T[:12]),
    ):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        with OneDnnLinear(), Calls() as calls:
            logits = torch.cat([F.linear(x, weight), torch.zeros(*x.shape[:-1], 3)], -1)
            found = torch.autograd.grad(logits.square().sum(), [x, weight])
        assert calls.weights
        assert all(weight.is_contiguous() or weight.T.is_contiguous() for weight in calls.weights)
        torch.testing.assert_close(found, torch.autograd.grad((x @ weight.T).square().sum(), [x, weight]))


@looped("dtype, gradients", [(torch.float64, True), (torch.float64, False), (torch.bfloat16, False)])
def test_the_rest_goes_torchs_way(dtype, gradients):
    x, weight = torch.randn(3, 4, dtype=dtype), torch.randn(5, 4, dtype=dtype, requires_grad=gradients)
    with torch.set_grad_enabled(gradients), OneDnnLinear(), Calls() as calls:
        found = F.linear(x, weight)
    assert not calls.weights and found.requires_grad == gradients
    torch.testing.assert_close(found, F.linear(x, weight))


def test_what_it_returns_can_be_changed_in_place():
    """torch's attention does so."""
    layer, x = nn.Linear(24, 40), torch.randn(3, 7, 24)
    with OneDnnLinear():
        layer(x).mul_(2).sum().backward()
    found = layer.weight.grad.clone()
    layer.zero_grad()
    (2 * layer(x)).sum().backward()
    torch.testing.assert_close(found, layer.weight.grad)


def test_no_gradient_of_a_frozen_weight_is_computed():
    layer, x = nn.Linear(24, 40).requires_grad_(False), torch.randn(7, 24, requires_grad=True)
    with OneDnnLinear(), Calls() as calls:
        torch.autograd.grad(layer(x).sum(), x)
    products = [name for name in calls.names if "mkldnn" in name or "mm" in name]
    assert len(products) == 2  # the layer's own, and the gradient of x


@looped("is_slow", [True, False])
@looped("rows", [MIN_ROWS - 1, MIN_ROWS])
def test_a_layer_takes_onednn_where_it_is_faster(rows, is_slow, monkeypatch):
    monkeypatch.setattr(onednn, "mkl_is_slow", lambda: is_slow)
    with faster_linear(rows), Calls() as calls:
        nn.Linear(24, 40)(torch.randn(rows, 24))
    assert bool(calls.weights) == (is_slow and rows == MIN_ROWS)


@looped(
    "flags, is_slow",
    [
        ("vendor_id : AuthenticAMD\nflags : fpu avx2 avx512f avx512vl\n", True),
        ("vendor_id : AuthenticAMD\nflags : fpu avx avx2\n", False),
        ("vendor_id : GenuineIntel\nflags : fpu avx2 avx512f\n", False),
    ],
)
def test_mkl_is_slow_where_it_leaves_wide_vectors_unused(flags, is_slow):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self: flags)
        assert onednn.mkl_is_slow.__wrapped__() == is_slow


def test_autocast_keeps_its_type():
    with OneDnnLinear(), torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(24, 40)(torch.randn(MIN_ROWS, 24)).dtype == torch.bfloat16


def test_transforms_of_functions_go_torchs_way():
    """Gradients of each sample, forward mode, and vectors of a whole Jacobian at once."""
    layer = nn.Linear(4, 3).requires_grad_(False)
    x, tangent = torch.randn(5, MIN_ROWS, 4), torch.randn(5, MIN_ROWS, 4)
    rows = x[0, :2]
    with OneDnnLinear():
        by_sample = torch.func.vmap(torch.func.grad(lambda x: layer(x).square().sum()))(x)
        with torch.autograd.forward_ad.dual_level():
            forward = torch.autograd.forward_ad.unpack_dual(layer(torch.autograd.forward_ad.make_dual(x, tangent)))
        jacobian = torch.autograd.functional.jacobian(layer, rows, vectorize=True)
    torch.testing.assert_close(by_sample, 2 * layer(x) @ layer.weight)
    torch.testing.assert_close(forward.tangent, tangent @ layer.weight.T)
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(layer, rows))
