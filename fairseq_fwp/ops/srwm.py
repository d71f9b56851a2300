"""Self-referential weight matrices, which compute outputs and what they write into themselves.

Irie, Schlag, Csordas & Schmidhuber 2022, "A Modern Self-Referential Weight Matrix That Learns to Modify Itself" (arXiv
2202.05780). They run token by token, with a kernel on a CPU. Elsewhere, and without a compiler, PyTorch computes the
definition.

Shapes: B batch, L tokens, H heads, d numbers of a head, n = 3 d + 4 columns of its matrix.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .arguments import expect_shape, outer, retrieve, state_dtype
from .fast_weights import KEPT_EVERY
from .kernels.backend import kernel_ready
from .operator import Context, define, refuse_double_backward
from .recurrent_delta import FIRST, PADDING, marks_of
from .rule import is_transformed


def srwm(
    x: Tensor,
    weights: Tensor,
    change: Tensor | None = None,
    *,
    first: Tensor | None = None,
    padding: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return y (B, L, H, d), and after the last token the change (B, H, d, n) of the matrices.

        [y_t q k b] = x_t W_{t-1}        q and k softmax, b sigmoid
        W_t = W_{t-1} + k^T b ((q - k) W_{t-1})

    The four b are the rates of the columns of y, q, k and b. W_0 is weights + change. All but float64 is computed in
    float32, and so are the results.

    x: (B, L, H, d); weights: (H, d, n), for each head the columns of y, q, k and b; change (B, H, d, n): before the
    first token, None = zeros.
    first (B, L), bool: tokens before which the change is zero; padding (B, L), bool: tokens that change nothing, whose
    y is zero.
    backend: "reference" is the definition, which can be differentiated any number of times; any other: the kernel, on a
    CPU.

    Raises ValueError for other shapes, and TypeError for numbers that are not real or masks that are not bool.
    """
    if not x.is_floating_point():
        raise TypeError(f"x must be floating-point, got {x.dtype}")
    expect_shape("x", x, B=None, L=None, H=None, d=None)
    batch, length, heads, dim = x.shape
    if dim == 0:
        raise ValueError("x must have at least one number for each head, got none")
    dtype, columns = state_dtype(x.dtype), 3 * dim + 4
    expect_shape("weights", weights, H=heads, d=dim, columns=columns)
    change = x.new_zeros(batch, heads, dim, columns, dtype=dtype) if change is None else change
    expect_shape("change", change, B=batch, H=heads, d=dim, columns=columns)
    marks = marks_of(first, padding, batch, length)
    x, weights, change = (part.to(dtype).contiguous() for part in (x, weights, change))
    if backend == "reference" or is_transformed() or not x.is_cpu:
        return definition(x, weights, change, marks)
    keeps = torch.is_grad_enabled() and any(part.requires_grad for part in (x, weights, change))
    out, change, *_ = _forward(x, weights, change, marks, keeps)
    return out, change


def definition(x: Tensor, weights: Tensor, change: Tensor, marks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return y and the change after the last token, token by token in PyTorch."""
    dim, outs = x.shape[-1], []
    sizes = [dim, dim, dim, 4]
    for t in range(x.shape[1]):
        if marks is not None:
            change = change.masked_fill((marks[:, t] & FIRST).bool()[:, None, None, None], 0)
        matrix = weights + change
        y, q, k, b = retrieve(x[:, t], matrix).split(sizes, dim=-1)
        k = k.softmax(-1)
        rates = torch.cat([b[..., :3].repeat_interleave(dim, -1), b[..., 3:].expand(*b.shape[:-1], 4)], dim=-1)
        after = change + outer(k, rates.sigmoid() * retrieve(q.softmax(-1) - k, matrix))
        if marks is not None:
            padded = (marks[:, t] & PADDING).bool()[:, None, None]
            after, y = torch.where(padded[..., None], change, after), torch.where(padded, 0, y)
        change = after
        outs.append(y)
    return torch.stack(outs, 1) if outs else torch.zeros_like(x), change


@define(
    "srwm", "(Tensor x, Tensor weights, Tensor change, Tensor? marks, bool keeps) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _forward(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Return y, the change, and for the backward pass q, k, b and (q - k) W of each token, and the change of chunks."""
    if x.device.type == "cpu" and kernel_ready("cpu"):
        return torch.ops.fwp.srwm(x, *given)
    return without_kernel(x, *given)


def without_kernel(x: Tensor, weights: Tensor, change: Tensor, marks: Tensor | None, keeps: bool) -> tuple[Tensor, ...]:
    """Return the same from the definition, whose backward pass needs nothing more."""
    out, last = definition(x, weights, change, marks)
    return out, last.clone(), *_room(x, change, keeps)


@define(
    "srwm_backward",
    "(Tensor x, Tensor weights, Tensor change, Tensor? marks, Tensor last, Tensor saved, Tensor kept, Tensor d_out, "
    "Tensor d_last) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    x: Tensor, weights: Tensor, change: Tensor, marks: Tensor | None, last: Tensor, *saved_kept_and_gradients: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of x, the weights and the change before the first token."""
    cotangents = saved_kept_and_gradients[2:]
    gradients: tuple[Tensor, ...] = torch.func.vjp(partial(definition, marks=marks), x, weights, change)[1](cotangents)
    return gradients


def _room(x: Tensor, change: Tensor, keeps: bool) -> tuple[Tensor, Tensor]:
    """Return what is saved of tokens (B, L, H, 5 d + 8), and the change (B, H, chunks, d, n) before each chunk."""
    batch, length, heads, dim = x.shape
    batch, chunks = batch if keeps else 0, (length + KEPT_EVERY - 1) // KEPT_EVERY
    return x.new_empty(batch, length, heads, 5 * dim + 8), x.new_empty(batch, heads, chunks, *change.shape[2:])


@torch.library.register_fake(_forward)
def _(x: Tensor, _: Tensor, change: Tensor, __: None, keeps: bool) -> tuple[Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(change), *_room(x, change, keeps)


@torch.library.register_fake(_backward)
def _(x: Tensor, weights: Tensor, change: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(weights), torch.empty_like(change)


def _setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, last, saved, kept = output
    ctx.mark_non_differentiable(saved, kept)
    ctx.save_for_backward(*inputs[:4], last, saved, kept)


def _differentiate(ctx: Context, d_out: Tensor, d_last: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    return *_backward(*ctx.saved_tensors, d_out.contiguous(), d_last.contiguous()), None, None


torch.library.register_autograd(_forward, _differentiate, setup_context=_setup_context)
refuse_double_backward(_backward)
