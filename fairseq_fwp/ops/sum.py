"""The sum update rule: linear attention as a fast weight programmer with purely additive writes.

    W_t = W_{t-1} + k_t^T v_t        out_t = q_t W_t

Katharopoulos, Vyas, Pappas & Fleuret 2020, "Transformers are RNNs" (arXiv 2006.16236), Eqs. 16-20; Schlag, Irie &
Schmidhuber 2021, "Linear Transformers Are Secretly Fast Weight Programmers" (arXiv 2102.11174), Eq. 17. Their W is
ours transposed. Shapes: q, k (B, H, L, Dk), v and out (B, H, L, Dv), state (B, H, Dk, Dv); W starts as the state.
"""

from typing import Any

import torch
from torch import Tensor

from .arguments import check_arguments, first_state, outer, state_dtype
from .dispatch import kernel_ready, refuse_double_backward, run


def sum_rule(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Read with q, after each write of v under k, a memory that only adds.

    Equivalent to: ``for t in range(L): state = state + k[t].outer(v[t]); out[t] = q[t] @ state``.

    Args:
        q, k: (B, H, L, Dk), already mapped and normalised; v: (B, H, L, Dv). One dtype of float32, float64, bfloat16
            or float16 for all three (under autocast too: nothing is cast here).
        state: (B, H, Dk, Dv) before the first token, float32 (float64 for float64 inputs); None is zeros.
        backend: "auto", "kernel" or "reference".

    Returns:
        out (B, H, L, Dv) in v's dtype, and the new state after the last token. Both are differentiable once; the
        reference as often as wanted.

    Raises:
        ValueError, TypeError: a shape, device, backend or dtype does not fit.
        RuntimeError: ``backend="kernel"`` and no kernel can be built or used.
    """
    return run(backend, torch.ops.fwp.sum_rule.default, sum_rule_reference, _check, q, k, v, state)


def _check(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> None:
    check_arguments("sum_rule", q, k, v, state)


def sum_rule_reference(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The loop that defines the rule; arguments and results as in :func:`sum_rule`."""
    dtype = state_dtype(q.dtype)
    weights = first_state(q, v, state)
    reads = []
    with torch.autocast(q.device.type, enabled=False):
        # unbind, because the backward of indexing one token at a time is quadratic in L.
        for q_t, k_t, v_t in zip(*(x.to(dtype).unbind(2) for x in (q, k, v)), strict=True):
            weights = weights + outer(k_t, v_t)
            reads.append((q_t.unsqueeze(-2) @ weights).squeeze(-2))
    out = torch.stack(reads, 2).to(v.dtype) if reads else v.clone()
    return out, weights


@torch.library.custom_op(
    "fwp::sum_rule", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v, Tensor? state) -> (Tensor, Tensor)"
)
def _forward(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    _check(q, k, v, state)
    if kernel_ready(q.device.type):
        return torch.ops.fwp.sum_rule(q, k, v, state)
    return sum_rule_reference(q, k, v, state)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    _check(q, k, v, state)
    return v.new_empty(v.shape), q.new_empty((*q.shape[:2], q.shape[3], v.shape[3]), dtype=state_dtype(q.dtype))


@torch.library.custom_op(
    "fwp::sum_rule_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? state, Tensor? grad_out, Tensor? grad_state)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, grad_out: Tensor | None, grad_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the initial state by two linear scans, as derived in cuda_ext/README.md."""
    if kernel_ready(q.device.type):
        return torch.ops.fwp.sum_rule_backward(q, k, v, state, grad_out, grad_state)
    grad_out = torch.zeros_like(v) if grad_out is None else grad_out
    flipped = [x.flip(2) for x in (q, k, v, grad_out)]
    transposed = None if state is None else state.mT
    grad_transposed = None if grad_state is None else grad_state.mT
    # Each gradient is the rule itself with the roles of its arguments exchanged, in reverse for keys and values.
    grad_q, _ = sum_rule_reference(grad_out, v, k, transposed)
    grad_k, _ = sum_rule_reference(flipped[2], flipped[3], flipped[0], grad_transposed)
    grad_v, grad_initial = sum_rule_reference(flipped[1], flipped[0], flipped[3], grad_state)
    # An operator cannot return None: (0,) stands for the gradient of no state.
    return grad_q, grad_k.flip(2), grad_v.flip(2), grad_initial if state is not None else grad_initial.new_empty(0)


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, grad_out: Tensor | None, grad_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_initial = q.new_empty(0 if state is None else state.shape, dtype=state_dtype(q.dtype))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_initial


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _differentiate(
    ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, state = ctx.saved_tensors
    grad_q, grad_k, grad_v, grad_initial = _backward(q, k, v, state, grad_out, grad_state)
    return grad_q, grad_k, grad_v, None if state is None else grad_initial


_forward.register_autograd(_differentiate, setup_context=_setup_context)
refuse_double_backward(_backward)
