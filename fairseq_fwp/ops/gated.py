"""The gated update rule: one number a token says how much of the memory is kept and how much is written.

    W_t = g_t W_{t-1} + (1 - g_t) k_t^T v_t        out_t = q_t W_t

Peng, Pappas, Yogatama, Schwartz, Smith & Kong 2021, "Random Feature Attention" (arXiv 2103.02143), in the form of Mao
2022 (arXiv 2210.04243), Eq. 5, where g is what is kept; Schlag, Irie & Schmidhuber 2021 (arXiv 2102.11174), Eq. 52,
write 1 - beta for it. Their W is ours transposed. It is the decay rule with key decay g, value decay 1 and the key
(1 - g) k. Shapes: q, k (B, H, L, Dk), v and out (B, H, L, Dv), gate (B, H, L), state (B, H, Dk, Dv); W starts as the
state.
"""

import torch
from torch import Tensor

from .arguments import check_arguments, first_state, outer
from .chunks import allocate_results, backward_by_chunks, forward_by_chunks, register_autograd
from .dispatch import kernel_ready, run


def gated_rule(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Read with q, after each write of v under k that replaces a share 1 - gate of the whole memory.

    Equivalent to: ``for t in range(L): state = gate[t] * state + (1 - gate[t]) * k[t].outer(v[t])``,
    ``out[t] = q[t] @ state``.

    Args:
        q, k: (B, H, L, Dk), already mapped and normalised; v: (B, H, L, Dv); gate: (B, H, L), what is kept, usually
            in (0, 1). One dtype of float32, float64, bfloat16 or float16 for all four (under autocast too: nothing is
            cast here).
        state: (B, H, Dk, Dv) before the first token, float32 (float64 for float64 inputs); None is zeros.
        backend: "auto", "kernel" or "reference".

    Returns:
        out (B, H, L, Dv) in v's dtype, and the new state after the last token. Both are differentiable once; the
        reference as often as wanted.

    Raises:
        ValueError, TypeError: a shape, device, backend or dtype does not fit.
        RuntimeError: ``backend="kernel"`` and no kernel can be built or used.
    """
    return run(backend, torch.ops.fwp.gated_rule.default, gated_rule_reference, _check, q, k, v, gate, state)[:2]


def _check(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor | None) -> None:
    check_arguments("gated_rule", q, k, v, state, gate=gate)


def gated_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loop that defines the rule; arguments and results as in :func:`gated_rule`."""
    weights, reads = first_state(q, v, state), []
    tokens = (x.to(weights.dtype).unbind(2) for x in (q, k, v, gate.unsqueeze(-1)))
    with torch.autocast(q.device.type, enabled=False):
        # unbind, because the backward of indexing one token at a time is quadratic in L.
        for q_t, k_t, v_t, g_t in zip(*tokens, strict=True):
            weights = g_t.unsqueeze(-1) * weights + outer((1 - g_t) * k_t, v_t)
            reads.append((q_t.unsqueeze(-2) @ weights).squeeze(-2))
    out = torch.stack(reads, 2).to(v.dtype) if reads else v.clone()
    return out, weights


@torch.library.custom_op(
    "fwp::gated_rule",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor? state) -> (Tensor, Tensor, Tensor)",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Out, new state and the states kept for the backward pass, as the decay rule keeps them."""
    _check(q, k, v, gate, state)
    if kernel_ready(q.device.type):
        return torch.ops.fwp.gated_rule(q, k, v, gate, state)
    return forward_by_chunks(gated_rule_reference, (q, k, v, gate), state)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, gate, state)
    return allocate_results(q, v)


@torch.library.custom_op(
    "fwp::gated_rule_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor? state, Tensor kept, Tensor? grad_out,"
    " Tensor? grad_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    state: Tensor | None,
    kept: Tensor,
    grad_out: Tensor | None,
    grad_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, gate and the initial state: those of the decay rule, through what it is given here."""
    if kernel_ready(q.device.type):
        return torch.ops.fwp.gated_rule_backward(q, k, v, gate, state, kept, grad_out, grad_state)
    rate, key = gate.to(kept.dtype).unsqueeze(-1), k.to(kept.dtype)
    grad_q, grad_write, grad_v, grad_rate, _, grad_initial = backward_by_chunks(
        q,
        (1 - rate) * key,
        v,
        rate.expand(k.shape),
        rate.new_ones(()).expand(v.shape),
        state,
        kept,
        grad_out,
        grad_state,
    )
    grads = grad_q, (1 - rate) * grad_write, grad_v, (grad_rate - key * grad_write).sum(-1)
    of_q, of_k, of_v, of_gate = (x.to(q.dtype) for x in grads)
    # An operator cannot return None: (0,) stands for the gradient of no state.
    return of_q, of_k, of_v, of_gate, grad_initial if state is not None else kept.new_empty(0)


@_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    state: Tensor | None,
    kept: Tensor,
    grad_out: Tensor | None,
    grad_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_q, of_k, of_v, of_gate = (x.new_empty(x.shape) for x in (q, k, v, gate))
    return of_q, of_k, of_v, of_gate, kept.new_empty(0 if state is None else state.shape)


register_autograd(_forward, _backward)
