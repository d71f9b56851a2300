"""The delta rule whose queries, keys, values and rates see the last output: Recurrent Delta Nets, and Delta RNNs.

Irie, Schlag, Csordas & Schmidhuber 2021, "Going Beyond Linear Transformers with Recurrent Fast Weight Programmers"
(arXiv 2106.06295). It runs token by token: its operators have kernels for a CPU, and for CUDA up to d = 64. Elsewhere,
and without a compiler, PyTorch computes the definition.

Shapes: B batch, L tokens, H heads, d numbers of a head.
"""

from typing import Any

import torch
from torch import Tensor

from .arguments import expect_shape, outer, retrieve, state_dtype
from .fast_weights import KEPT_EVERY
from .kernels import self_check
from .kernels.backend import kernel_ready, warn_of_size
from .operator import Context, define, is_transformed, needs_gradient, refuse_double_backward
from .sequential import FIRST, PADDING, check_inputs, marks_of, without_padding

NAME = "recurrent_delta"  # for the check before the first use
GREATEST = {"cuda": 64}  # d: kGreatestRecurrentDelta of cuda_ext/cuda/recurrent_delta.cuh


def recurrent_delta(
    x: Tensor,
    weights: Tensor | None = None,
    z: Tensor | None = None,
    *,
    memory: Tensor | None = None,
    output: Tensor | None = None,
    first: Tensor | None = None,
    padding: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o (B, L, H, d), and after the last token the memory (B, H, d, d) and the output (B, H, d).

        s = tanh(o_{t-1})        [q k v b] = x_t + s R        q and k softmax, b sigmoid
        W_t = W_{t-1} + k^T b (v - k W_{t-1})                 o_t = z_t + q W_t

    Without R, o_{t-1} is added to x_t where q is. All but float64 is computed in float32, and so are the results.

    x: (B, L, H, 3 d + 1), for each head q, k, v and b; weights: R (H, d, 3 d + 1); z: (B, L, H, d), None = zeros.
    memory (B, H, d, d), output (B, H, d): before the first token, None = zeros.
    first (B, L), bool: tokens before which both are empty; padding (B, L), bool: tokens that change neither.
    backend: "reference" is the definition, which can be differentiated any number of times; any other: the kernel, or
    with a warning the definition where d is too large for it. "kernel" refuses that with a RuntimeError.

    Raises ValueError for other shapes and backends, and TypeError for numbers that are not real or on another device,
    and for masks that are not bool.
    """
    check_inputs(x, backend, weights=weights, z=z, memory=memory, output=output)
    expect_shape("x", x, B=None, L=None, H=None, gates=None)
    batch, length, heads, gates = x.shape
    if gates % 3 != 1 or gates == 1:
        raise ValueError(f"x must have 3 d + 1 numbers for each head, got {gates}")
    dim, dtype = gates // 3, state_dtype(x.dtype)
    memory = x.new_zeros(batch, heads, dim, dim, dtype=dtype) if memory is None else memory
    output = x.new_zeros(batch, heads, dim, dtype=dtype) if output is None else output
    if weights is not None:
        expect_shape("weights", weights, H=heads, d=dim, gates=gates)
    if z is not None:
        expect_shape("z", z, B=batch, L=length, H=heads, d=dim)
    expect_shape("memory", memory, B=batch, H=heads, key=dim, value=dim)
    expect_shape("output", output, B=batch, H=heads, d=dim)
    marks = marks_of(first, padding, batch, length)
    x, memory, output = (part.to(dtype).contiguous() for part in (x, memory, output))
    weights, z = (None if part is None else part.to(dtype).contiguous() for part in (weights, z))
    if backend == "reference" or is_transformed() or _lacks_kernel(output, backend == "kernel"):
        out, memory = definition(x, weights, z, memory, output, marks)
    else:
        keeps = needs_gradient(x, weights, z, memory, output)
        out, memory, *_ = _forward(x, weights, z, memory, output, marks, keeps)
    return out, memory, out[:, -1] if length else output


def _lacks_kernel(output: Tensor, required: bool) -> bool:
    kind, device = output.device.type, str(output.device)
    if kind not in ("cpu", "cuda") or warn_of_size(output, output, required, GREATEST):
        return True
    return kind in self_check.CHECKED and self_check.warn_of_fault(NAME, device, required)


def definition(
    x: Tensor, weights: Tensor | None, z: Tensor | None, memory: Tensor, output: Tensor, marks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return o and the memory after the last token, token by token in PyTorch."""
    x, dim, outs = without_padding(x, marks), output.shape[-1], []
    z = None if z is None else without_padding(z, marks)
    for t in range(x.shape[1]):
        if marks is not None:
            begins = (marks[:, t] & FIRST).bool()[:, None, None]
            memory, output = memory.masked_fill(begins[..., None], 0), output.masked_fill(begins, 0)
        if weights is None:
            logits = torch.cat([x[:, t, :, :dim] + output, x[:, t, :, dim:]], dim=-1)
        else:
            logits = x[:, t] + torch.einsum("bhd,hdg->bhg", output.tanh(), weights)
        q, k, v, b = logits.split([dim, dim, dim, 1], dim=-1)
        k = k.softmax(-1)
        after = memory + outer(k, b.sigmoid() * (v - retrieve(k, memory)))
        new = retrieve(q.softmax(-1), after)
        new = new if z is None else new + z[:, t]
        if marks is not None:
            padded = (marks[:, t] & PADDING).bool()[:, None, None]
            after, new = torch.where(padded[..., None], memory, after), torch.where(padded, output, new)
        memory, output = after, new
        outs.append(output)
    return torch.stack(outs, 1) if outs else x.new_zeros(*x.shape[:3], dim), memory


_INPUTS = "Tensor x, Tensor? weights, Tensor? z, Tensor memory, Tensor output, Tensor? marks, bool keeps"


@define(NAME, f"({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)")
def _forward(x: Tensor, weights: Tensor | None, z: Tensor | None, memory: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Return o, the memory, and for the backward pass q, k, e and b of each token, and the memory of each chunk.

    Without a kernel the last two are x, and the first memory for each chunk.
    """
    if kernel_ready(x.device.type):
        return torch.ops.fwp.recurrent_delta(x, weights, z, memory, *given)
    out, last = definition(x, weights, z, memory, *given[:-1])
    return out, last.clone(), x.clone(), memory.unsqueeze(2).repeat(1, 1, -(-x.shape[1] // KEPT_EVERY), 1, 1)


@define(
    "recurrent_delta_backward",
    "(Tensor? weights, Tensor? z, Tensor output, Tensor? marks, Tensor last, Tensor out, Tensor saved, Tensor kept,"
    " Tensor d_out, Tensor d_last) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(weights: Tensor | None, z: Tensor | None, output: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Return the gradients of x, z, the memory and the output before the first token."""
    marks, last, out, saved, kept, *of_results = given
    at = (saved, torch.zeros_like(out) if z is None else z, kept[:, :, 0] if kept.numel() else last, output)
    pull_back = torch.func.vjp(lambda x, z, memory, output: definition(x, weights, z, memory, output, marks), *at)[1]
    gradients: tuple[Tensor, ...] = pull_back(tuple(of_results))
    return gradients


@torch.library.register_fake(_forward)
def _(x: Tensor, _: None, __: None, memory: Tensor, output: Tensor, marks: None, keeps: bool) -> tuple[Tensor, ...]:
    out = x.new_empty(*x.shape[:3], output.shape[-1])
    saved, chunks = torch.empty_like(x) if keeps else x.new_empty(0), -(-x.shape[1] // KEPT_EVERY) if keeps else 0
    kept = x.new_empty(*memory.shape[:2], chunks, *memory.shape[2:])
    return out, torch.empty_like(memory), saved, kept


@torch.library.register_fake(_backward)
def _(*given: Any) -> tuple[Tensor, ...]:
    _, _, output, _, last, out, saved, *_ = given
    return torch.empty_like(saved), torch.empty_like(out), torch.empty_like(last), torch.empty_like(output)


def _setup_context(ctx: Context, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, ...]) -> None:
    _, weights, z, _, fed_back, marks, _ = inputs
    out, last, saved, kept = output
    ctx.mark_non_differentiable(saved, kept)
    ctx.save_for_backward(weights, z, fed_back, marks, last, out, saved, kept)


def _differentiate(ctx: Context, d_out: Tensor, d_last: Tensor, *__: object) -> tuple[Tensor | None, ...]:
    weights, z, output, marks, _, out, _, _ = saved = ctx.saved_tensors
    d_x, d_z, d_memory, d_output = _backward(*saved, d_out.contiguous(), d_last.contiguous())
    d_weights = None
    if weights is not None and ctx.needs_input_grad[1]:
        before = torch.cat([output.unsqueeze(1), out[:, :-1]], dim=1) if out.shape[1] else out
        if marks is not None:
            before = before.masked_fill((marks & FIRST).bool()[..., None, None], 0)
        d_weights = torch.einsum("blhd,blhg->hdg", before.tanh(), d_x)
    return d_x, d_weights, None if z is None else d_z, d_memory, d_output, None, None


torch.library.register_autograd(_forward, _differentiate, setup_context=_setup_context)
refuse_double_backward(_backward)
