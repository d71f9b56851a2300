"""The definition of a rule as a loop over its step, and that loop's gradients, one chunk of tokens at a time.

The forward pass keeps a state before every CHUNK tokens. The backward pass differentiates the loop from these states,
the last chunk first. It holds L / CHUNK states, and the states of one chunk.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .arguments import Results, first_state, for_heads, retrieve, state_dtype

# The square root of L needs the least memory: 64 suits lengths from a thousand to some ten thousand.
CHUNK = 64


def loop(
    name: str, step: Callable[..., Tensor], tokens: tuple[Tensor, ...], state: Tensor | None, first: Tensor | None
) -> Results:
    """Return out and the new state of q, k, v and the gates. It can be differentiated any number of times."""
    q, k, v, *gates = tokens
    q, k = (for_heads(x, v.shape[1]) for x in (q, k))
    reads: list[Tensor] = []
    memory = like = first_state(q, v, state)
    with torch.autocast(q.device.type, enabled=False):
        for q_t, *token, is_first in _unbind((q, k, v, *gates), first):
            if is_first is not None:
                memory = memory.masked_fill(is_first, 0)
            memory = step(memory, *token)
            if not reads:
                _check_step(name, memory, like)
            reads.append(retrieve(q_t, memory))
    out = torch.stack(reads, 2).to(v.dtype) if reads else v.flatten(2, -2).clone()
    return out, memory


def _unbind(tokens: tuple[Tensor, ...], first: Tensor | None) -> Iterator[Any]:
    """Iterate over the tokens: q_t, k_t, v_t, the gates (B, H, 1) or wider, and first (B, 1, 1, 1) or None."""
    dtype = state_dtype(tokens[0].dtype)
    # unbind, because the backward pass of indexing token by token is quadratic in L.
    parts = [(x.unsqueeze(-1) if x.dim() == 3 else x).to(dtype).unbind(2) for x in tokens]
    firsts = [None] * tokens[0].shape[2] if first is None else first[:, None, :, None, None].unbind(2)
    return zip(*parts, firsts, strict=True)


def _check_step(name: str, memory: Any, like: Tensor) -> None:
    """Check the shape of a step's result: a wrong one would be broadcast silently."""
    got = f"{tuple(memory.shape)} of {memory.dtype}" if isinstance(memory, Tensor) else type(memory).__name__
    expected = f"{tuple(like.shape)} of {like.dtype}"
    if got != expected:
        raise TypeError(f"{name}: the step must return the memory, {expected}, got {got}")


def _chunks(length: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, length, CHUNK)]


def _cut(chunk: slice, tokens: tuple[Tensor, ...], first: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
    return [x[:, :, chunk] for x in tokens], None if first is None else first[:, chunk]


def forward(
    run: Callable[..., Results], tokens: tuple[Tensor, ...], state: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, the new state and the states before each chunk (B, H, ceil(L / CHUNK), Dk, Dv)."""
    q, _, v, *_ = tokens
    memory = first_state(q, v, state)
    out, _, starts = allocate(q, v)
    for i, chunk in enumerate(_chunks(q.shape[2])):
        starts[:, :, i] = memory
        some, some_first = _cut(chunk, tokens, first)
        out[:, :, chunk], memory = run(*some, state=memory, first=some_first)
    return out, memory, starts


def backward(
    run: Callable[..., Results],
    tokens: tuple[Tensor, ...],
    first: Tensor | None,
    starts: Tensor,
    grad_out: Tensor | None,
    grad_state: Tensor | None,
) -> list[Tensor]:
    """Return the gradients of the tokens and of the first state."""
    q, _, v, *_ = tokens
    grads = [x.new_empty(x.shape) for x in tokens]
    out, state, _ = allocate(q, v)
    d_out = torch.zeros_like(out) if grad_out is None else grad_out
    gradient = torch.zeros_like(state) if grad_state is None else grad_state.clone()
    for i, chunk in reversed([*enumerate(_chunks(q.shape[2]))]):
        some, some_first = _cut(chunk, tokens, first)

        def of_chunk(memory: Tensor, *some: Tensor, some_first: Tensor | None = some_first) -> Results:
            return run(*some, state=memory, first=some_first)

        differentiate = torch.func.vjp(of_chunk, starts[:, :, i], *some)[1]
        gradient, *grads_of_chunk = differentiate((d_out[:, :, chunk], gradient))
        for grad, x in zip(grads, grads_of_chunk, strict=True):
            grad[:, :, chunk] = x
    return [*grads, gradient]


def allocate(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialised memory for the results of :func:`forward`."""
    state = q.new_empty((*v.shape[:2], q.shape[3], v.shape[-1]), dtype=state_dtype(q.dtype))
    starts = state.new_empty((*state.shape[:2], len(_chunks(q.shape[2])), *state.shape[2:]))
    return v.new_empty((*v.shape[:3], v.shape[-1])), state, starts
