"""Linear layers by oneDNN, on processors where torch's are slow."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from fairseq_fwp.ops.operator import is_transformed

# With fewer rows, oneDNN is not faster than MKL (measured with 128 to 512 columns).
MIN_ROWS = 256


def faster_linear(rows: int = MIN_ROWS, device: torch.device | None = None) -> AbstractContextManager[object]:
    """Return a context for linear layers of so many rows: `OneDnnLinear` if that is faster, else one without effect.

    Use it if numbers of rows repeat: oneDNN takes 0.5 to 1 ms to prepare for each new number. device: None = a CPU.
    """
    if torch.compiler.is_compiling() or rows < MIN_ROWS or not mkl_is_slow():
        return nullcontext()
    return OneDnnLinear() if device is None or device.type == "cpu" else nullcontext()


class OneDnnLinear(TorchFunctionMode):
    """`with OneDnnLinear(): ...` sends every float32 `F.linear` on a CPU, also in fairseq's modules, to oneDNN.

    torch multiplies float32 matrices with MKL, which leaves AVX-512 unused on AMD's processors: 95 GFLOP/s on a core of
    an EPYC, and 215 with oneDNN, which is as exact. Gradients use oneDNN too. Second derivatives, torch.func, forward
    mode, other devices and other dtypes use torch.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is not F.linear or kwargs or not _is_taken_over(*args[:2]):
            return func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled():
            return _product(*args)
        # Rows, so that no view is made inside: it could not be changed in place.
        x, weight, *bias = args
        return _Linear.apply(x.reshape(-1, x.shape[-1]), weight, *(bias or [None])).view(*x.shape[:-1], len(weight))


@cache
def mkl_is_slow() -> bool:
    """Return whether this processor is one of AMD's with AVX-512, as Linux describes it."""
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in described and "avx512f" in described


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
        and not is_transformed()
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # A weight with gaps between its rows, like the gradient of part of the logits, takes a thousand times as long.
    if not (weight.is_contiguous() or weight.T.is_contiguous()):
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """x weight^T + bias for rows x (N, columns), with derivatives of any order."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        # A graph of the gradients needs their own derivatives, and oneDNN cannot sum over zero rows.
        product = F.linear if torch.is_grad_enabled() or not len(grad) or is_transformed() else _product
        return (
            product(grad, weight.T) if of_x else None,
            # The first factor is copied, so it is the narrower one.
            (product(grad.T, x.T) if len(weight) <= x.shape[1] else product(x.T, grad.T).T) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )
