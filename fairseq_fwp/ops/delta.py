"""The delta update rule: write the difference between a value and what its key retrieves already.

    W_t = W_{t-1} + k_t^T beta_t (v_t - k_t W_{t-1})        out_t = q_t W_t

Schlag, Irie & Schmidhuber 2021, "Linear Transformers Are Secretly Fast Weight Programmers" (arXiv 2102.11174), Eqs.
24-25; the rule is that of Widrow & Hoff (1960). Their W is ours transposed. Shapes: q, k (B, H, L, Dk), v and out
(B, H, L, Dv), beta (B, H, L), state (B, H, Dk, Dv); W starts as the state.
"""

from typing import Any

import torch
from torch import Tensor

from .arguments import check_arguments, first_state, outer, state_dtype
from .dispatch import kernel_ready, refuse_double_backward, run


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Read with q, after each corrective write of v under k at rate beta.

    Equivalent to: ``for t in range(L): state = state + k[t].outer(beta[t] * (v[t] - k[t] @ state))``,
    ``out[t] = q[t] @ state``.

    Args:
        q, k: (B, H, L, Dk), already mapped and normalised; v: (B, H, L, Dv); beta: (B, H, L), usually in (0, 1). One
            dtype of float32, float64, bfloat16 or float16 for all four (under autocast too: nothing is cast here).
        state: (B, H, Dk, Dv) before the first token, float32 (float64 for float64 inputs); None is zeros.
        backend: "auto", "kernel" or "reference".

    Returns:
        out (B, H, L, Dv) in v's dtype, and the new state after the last token. Both are differentiable once; the
        reference as often as wanted.

    Raises:
        ValueError, TypeError: a shape, device, backend or dtype does not fit.
        RuntimeError: ``backend="kernel"`` and no kernel can be built or used.
    """
    return run(backend, torch.ops.fwp.delta_rule.default, _loop, _check, q, k, v, beta, state)[:2]


def _check(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None) -> None:
    check_arguments("delta_rule", q, k, v, state, beta=beta)


def delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loop that defines the rule; arguments and results as in :func:`delta_rule`."""
    return _loop(q, k, v, beta, state)[:2]


def _loop(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Out, new state and, for the backward pass, each token's error v_t - k_t W_{t-1}."""
    dtype = state_dtype(q.dtype)
    weights = first_state(q, v, state)
    reads, errors = [], []
    with torch.autocast(q.device.type, enabled=False):
        # unbind, because the backward of indexing one token at a time is quadratic in L.
        for q_t, k_t, v_t, beta_t in zip(*(x.to(dtype).unbind(2) for x in (q, k, v, beta)), strict=True):
            error = v_t - (k_t.unsqueeze(-2) @ weights).squeeze(-2)
            weights = weights + outer(k_t, beta_t.unsqueeze(-1) * error)
            reads.append((q_t.unsqueeze(-2) @ weights).squeeze(-2))
            errors.append(error)
    if not reads:
        return v.clone(), weights, v.to(dtype, copy=True)
    return torch.stack(reads, 2).to(v.dtype), weights, torch.stack(errors, 2)


@torch.library.custom_op(
    "fwp::delta_rule",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? state) -> (Tensor, Tensor, Tensor)",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, beta, state)
    if kernel_ready(q.device.type):
        return torch.ops.fwp.delta_rule(q, k, v, beta, state)
    return _loop(q, k, v, beta, state)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, beta, state)
    dtype = state_dtype(q.dtype)
    new_state = q.new_empty((*q.shape[:2], q.shape[3], v.shape[3]), dtype=dtype)
    return v.new_empty(v.shape), new_state, v.new_empty(v.shape, dtype=dtype)


@torch.library.custom_op(
    "fwp::delta_rule_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor beta, Tensor? state, Tensor error, Tensor? grad_out, Tensor? grad_state)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    state: Tensor | None,
    error: Tensor,
    grad_out: Tensor | None,
    grad_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta and the initial state: derived in cuda_ext/README.md, under the same names."""
    if kernel_ready(q.device.type):
        return torch.ops.fwp.delta_rule_backward(q, k, beta, state, error, grad_out, grad_state)
    dtype, length = error.dtype, q.shape[2]
    rate = beta.to(dtype).unsqueeze(-1)
    grad_q, grad_k, grad_v, grad_beta = (x.new_empty(x.shape, dtype=dtype) for x in (q, k, error, beta))
    weights = error.new_zeros((*q.shape[:2], q.shape[3], error.shape[3])) if state is None else state
    d_out = torch.zeros_like(error) if grad_out is None else grad_out.to(dtype)
    # In reverse: G, the gradient of W_t, gives that of the value and the first half of that of the key.
    g = torch.zeros_like(weights) if grad_state is None else grad_state.clone()
    for t in reversed(range(length)):
        g = g + outer(q[:, :, t], d_out[:, :, t])
        d_write = (k[:, :, t, :, None] * g).sum(-2)
        grad_v[:, :, t] = rate[:, :, t] * d_write
        grad_k[:, :, t] = (g * (rate[:, :, t] * error[:, :, t]).unsqueeze(-2)).sum(-1)
        grad_beta[:, :, t] = (d_write * error[:, :, t]).sum(-1)
        g = g - outer(k[:, :, t], grad_v[:, :, t])
    # Forwards: W_t, rebuilt from the errors, gives that of the query and the other half.
    for t in range(length):
        grad_k[:, :, t] -= (weights * grad_v[:, :, t].unsqueeze(-2)).sum(-1)
        weights = weights + outer(k[:, :, t], rate[:, :, t] * error[:, :, t])
        grad_q[:, :, t] = (weights * d_out[:, :, t].unsqueeze(-2)).sum(-1)
    # An operator cannot return None: (0,) stands for the gradient of no state.
    grad_initial = g if state is not None else g.new_empty(0)
    return grad_q.to(q.dtype), grad_k.to(q.dtype), grad_v.to(q.dtype), grad_beta.to(q.dtype), grad_initial


@_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    state: Tensor | None,
    error: Tensor,
    grad_out: Tensor | None,
    grad_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_initial = error.new_empty(0 if state is None else state.shape)
    grad_v = q.new_empty(error.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), grad_v, beta.new_empty(beta.shape), grad_initial


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, beta, state = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(q, k, beta, state, output[2])


def _differentiate(
    ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None, _: None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    q, k, beta, state, error = ctx.saved_tensors
    *grads, grad_initial = _backward(q, k, beta, state, error, grad_out, grad_state)
    return *grads, None if state is None else grad_initial


_forward.register_autograd(_differentiate, setup_context=_setup_context)
refuse_double_backward(_backward)
