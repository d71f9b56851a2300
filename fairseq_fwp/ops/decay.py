"""The decay update rule: every element of the memory fades by the product of a rate of its key and one of its value.

    W_t = (f_t^T z_t) * W_{t-1} + k_t^T v_t        out_t = q_t W_t        (* element-wise, f key_decay, z value_decay)

Mao 2022, "Fine-Tuning Pre-trained Transformers into Decaying Fast Weights" (arXiv 2210.04243), Eq. 7; their S is ours
transposed, and our decays are what their sigmoids return. Shapes: q, k, key_decay (B, H, L, Dk), v, value_decay and
out (B, H, L, Dv), state (B, H, Dk, Dv); W starts as the state.
"""

import torch
from torch import Tensor

from .arguments import check_arguments, first_state, outer
from .chunks import allocate_results, backward_by_chunks, forward_by_chunks, register_autograd
from .dispatch import kernel_ready, run


def decay_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_decay: Tensor,
    value_decay: Tensor,
    state: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Read with q, after the memory has faded by key_decay and value_decay and v was added under k.

    Equivalent to: ``for t in range(L): state = key_decay[t].outer(value_decay[t]) * state + k[t].outer(v[t])``,
    ``out[t] = q[t] @ state``.

    Args:
        q, k: (B, H, L, Dk), already mapped and normalised; v: (B, H, L, Dv); key_decay: (B, H, L, Dk) and
            value_decay: (B, H, L, Dv), what is kept, usually in (0, 1). One dtype of float32, float64, bfloat16 or
            float16 for all five (under autocast too: nothing is cast here).
        state: (B, H, Dk, Dv) before the first token, float32 (float64 for float64 inputs); None is zeros.
        backend: "auto", "kernel" or "reference".

    Returns:
        out (B, H, L, Dv) in v's dtype, and the new state after the last token. Both are differentiable once; the
        reference as often as wanted.

    Raises:
        ValueError, TypeError: a shape, device, backend or dtype does not fit.
        RuntimeError: ``backend="kernel"`` and no kernel can be built or used.
    """
    operator = torch.ops.fwp.decay_rule.default
    return run(backend, operator, decay_rule_reference, _check, q, k, v, key_decay, value_decay, state)[:2]


def _check(q: Tensor, k: Tensor, v: Tensor, key_decay: Tensor, value_decay: Tensor, state: Tensor | None) -> None:
    per_key, per_value = {"key_decay": key_decay}, {"value_decay": value_decay}
    check_arguments("decay_rule", q, k, v, state, per_key=per_key, per_value=per_value)


def decay_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, key_decay: Tensor, value_decay: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loop that defines the rule; arguments and results as in :func:`decay_rule`."""
    weights, reads = first_state(q, v, state), []
    tokens = (x.to(weights.dtype).unbind(2) for x in (q, k, v, key_decay, value_decay))
    with torch.autocast(q.device.type, enabled=False):
        # unbind, because the backward of indexing one token at a time is quadratic in L.
        for q_t, k_t, v_t, f_t, z_t in zip(*tokens, strict=True):
            weights = outer(f_t, z_t) * weights + outer(k_t, v_t)
            reads.append((q_t.unsqueeze(-2) @ weights).squeeze(-2))
    out = torch.stack(reads, 2).to(v.dtype) if reads else v.clone()
    return out, weights


@torch.library.custom_op(
    "fwp::decay_rule",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor key_decay, Tensor value_decay, Tensor? state)"
    " -> (Tensor, Tensor, Tensor)",
)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_decay: Tensor, value_decay: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Out, new state and the states after every CHUNK tokens (B, H, L // CHUNK, Dk, Dv), uninitialised where
    the backward pass does without: the kernel reads the first tokens of a sequence without a state again."""
    _check(q, k, v, key_decay, value_decay, state)
    if kernel_ready(q.device.type):
        return torch.ops.fwp.decay_rule(q, k, v, key_decay, value_decay, state)
    return forward_by_chunks(decay_rule_reference, (q, k, v, key_decay, value_decay), state)


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, key_decay: Tensor, value_decay: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, key_decay, value_decay, state)
    return allocate_results(q, v)


@torch.library.custom_op(
    "fwp::decay_rule_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor key_decay, Tensor value_decay, Tensor? state, Tensor kept,"
    " Tensor? grad_out, Tensor? grad_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_decay: Tensor,
    value_decay: Tensor,
    state: Tensor | None,
    kept: Tensor,
    grad_out: Tensor | None,
    grad_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, the decays and the initial state: derived in cuda_ext/README.md, under the same names."""
    if kernel_ready(q.device.type):
        return torch.ops.fwp.decay_rule_backward(q, k, v, key_decay, value_decay, state, kept, grad_out, grad_state)
    *grads, grad_initial = backward_by_chunks(q, k, v, key_decay, value_decay, state, kept, grad_out, grad_state)
    of_q, of_k, of_v, of_f, of_z = (x.to(q.dtype) for x in grads)
    # An operator cannot return None: (0,) stands for the gradient of no state.
    return of_q, of_k, of_v, of_f, of_z, grad_initial if state is not None else kept.new_empty(0)


@_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_decay: Tensor,
    value_decay: Tensor,
    state: Tensor | None,
    kept: Tensor,
    grad_out: Tensor | None,
    grad_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_q, of_k, of_v, of_f, of_z = (x.new_empty(x.shape) for x in (q, k, v, key_decay, value_decay))
    return of_q, of_k, of_v, of_f, of_z, kept.new_empty(0 if state is None else state.shape)


register_autograd(_forward, _backward)
