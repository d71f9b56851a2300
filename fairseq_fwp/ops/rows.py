"""Normalisation and gates of rows of numbers, as layers of today's models have around their rule.

On a CPU, kernels compute each in one pass over memory. On other devices, without a compiler, in compiled graphs, under
transforms of torch.func and for float16, PyTorch computes the same. All but float64 is computed in float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .arguments import at_least_float32, expect_shape, state_dtype
from .operator import declare, differentiate_definition, suits_kernel

Opening: TypeAlias = Callable[[Tensor], Tensor]
OPENINGS: dict[Opening, str] = {F.silu: "silu", torch.sigmoid: "sigmoid"}  # those that kernels know, with their names
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

_forward_silu = declare("gated_silu", "(Tensor x) -> Tensor")
_backward_silu = declare("gated_silu_backward", "(Tensor x, Tensor grad_out) -> Tensor")
_ARGUMENTS = "Tensor x, Tensor? weight, Tensor? gate, str opening, float factor, float epsilon"
_forward_rows = declare("normalize_rows", f"({_ARGUMENTS}) -> Tensor")
_backward_rows = declare("normalize_rows_backward", f"({_ARGUMENTS}, Tensor grad_out) -> (Tensor, Tensor, Tensor)")


def gated_silu(x: Tensor) -> Tensor:
    """Return SiLU(x_1) * x_2 (..., F) for x = [x_1; x_2] (..., 2 F): Shazeer 2020, arXiv 2002.05202, Eq. 6.

    Raises ValueError for an odd number of columns.
    """
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"x must have shape (..., 2 F), got {tuple(x.shape)}")
    result: Tensor = _GatedSilu.apply(x.contiguous()) if _has_kernel(x) else _define_gated_silu(x)
    return result


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, gate: Tensor | None = None, opening: Opening = F.silu
) -> Tensor:
    """Return x / sqrt(mean of x_i^2 + epsilon) * weight * opening(gate), with means over the last dimension.

    x: (..., D); weight: (D,); gate: (..., D), or of another shape that PyTorch broadcasts with that of x. The result is
    in x's dtype. Raises ValueError for other shapes.

    Zhang & Sennrich 2019, arXiv 1910.07467, Eq. 4; the gate as in Yang et al. 2024, arXiv 2312.06635, Sec. 4.4.
    """
    _expect_rows(x)
    expect_shape("weight", weight, D=x.shape[-1])
    if gate is not None and gate.shape != x.shape:
        try:
            x, gate = torch.broadcast_tensors(x, gate)
        except RuntimeError:
            shapes = f"{tuple(x.shape)}, or one that is broadcast with it, got {tuple(gate.shape)}"
            raise ValueError(f"gate must have the shape of x = {shapes}") from None
        weight = weight.expand(x.shape[-1])
    if _has_kernel(x) and opening in OPENINGS:
        return _normalize(x, weight, gate, opening, 1 / x.shape[-1], epsilon)
    normal = F.rms_norm(x, x.shape[-1:], weight, epsilon)
    return normal if gate is None else (normal * opening(gate)).to(x.dtype)


def unit_length(x: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(sum of x_i^2 + epsilon) (..., D), with sums over the last dimension.

    Raises ValueError for a single number.
    """
    _expect_rows(x)
    compute = _normalize if _has_kernel(x) else _define_normalized
    return compute(x, None, None, F.silu, 1.0, epsilon)


def _expect_rows(x: Tensor) -> None:
    if x.dim() == 0:
        raise ValueError("x must have shape (..., D), got ()")


def _has_kernel(x: Tensor) -> bool:
    return x.numel() > 0 and suits_kernel(x, "cpu", DTYPES)


def _normalize(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, opening: Opening, factor: float, epsilon: float
) -> Tensor:
    # The operator takes rows (B, L, H, D) with any strides but the last. Heads come before tokens in memory.
    rows = x if x.dim() == 4 else x.reshape(1, -1, 1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    weight = None if weight is None else weight.to(state_dtype(x.dtype)).contiguous()
    gate = None if gate is None else gate.to(x.dtype).reshape(rows.shape).contiguous()
    out: Tensor = _NormalizedRows.apply(rows, weight, gate, opening, factor, epsilon)
    return out.view(x.shape)


def _define_gated_silu(x: Tensor) -> Tensor:
    gate, y = x.chunk(2, -1)
    return F.silu(gate) * y


def _define_normalized(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, opening: Opening, factor: float, epsilon: float
) -> Tensor:
    wide = at_least_float32(x)
    out = wide * (factor * wide.square().sum(-1, keepdim=True) + epsilon).rsqrt()
    out = out if weight is None else out * weight
    return (out if gate is None else out * opening(at_least_float32(gate))).to(x.dtype)


class _GatedSilu(torch.autograd.Function):
    """The operator of `gated_silu`, whose gradient can be differentiated again."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out: Tensor = _forward_silu(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            (d_x,) = differentiate_definition(_define_gated_silu, (x,), (True,), grad)
        else:
            d_x = _backward_silu(x, grad.contiguous())
        return d_x


class _NormalizedRows(torch.autograd.Function):
    """The operator of `rms_norm` and `unit_length`, whose gradient can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, gate: Tensor | None, opening: Opening, factor: float, epsilon: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.opening, ctx.factor, ctx.epsilon = opening, factor, epsilon
        out: Tensor = _forward_rows(x, weight, gate, OPENINGS[opening], factor, epsilon)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = tensors = ctx.saved_tensors
        opening, factor, epsilon = ctx.opening, ctx.factor, ctx.epsilon
        if torch.is_grad_enabled():
            define = partial(_define_normalized, opening=opening, factor=factor, epsilon=epsilon)
            gradients = differentiate_definition(define, tensors, ctx.needs_input_grad[:3], grad)
        else:
            settings = OPENINGS[opening], factor, epsilon
            computed = _backward_rows(x, weight, gate, *settings, grad.contiguous())
            gradients = [d_y if y is not None else None for d_y, y in zip(computed, tensors, strict=True)]
        return *gradients, None, None, None
