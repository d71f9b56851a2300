"""oneDNN's linear layers: which ones are replaced, and equal results."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pairwise import looped
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_fwp.modules import layers
from fairseq_fwp.modules.layers import MIN_ROWS, OneDnnLinear, faster_linear


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


def linear(x, weight, bias):
    """Return the product, and whether oneDNN computed it."""
    with OneDnnLinear(), Calls() as calls:
        return F.linear(x, weight, bias), any("mkldnn" in name for name in calls.names)


@looped("with_bias", [True, False])
@looped("shape", [(5, 7, 33), (1, 33), (33,), (0, 33)])
def test_it_computes_what_torch_does(shape, with_bias):
    weight, bias = torch.randn(50, 33), torch.randn(50) if with_bias else None
    x = torch.randn(shape)
    with torch.no_grad():
        actual, taken_over = linear(x, weight, bias)
    assert taken_over
    expected = F.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


def test_layouts():
    x, weight = torch.randn(6, 9, 4).transpose(0, 2), torch.randn(6, 20).T[:12]
    with torch.no_grad():
        actual, taken_over = linear(x, weight, None)
    assert taken_over
    torch.testing.assert_close(actual, x @ weight.T)


def test_weights_have_no_gaps():
    """Weights with gaps, such as a part of a matrix or of the logits' gradient, are copied: oneDNN is slow on them."""
    x, weight = torch.randn(9, 4, requires_grad=True), torch.randn(12, 6)[:, :4].detach().requires_grad_()
    with OneDnnLinear(), Calls() as calls:
        logits = torch.cat([F.linear(x, weight), torch.zeros(9, 3)], 1)
        found = torch.autograd.grad(logits.square().sum(), [x, weight])
    assert len(calls.weights) == 3
    assert all(weight.is_contiguous() or weight.T.is_contiguous() for weight in calls.weights)
    expected = 2 * x @ weight.T
    torch.testing.assert_close(found, (expected @ weight, expected.T @ x))


@looped("dtype, gradients", [(torch.float64, True), (torch.float64, False), (torch.bfloat16, False)])
def test_the_rest_goes_torchs_way(dtype, gradients):
    x, weight = torch.randn(3, 4, dtype=dtype), torch.randn(5, 4, dtype=dtype, requires_grad=gradients)
    with torch.set_grad_enabled(gradients):
        actual, taken_over = linear(x, weight, None)
    assert not taken_over and actual.requires_grad == gradients
    torch.testing.assert_close(actual, F.linear(x, weight))


@looped("bias", [True, False])
@looped("columns", [8, 40])
def test_gradients_of_both_orders(columns, bias):
    """Gradients of inputs, weights and biases agree with float64; unneeded gradients of weights are not computed."""
    layer, x = nn.Linear(24, columns, bias=bias), torch.randn(3, 7, 24)

    def derivatives(layer, x):
        x = x.clone().requires_grad_()
        inputs = [x, *layer.parameters()]
        first = torch.autograd.grad(layer(x).square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(value.square().sum() for value in first), inputs)
        return [*torch.autograd.grad(layer(x).square().sum(), inputs), *first, *second]

    with OneDnnLinear():
        found = derivatives(layer, x)
    for value, expected in zip(found, derivatives(layer.double(), x.double()), strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=1e-4 * expected.abs().max().item())


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


@pytest.mark.parametrize("is_slow", [True, False])
@pytest.mark.parametrize("rows", [MIN_ROWS - 1, MIN_ROWS])
def test_a_layer_takes_onednn_where_it_is_faster(rows, is_slow, monkeypatch):
    monkeypatch.setattr(layers, "mkl_is_slow", lambda: is_slow)
    layer, x = nn.Linear(24, 40), torch.randn(rows, 24, requires_grad=True)
    with faster_linear(rows), Calls() as calls:
        out = layer(x)
        gradients = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    products = [name for name in calls.names if "mkldnn" in name]
    assert len(products) == (3 if is_slow and rows == MIN_ROWS else 0)
    exact, x64 = nn.Linear(24, 40).double(), x.detach().double().requires_grad_()
    exact.load_state_dict(layer.state_dict())
    expected = exact(x64)
    wanted = torch.autograd.grad(expected.square().sum(), [x64, *exact.parameters()])
    for value, reference in zip((out, *gradients), (expected, *wanted), strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=2e-5, atol=2e-5 * reference.abs().max().item())


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
        assert layers.mkl_is_slow.__wrapped__() == is_slow


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


def test_no_rows_have_gradients():
    layer = torch.nn.Linear(3, 4)
    with OneDnnLinear():
        layer(torch.empty(0, 3)).sum().backward()
    assert not layer.weight.grad.any() and not layer.bias.grad.any()
