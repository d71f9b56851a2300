"""The update rule of the Fast Weight Memory: the delta rule, then a memory longer than one is scaled back to one.

    Z_t = W_{t-1} + k_t^T beta_t (v_t - k_t W_{t-1})        W_t = Z_t / max(1, ||Z_t||_F)        out_t = q_t W_t

Schlag, Munkhdalai & Schmidhuber 2021, "Learning Associative Inference Using Fast Weight Memory" (arXiv 2011.07831),
in the form that Schlag, Irie & Schmidhuber 2021 (arXiv 2102.11174, Sec. 6.1.2) compare with; the norm is Frobenius',
of each sequence and head. Their W is ours transposed, and their new value beta v + (1 - beta) v_old, less v_old, is
our write beta (v - v_old). Two cases that the equation leaves open:

    - The first write of an empty memory is k^T beta v, however long: it is not rescaled, as in the authors' code.
      Empty is a memory that is exactly zero, so a state of zeros, no state and left padding agree.
    - A token whose key or beta is exactly zero is padding: it neither writes nor rescales.

Shapes: q, k (B, H, L, Dk), v and out (B, H, L, Dv), beta (B, H, L), state (B, H, Dk, Dv); W starts as the state.
"""

from typing import Any

import torch
from torch import Tensor

from .arguments import check_arguments, first_state, state_dtype
from .dispatch import refuse_double_backward, run

# Tokens between two states that the forward pass keeps. The backward pass holds L / C of those and C rebuilt ones,
# least where C is the root of L: 64 suits lengths from a thousand to some ten thousand, and is little at a few hundred.
CHUNK = 64


def fwm_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Read with q, after each corrective write of v under k at rate beta and a rescaling of what grew beyond norm one.

    Equivalent to: ``for t in range(L): state = state + k[t].outer(beta[t] * (v[t] - k[t] @ state))``,
    ``state = state / max(1, state.norm())``, ``out[t] = q[t] @ state``; but the first write of an empty (exactly zero)
    memory is not rescaled, and a token with a key or beta of exactly zero leaves the memory as it is.

    Where the norm is exactly one, and where the memory is empty, the gradient is that of the unscaled write.

    Args:
        q, k: (B, H, L, Dk), already mapped and normalised; v: (B, H, L, Dv); beta: (B, H, L), usually in (0, 1). One
            dtype of float32, float64, bfloat16 or float16 for all four (under autocast too: nothing is cast here).
        state: (B, H, Dk, Dv) before the first token, float32 (float64 for float64 inputs); None is zeros.
        backend: "auto" or "reference"; "kernel" is refused, for the operator of this rule is PyTorch throughout.

    Returns:
        out (B, H, L, Dv) in v's dtype, and the new state after the last token. Both are differentiable once; the
        reference as often as wanted.

    Raises:
        ValueError, TypeError: a shape, device, backend or dtype does not fit.
        RuntimeError: ``backend="kernel"``.
    """
    if backend == "kernel":
        raise RuntimeError("fwm_rule has no compiled kernel: use backend='auto' (--fwp-backend auto) or 'reference'")
    return run(backend, torch.ops.fwp.fwm_rule.default, _loop, _check, q, k, v, beta, state)[:2]


def _check(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None) -> None:
    check_arguments("fwm_rule", q, k, v, state, beta=beta)


def fwm_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loop that defines the rule; arguments and results as in :func:`fwm_rule`."""
    return _loop(q, k, v, beta, state)[:2]


def _loop(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Out, new state and, for the backward pass, each token's error v_t - k_t W_{t-1} and squared norm ||Z_t||^2, which
    is 1 where nothing was rescaled."""
    dtype = state_dtype(q.dtype)
    weights = first_state(q, v, state)
    writes = (k != 0).any(-1) & (beta != 0)
    reads, errors, squares = [], [], []
    # unbind, because the backward of indexing one token at a time is quadratic in L.
    columns, rows = (x.to(dtype).unsqueeze(-1) for x in (q, k)), v.to(dtype).unsqueeze(-2)
    tokens = (*columns, rows, beta.to(dtype)[..., None, None], writes[..., None, None])
    for q_t, k_t, v_t, beta_t, writes_t in zip(*(x.unbind(2) for x in tokens), strict=True):
        error = v_t - (k_t * weights).sum(-2, keepdim=True)
        # The sum of magnitudes is zero for zeros alone, where that of squares may underflow.
        filled = weights.detach().abs().sum((-2, -1), keepdim=True) != 0
        weights = torch.addcmul(weights, k_t, beta_t * error)
        square = (weights * weights).sum((-2, -1), keepdim=True)
        # Selected before the root, whose derivative at zero is infinite.
        square = torch.where(writes_t & filled & (square > 1), square, 1.0)
        weights = weights / square.sqrt()
        reads.append((q_t * weights).sum(-2))
        errors.append(error.squeeze(-2))
        squares.append(square[..., 0, 0])
    if not reads:
        return v.clone(), weights, v.to(dtype), beta.to(dtype)
    return torch.stack(reads, 2).to(v.dtype), weights, torch.stack(errors, 2), torch.stack(squares, 2)


@torch.library.custom_op(
    "fwp::fwm_rule",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? state) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What _loop returns, and the state before each chunk (B, H, ceil(L / CHUNK), Dk, Dv)."""
    _check(q, k, v, beta, state)
    out, weights, error, square, kept = _allocate(q, v, beta, first_state(q, v, state))
    # A chunk at a time, so that the lists of the loop hold the small tensors of a chunk, and not of all tokens.
    for i, start in enumerate(range(0, q.shape[2], CHUNK)):
        chunk = slice(start, start + CHUNK)
        kept[:, :, i] = weights
        out[:, :, chunk], weights, error[:, :, chunk], square[:, :, chunk] = _loop(
            q[:, :, chunk], k[:, :, chunk], v[:, :, chunk], beta[:, :, chunk], weights
        )
    return out, weights, error, square, kept


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(q, k, v, beta, state)
    return _allocate(q, v, beta, first_state(q, v, state))


def _allocate(q: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operator's results: the given state, and uninitialised memory for the others."""
    chunks = (q.shape[2] + CHUNK - 1) // CHUNK
    error, square = (x.new_empty(x.shape, dtype=state.dtype) for x in (v, beta))
    kept = state.new_empty((*state.shape[:2], chunks, *state.shape[2:]))
    return v.new_empty(v.shape), state, error, square, kept


@torch.library.custom_op(
    "fwp::fwm_rule_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor beta, Tensor error, Tensor square, Tensor kept, Tensor? grad_out,"
    " Tensor? grad_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    error: Tensor,
    square: Tensor,
    kept: Tensor,
    grad_out: Tensor | None,
    grad_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta and the initial state.

    With G the gradient of W_t and s_t = max(1, ||Z_t||), that of Z_t is (G - W_t <G, W_t>) / s_t where the norm was
    rescaled, because W_t is then Z_t / ||Z_t||, and G elsewhere. What remains is the delta rule's.

    It is written out, for autograd does not record inside an operator; and it does not rewind, for the rule forgets:
    the states of a chunk are rebuilt from the one kept before it, from the last chunk to the first.
    """
    grad_q, grad_k, grad_v, grad_beta, g = _allocate_gradients(q, k, beta, error, kept)
    g.copy_(torch.zeros_like(g) if grad_state is None else grad_state)
    for i, start in reversed([*enumerate(range(0, q.shape[2], CHUNK))]):
        chunk = slice(start, start + CHUNK)
        d_out = torch.zeros_like(error[:, :, chunk]) if grad_out is None else grad_out[:, :, chunk]
        tokens = (x[:, :, chunk].to(g.dtype) for x in (q, k, beta, error, square))
        grad_q[:, :, chunk], grad_k[:, :, chunk], grad_v[:, :, chunk], grad_beta[:, :, chunk] = _chunk_backward(
            g, kept[:, :, i], d_out.to(g.dtype), *tokens
        )
    return grad_q, grad_k, grad_v, grad_beta, g


def _chunk_backward(
    g: Tensor, state: Tensor, grad_out: Tensor, q: Tensor, k: Tensor, beta: Tensor, error: Tensor, square: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and beta over one chunk, whose first state is given.

    g comes as the gradient of the chunk's last state, and is turned in place into that of its first.
    """
    rate, errors, squares = beta[..., None, None], error.unsqueeze(-2), square[..., None, None]
    columns, rows = (x.unsqueeze(-1) for x in (q, k)), grad_out.unsqueeze(-2)
    tokens = (*columns, rows, rate, rate * errors, squares.sqrt(), squares > 1)
    per_token = [*zip(*(x.unbind(2) for x in tokens), strict=True)]
    states = state.new_empty((len(per_token) + 1, *state.shape))
    states[0] = state
    for t, (_, k_t, _, _, write, norm, _) in enumerate(per_token):
        torch.addcmul(states[t], k_t, write, out=states[t + 1]).div_(norm)
    grad_q, grad_k, grad_writes = [], [], []
    for t, (q_t, k_t, d_out, rate_t, write, norm, rescaled) in reversed([*enumerate(per_token)]):
        g.addcmul_(q_t, d_out)
        grad_q.append((states[t + 1] * d_out).sum(-1))
        along = torch.where(rescaled, (g * states[t + 1]).sum((-2, -1), keepdim=True), 0.0)
        g.addcmul_(states[t + 1], along, value=-1).div_(norm)
        d_write = (k_t * g).sum(-2, keepdim=True)
        d_value = rate_t * d_write
        grad_k.append(torch.addcmul(g * write, states[t], d_value, value=-1).sum(-1))
        grad_writes.append(d_write)
        g.addcmul_(k_t, d_value, value=-1)
    d_writes = torch.stack(grad_writes[::-1], 2)
    grad_v, grad_beta = (rate * d_writes).squeeze(-2), (errors * d_writes).sum((-2, -1))
    return torch.stack(grad_q[::-1], 2), torch.stack(grad_k[::-1], 2), grad_v, grad_beta


@_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    error: Tensor,
    square: Tensor,
    kept: Tensor,
    grad_out: Tensor | None,
    grad_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _allocate_gradients(q, k, beta, error, kept)


def _allocate_gradients(
    q: Tensor, k: Tensor, beta: Tensor, error: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised memory for the gradients of q, k, v, beta and the initial state."""
    of_q, of_k, of_v, of_beta = (x.new_empty(x.shape, dtype=q.dtype) for x in (q, k, error, beta))
    return of_q, of_k, of_v, of_beta, kept.new_empty((*kept.shape[:2], *kept.shape[3:]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, beta, state = inputs
    ctx.has_state = state is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, beta, *output[2:])


def _differentiate(
    ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None, *_: None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    *grads, grad_initial = _backward(*ctx.saved_tensors, grad_out, grad_state)
    return *grads, grad_initial if ctx.has_state else None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
refuse_double_backward(_backward)
