"""Linear layers of float32 on a CPU through oneDNN, for evaluation."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OneDnnLinear(TorchFunctionMode):
    """`with OneDnnLinear(): ...` sends `F.linear` to oneDNN, whose products of float32 are as exact as torch's own.

    torch multiplies float32 matrices with MKL, which on processors other than Intel's leaves AVX-512 unused: on one
    core of an AMD EPYC it reaches 95 GFLOP/s, oneDNN 215. Gradients of the inputs are such products too, those of the
    weights and all second derivatives are torch's, and every other device or dtype takes torch's way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and self.available and not kwargs:
            x, weight, *bias = args
            if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32:
                linear: Callable[..., Any] = _Linear.apply if torch.is_grad_enabled() else _product
                return linear(x, weight, bias[0] if bias else None)
        return func(*args, **(kwargs or {}))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """x weight^T + bias, with derivatives of any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        # Where a graph of the gradient is wanted, its own derivatives are too.
        back = torch.matmul if torch.is_grad_enabled() else lambda rows, weight: _product(rows, weight.T)
        return (
            back(rows, weight).view_as(x) if of_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
