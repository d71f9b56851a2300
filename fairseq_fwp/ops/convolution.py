"""A short causal convolution of each channel, as layers of today's models have before their rule.

Its two operators have kernels for a CPU. Elsewhere, and without a compiler, PyTorch computes the definition.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import expect_shape, state_dtype
from .kernels.backend import kernel_ready
from .operator import Context, define, differentiate_definition, is_transformed


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, sequence: Tensor | None = None) -> Tensor:
    """Return bias + sum_w weight_w * x_{t-W+1+w} for each channel; tokens before the first are zeros.

    x, out: (B, L, D); weight: (D, W); bias: (D,). All but float64 is computed in float32.
    sequence: (B, L), integers: a token does not see those with another number. None: each row is one sequence.

    A depthwise convolution, as in Gu & Dao 2023, "Mamba" (arXiv 2312.00752), before the memory.

    Raises ValueError for other shapes, and TypeError for a sequence of numbers that are no integers.
    """
    _check(x, weight, bias, sequence)
    wide = state_dtype(x.dtype)
    rows = x.to(wide)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()  # there may be gaps between them
    weight, bias = weight.t().to(wide).contiguous(), None if bias is None else bias.to(wide).contiguous()
    sequence = None if sequence is None else sequence.long().contiguous()
    compute = definition if is_transformed() else _forward  # operators have no forward mode, and no vmap
    out: Tensor = compute(rows, weight, bias, sequence).to(x.dtype)
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, sequence: Tensor | None) -> None:
    expect_shape("x", x, B=None, L=None, D=None)
    batch, length, channels = x.shape
    expect_shape("weight", weight, D=channels, W=None)
    if weight.shape[1] == 0:
        raise ValueError("weight must have at least one column, got none")
    if bias is not None:
        expect_shape("bias", bias, D=channels)
    if sequence is not None:
        expect_shape("sequence", sequence, B=batch, L=length)
        if sequence.is_floating_point() or sequence.is_complex():
            raise TypeError(f"sequence must be integers, got {sequence.dtype}")


def definition(x: Tensor, weight: Tensor, bias: Tensor | None, sequence: Tensor | None) -> Tensor:
    """Return the same in PyTorch; weight: (W, D)."""
    parts = (part * w for part, w in zip(_parts(x, weight, sequence), weight, strict=True))
    return sum(parts, x.new_zeros(()) if bias is None else bias)


def _parts(x: Tensor, weight: Tensor, sequence: Tensor | None) -> list[Tensor]:
    """Return, for each weight (D,), the rows of x that tokens see under it, or zeros."""
    width, length = weight.shape[0], x.shape[1]
    seen = F.pad(x, (0, 0, width - 1, 0))
    parts = [seen[:, w : w + length] for w in range(width)]
    if sequence is None:
        return parts
    before = F.pad(sequence, (width - 1, 0))
    same = [(before[:, w : w + length] == sequence).unsqueeze(2) for w in range(width)]
    return [part.where(is_same, 0) for part, is_same in zip(parts, same, strict=True)]


@define("causal_conv1d", "(Tensor x, Tensor weight, Tensor? bias, Tensor? sequence) -> Tensor")
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, sequence: Tensor | None) -> Tensor:
    if x.device.type == "cpu" and kernel_ready("cpu"):
        return torch.ops.fwp.causal_conv1d(x, weight, bias, sequence)
    out = x.new_zeros(x.shape) if bias is None else bias.expand(x.shape).clone()
    for part, w in zip(_parts(x, weight, sequence), weight, strict=True):
        out.addcmul_(part, w)
    return out


@define("causal_conv1d_backward", "(Tensor x, Tensor weight, Tensor? sequence, Tensor grad_out) -> (Tensor, Tensor)")
def _backward(x: Tensor, weight: Tensor, sequence: Tensor | None, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    if x.device.type == "cpu" and kernel_ready("cpu"):
        return torch.ops.fwp.causal_conv1d_backward(x, weight, sequence, grad_out)
    return torch.func.vjp(partial(definition, bias=None, sequence=sequence), x, weight)[1](grad_out)


@torch.library.register_fake(_forward)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, sequence: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake(_backward)
def _(x: Tensor, weight: Tensor, sequence: Tensor | None, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def _setup_context(ctx: Context, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    x, weight, _, sequence = inputs
    ctx.save_for_backward(x, weight, sequence)


def _differentiate(ctx: Context, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, sequence = ctx.saved_tensors
    if torch.is_grad_enabled():
        convolve = partial(definition, bias=None, sequence=sequence)
        d_x, d_weight = differentiate_definition(convolve, (x, weight), ctx.needs_input_grad[:2], grad_out)
    else:
        d_x, d_weight = _backward(x, weight, sequence, grad_out.contiguous())
    return d_x, d_weight, grad_out.sum((0, 1)) if ctx.needs_input_grad[2] else None, None


torch.library.register_autograd(_forward, _differentiate, setup_context=_setup_context)
