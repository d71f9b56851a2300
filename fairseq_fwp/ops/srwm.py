"""Self-referential weight matrices, which compute outputs and what they write into themselves.

Irie et al. 2022, arXiv 2202.05780. They run token by token, with a kernel on a CPU; elsewhere in PyTorch. Shapes: B
batch, L tokens, H heads, d numbers of a head, n = 3 d + 4 columns of its matrix: those of y, q, k and b.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .arguments import expect_shape, outer, retrieve, state_dtype
from .fast_weights import KEPT_EVERY
from .kernels.backend import kernel_ready
from .operator import Context, define, is_transformed, needs_gradient, refuse_double_backward
from .sequential import FIRST, PADDING, check_inputs, marks_of, without_padding


def srwm(
    x: Tensor,
    weights: Tensor,
    change: Tensor | None = None,
    *,
    first: Tensor | None = None,
    padding: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return y (B, L, H, d), and the change (B, H, d, n) of the matrices after the last token.

        [y_t q k b] = x_t W_{t-1}        q and k softmax, b sigmoid
        W_t = W_{t-1} + k^T b ((q - k) W_{t-1})

    The four b are the rates of the columns of y, q, k and b. W_0 is weights + change. All but float64 is computed in
    float32, and so are the results.

    x: (B, L, H, d); weights: (H, d, n); change (B, H, d, n): before the first token, None = zeros.
    first (B, L), bool: tokens before which the change is zero; padding (B, L), bool: tokens that change nothing, whose
    y is zero.
    backend: as for `recurrent_delta`, which raises the same errors. Only a CPU has a kernel.
    """
    check_inputs(x, backend, weights=weights, change=change)
    expect_shape("x", x, B=None, L=None, H=None, d=None)
    batch, length, heads, dim = x.shape
    expect_shape("weights", weights, H=heads, d=dim, columns=3 * dim + 4)
    change = x.new_zeros(batch, *weights.shape) if change is None else change
    expect_shape("change", change, B=batch, H=heads, d=dim, columns=3 * dim + 4)
    marks = marks_of(first, padding, batch, length)
    x, weights, change = (part.to(state_dtype(x.dtype)).contiguous() for part in (x, weights, change))
    if backend == "kernel" and not x.is_cpu:
        raise RuntimeError(f"no compiled kernel for {x.device.type}: srwm has one for a CPU; choose the backend auto")
    if backend == "reference" or is_transformed() or not x.is_cpu:
        return definition(x, weights, change, marks)
    return _forward(x, weights, change, marks, needs_gradient(x, weights, change))[:2]


def definition(x: Tensor, weights: Tensor, change: Tensor, marks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return y and the change after the last token, token by token in PyTorch."""
    x, dim, outs = without_padding(x, marks), x.shape[-1], []
    for t in range(x.shape[1]):
        if marks is not None:
            change = change.masked_fill((marks[:, t] & FIRST).bool()[:, None, None, None], 0)
        matrix = weights + change
        y, q, k, b = retrieve(x[:, t], matrix).split([dim, dim, dim, 4], dim=-1)
        k, b = k.softmax(-1), b.sigmoid()
        rates = torch.cat([b[..., :3].repeat_interleave(dim, -1), b[..., 3:].expand_as(b)], dim=-1)
        after = change + outer(k, rates * retrieve(q.softmax(-1) - k, matrix))
        if marks is not None:
            padded = (marks[:, t] & PADDING).bool()[:, None, None]
            after, y = torch.where(padded[..., None], change, after), torch.where(padded, 0, y)
        change = after
        outs.append(y)
    return torch.stack(outs, 1) if outs else torch.zeros_like(x), change


_INPUTS = "Tensor x, Tensor weights, Tensor change, Tensor? marks"


@define("srwm", f"({_INPUTS}, bool keeps) -> (Tensor, Tensor, Tensor)")
def _forward(x: Tensor, weights: Tensor, change: Tensor, marks: Tensor | None, keeps: bool) -> tuple[Tensor, ...]:
    """Return y, the change, and what the kernel saves for its backward pass."""
    if x.device.type == "cpu" and kernel_ready("cpu"):
        return torch.ops.fwp.srwm(x, weights, change, marks, keeps)
    out, last = definition(x, weights, change, marks)
    return out, last.clone(), _room(x, keeps)


@define(
    "srwm_backward", f"({_INPUTS}, Tensor last, Tensor saved, Tensor d_out, Tensor d_last) -> (Tensor, Tensor, Tensor)"
)
def _backward(*given: Any) -> tuple[Tensor, ...]:
    """Return the gradients of x, the weights and the change before the first token."""
    *inputs, marks, _, _, d_out, d_last = given
    gradients: tuple[Tensor, ...] = torch.func.vjp(partial(definition, marks=marks), *inputs)[1]((d_out, d_last))
    return gradients


def _room(x: Tensor, keeps: bool) -> Tensor:
    """Return room for q, k, b and (q - k) W of all tokens, and the change before each chunk."""
    batch, length, heads, dim = x.shape
    numbers = length * (5 * dim + 8) - (-length // KEPT_EVERY) * dim * (3 * dim + 4)
    return x.new_empty(batch if keeps else 0, heads, numbers)


@torch.library.register_fake(_forward)
def _(x: Tensor, _: Tensor, change: Tensor, __: None, keeps: bool) -> tuple[Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(change), _room(x, keeps)


torch.library.register_fake(_backward, lambda *given: tuple(map(torch.empty_like, given[:3])))


def _setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*inputs[:4], *output[1:])


def _differentiate(ctx: Context, d_out: Tensor, d_last: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    return *_backward(*ctx.saved_tensors, d_out.contiguous(), d_last.contiguous()), None, None


torch.library.register_autograd(_forward, _differentiate, setup_context=_setup_context)
refuse_double_backward(_backward)
