"""oneDNN's linear layers: what they take over, and that they compute the same."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_fwp.modules.onednn import OneDnnLinear


class Calls(TorchDispatchMode):
    """The names of all operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def linear(x, weight, bias):
    """The product, and whether oneDNN computed it."""
    with OneDnnLinear(), Calls() as calls:
        return F.linear(x, weight, bias), any("mkldnn" in name for name in calls.names)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 7, 33), (1, 33), (33,), (0, 33)])
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


@pytest.mark.parametrize("dtype, gradients", [(torch.float32, True), (torch.float64, False), (torch.bfloat16, False)])
def test_the_rest_goes_torchs_way(dtype, gradients):
    x, weight = torch.randn(3, 4, dtype=dtype), torch.randn(5, 4, dtype=dtype, requires_grad=gradients)
    with torch.set_grad_enabled(gradients):
        actual, taken_over = linear(x, weight, None)
    assert not taken_over and actual.requires_grad == gradients
    torch.testing.assert_close(actual, F.linear(x, weight))
