"""float32 linear layers on a CPU through oneDNN, if torch's own library is slow.

torch multiplies float32 matrices with MKL, which on processors other than Intel's leaves AVX-512 unused: on one core
of an AMD EPYC it reaches 95 GFLOP/s, oneDNN 215. The products of both are equally exact.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# With fewer rows, oneDNN is not faster than MKL (measured with 128 to 512 columns).
MIN_ROWS = 256


class Projection(nn.Linear):
    """torch's layer without registering a missing bias: fairseq would treat all missing biases as one shared bias."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        if not bias:
            del self._parameters["bias"]
            self.bias = None  # type: ignore[assignment]


class Linear(Projection):
    """The same, through oneDNN where that is faster; see `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, through oneDNN for float32 and MIN_ROWS rows or more on a CPU of AMD's.

    Use it if numbers of rows repeat: oneDNN takes 0.5 to 1 ms to prepare for each new number.
    """
    if x.numel() < MIN_ROWS * x.shape[-1] or not _is_taken_over(x, weight) or not mkl_is_slow():
        return F.linear(x, weight, bias)
    return _through_onednn(x, weight, bias)


class OneDnnLinear(TorchFunctionMode):
    """`with OneDnnLinear(): ...` sends every float32 `F.linear` on a CPU, also in fairseq's modules, to oneDNN.

    Gradients use oneDNN too. Second derivatives, other devices and other dtypes use torch.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs and _is_taken_over(*args[:2]):
            return _through_onednn(*args)
        return func(*args, **(kwargs or {}))


@cache
def mkl_is_slow() -> bool:
    """Return whether this processor is one of AMD's, as Linux names it."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@cache
def _is_available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_taken_over(x: Tensor, weight: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and _is_available()
    )


def _through_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.is_grad_enabled():
        # Rows, so that no view is made inside: it could not be changed in place.
        return _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))
    return _product(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # A weight with gaps between its rows, like the gradient of part of the logits, takes a thousand times as long.
    if not (weight.is_contiguous() or weight.T.is_contiguous()):
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """x weight^T + bias for rows x (N, columns), with derivatives of any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        # A graph of the gradients needs their own derivatives, and oneDNN cannot sum over zero rows.
        product = F.linear if torch.is_grad_enabled() or not len(grad) else _product
        return (
            product(grad, weight.T) if of_x else None,
            # The first factor is copied, so it is the narrower one.
            (product(grad.T, x.T) if len(weight) <= x.shape[1] else product(x.T, grad.T).T) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )
