"""Run a rule without a kernel: its reference, and gradients of one chunk of tokens at a time.

The forward pass keeps a state before every CHUNK tokens. The backward pass differentiates the reference from these
states, the last chunk first. It holds L / CHUNK states, and the states of one chunk.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .arguments import first_state, state_dtype
from .dispatch import refuse_double_backward

if TYPE_CHECKING:
    from .rule import Results, Rule

# The square root of L needs the least memory: 64 suits lengths from a thousand to some ten thousand.
CHUNK = 64


def _chunks(length: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, length, CHUNK)]


def _cut(chunk: slice, tokens: tuple[Tensor, ...], first: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
    return [x[:, :, chunk] for x in tokens], None if first is None else first[:, chunk]


def forward(
    loop: Callable[..., "Results"], tokens: tuple[Tensor, ...], state: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, the new state and the states before each chunk (B, H, ceil(L / CHUNK), Dk, Dv)."""
    q, _, v, *_ = tokens
    memory = first_state(q, v, state)
    out, _, starts = _allocate(q, v)
    for i, chunk in enumerate(_chunks(q.shape[2])):
        starts[:, :, i] = memory
        some, some_first = _cut(chunk, tokens, first)
        out[:, :, chunk], memory = loop(*some, state=memory, first=some_first)
    return out, memory, starts


def backward(
    loop: Callable[..., "Results"],
    tokens: tuple[Tensor, ...],
    first: Tensor | None,
    starts: Tensor,
    grad_out: Tensor | None,
    grad_state: Tensor | None,
) -> list[Tensor]:
    """Return the gradients of the tokens and of the first state."""
    q, _, v, *_ = tokens
    grads = [x.new_empty(x.shape) for x in tokens]
    out, state, _ = _allocate(q, v)
    d_out = torch.zeros_like(out) if grad_out is None else grad_out
    gradient = torch.zeros_like(state) if grad_state is None else grad_state.clone()
    for i, chunk in reversed([*enumerate(_chunks(q.shape[2]))]):
        some, some_first = _cut(chunk, tokens, first)

        def run(memory: Tensor, *some: Tensor, some_first: Tensor | None = some_first) -> "Results":
            return loop(*some, state=memory, first=some_first)

        differentiate = torch.func.vjp(run, starts[:, :, i], *some)[1]
        gradient, *found = differentiate((d_out[:, :, chunk], gradient))
        for grad, x in zip(grads, found, strict=True):
            grad[:, :, chunk] = x
    return [*grads, gradient]


def _allocate(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialised memory for the results of :func:`forward`."""
    state = q.new_empty((*q.shape[:2], q.shape[3], v.shape[-1]), dtype=state_dtype(q.dtype))
    starts = state.new_empty((*state.shape[:2], len(_chunks(q.shape[2])), *state.shape[2:]))
    return v.new_empty((*q.shape[:3], v.shape[-1])), state, starts


def _free_name(name: str) -> str:
    """Return the name, with a number if such an operator exists already, from this package or the same rule."""
    free, number = name, 1
    while any(hasattr(torch.ops.fwp, taken) for taken in (free, f"{free}_backward")):
        number += 1
        free = f"{name}_{number}"
    return free


def make_operator(rule: "Rule") -> Callable[..., "Results"]:
    """Return the rule as an operator ``fwp::<name>`` of PyTorch, with its fake and its autograd."""
    name, names = _free_name(rule.name), ("q", "k", "v", *rule.gates)
    tensors = ", ".join(f"Tensor {tensor}" for tensor in names)
    schema = f"({tensors}, Tensor? state, Tensor? first) -> (Tensor, Tensor, Tensor)"

    @torch.library.custom_op(f"fwp::{name}", mutates_args=(), schema=schema)
    def op(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tokens, state, first = given
        rule.check(*tokens, state=state, first=first)
        return forward(rule.reference, tuple(tokens), state, first)

    @op.register_fake
    def _(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tokens, state, first = given
        rule.check(*tokens, state=state, first=first)
        return _allocate(tokens[0], tokens[2])

    schema = f"({tensors}, Tensor? first, Tensor starts, Tensor? grad_out, Tensor? grad_state) -> Tensor[]"

    @torch.library.custom_op(f"fwp::{name}_backward", mutates_args=(), schema=schema)
    def op_backward(*given: Any) -> list[Tensor]:
        *tokens, first, starts, grad_out, grad_state = given
        return backward(rule.reference, tuple(tokens), first, starts, grad_out, grad_state)

    @op_backward.register_fake
    def _(*given: Any) -> list[Tensor]:
        *tokens, _, _, _, _ = given
        return [*(x.new_empty(x.shape) for x in tokens), _allocate(tokens[0], tokens[2])[1]]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tokens, state, first = inputs
        ctx.has_state = state is not None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(*tokens, first, output[2])

    def differentiate(ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None, _: None) -> tuple[Any, ...]:
        *grads, of_state = op_backward(*ctx.saved_tensors, grad_out, grad_state)
        return *grads, of_state if ctx.has_state else None, None

    op.register_autograd(differentiate, setup_context=setup_context)
    refuse_double_backward(op_backward)

    def run(*tokens: Tensor, state: Tensor | None, first: Tensor | None) -> "Results":
        return op(*tokens, state, first)[:2]

    return run
