"""The rules that forget, a chunk of tokens at a time: they cannot be rewound, and keep no state for every token.

The forward pass keeps a state after every CHUNK tokens, and the backward pass rebuilds those in between. This is what
the operators of the decay rule, and of the gated rule as a case of it, run without a compiled kernel.
B batch, H heads, L tokens, Dk size of a key, Dv size of a value.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .arguments import first_state, outer, state_dtype
from .dispatch import refuse_double_backward

# Tokens between two states that the forward pass keeps: what was forgotten cannot be rewound, so the backward pass
# rebuilds the states between them.
CHUNK = 32


def forward_by_chunks(
    reference: Callable[..., tuple[Tensor, Tensor]], tokens: tuple[Tensor, ...], state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """A rule's loop over ``tokens``: its q, k, v and gates. It also returns the states after every CHUNK tokens."""
    q, _, v, *_ = tokens
    weights = first_state(q, v, state)
    out, _, kept = allocate_results(q, v)
    for start in range(0, q.shape[2], CHUNK):
        chunk = slice(start, start + CHUNK)
        out[:, :, chunk], weights = reference(*(x[:, :, chunk] for x in tokens), weights)
        if start + CHUNK <= q.shape[2]:
            kept[:, :, start // CHUNK] = weights
    return out, weights.contiguous(), kept


def allocate_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised memory for out, new state and kept states."""
    dtype, sizes = state_dtype(q.dtype), (q.shape[3], v.shape[3])
    state, kept = (q.new_empty((*q.shape[:2], *n, *sizes), dtype=dtype) for n in ((), (q.shape[2] // CHUNK,)))
    return v.new_empty(v.shape), state, kept


def backward_by_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_decay: Tensor,
    value_decay: Tensor,
    state: Tensor | None,
    kept: Tensor,
    grad_out: Tensor | None,
    grad_state: Tensor | None,
) -> tuple[Tensor, ...]:
    """All gradients in the state's dtype, by rebuilding the states of one chunk at a time from the one kept before."""
    grad_out = torch.zeros_like(v) if grad_out is None else grad_out
    tokens = (q, k, v, key_decay, value_decay, grad_out)
    grads = [x.new_empty(x.shape, dtype=kept.dtype) for x in tokens[:-1]]
    initial = first_state(q, v, state)
    g = torch.zeros_like(initial) if grad_state is None else grad_state.clone()
    for start in reversed(range(0, q.shape[2], CHUNK)):
        chunk = slice(start, start + CHUNK)
        first = kept[:, :, start // CHUNK - 1] if start else initial
        g = _backward_chunk([x[:, :, chunk] for x in grads], [x[:, :, chunk].to(g.dtype) for x in tokens], first, g)
    return *grads, g


def _backward_chunk(grads: list[Tensor], tokens: list[Tensor], first: Tensor, g: Tensor) -> Tensor:
    """Fill the gradients of one chunk and turn g, the gradient of its last state, into that of its first."""
    per_token = list(zip(*(x.unbind(2) for x in tokens), strict=True))
    states = [first]
    for _, k_t, v_t, f_t, z_t, _ in per_token:
        states.append(outer(f_t, z_t) * states[-1] + outer(k_t, v_t))
    for t, (q_t, k_t, v_t, f_t, z_t, d_out) in reversed(list(enumerate(per_token))):
        g = g + outer(q_t, d_out)
        faded = g * states[t]
        of_keys = [(states[t + 1], d_out), (g, v_t), (faded, z_t)]
        of_values = [(g, k_t), (faded, f_t)]
        for grad, (matrix, row) in zip((grads[0], grads[1], grads[3]), of_keys, strict=True):
            grad[:, :, t] = (matrix * row.unsqueeze(-2)).sum(-1)
        for grad, (matrix, column) in zip((grads[2], grads[4]), of_values, strict=True):
            grad[:, :, t] = (matrix * column.unsqueeze(-1)).sum(-2)
        g = g * outer(f_t, z_t)
    return g


def register_autograd(forward: Any, backward: Any) -> None:
    """Makes ``backward`` the derivative of the operator ``forward``, whose last input is the state."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*inputs, output[2])

    def differentiate(
        ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        *tokens, state, kept = ctx.saved_tensors
        *grads, grad_initial = backward(*tokens, state, kept, grad_out, grad_state)
        return *grads, None if state is None else grad_initial

    forward.register_autograd(differentiate, setup_context=setup_context)
    refuse_double_backward(backward)
