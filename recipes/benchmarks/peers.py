"""Implementations to compare with our operators: the best PyTorch forms we know, and other packages.

Shapes: q, k (B, H, L, Dk), v (B, H, L, Dv), beta (B, H, L), all contiguous; every function returns out (B, H, L, Dv).
A decoding step has L = 1 and takes and returns the state (B, H, Dk, Dv). They compute the state after the
last token only if they must. Each is checked against the float64 reference before it is timed.
"""

import torch
import torch.nn.functional as F


def delta_loop(q, k, v, beta):
    """Compute token by token, with unbind: the backward pass of `q[:, :, t]` costs O(L) for each token."""
    B, H, L, Dk = q.shape
    rows = [x.reshape(B * H, L, 1, -1).unbind(1) for x in (q, k, v, beta)]
    state, out = q.new_zeros(B * H, Dk, v.shape[-1]), []
    for q_t, k_t, v_t, beta_t in zip(*rows, strict=True):
        write = beta_t * (v_t - torch.bmm(k_t, state))
        state = torch.baddbmm(state, k_t.transpose(1, 2), write)
        out.append(torch.bmm(q_t, state))
    return torch.cat(out, 1).view(B, H, L, -1)


def diagonal_blocks(x, size):
    """Return a view of (..., C, C) as its diagonal blocks (..., C / size, size, size)."""
    blocks = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower triangular A (..., C, C), doubling the size of the inverted diagonal blocks."""

    @staticmethod
    def forward(ctx, A):
        C, size = A.shape[-1], 1
        rounded = 1 << (C - 1).bit_length()
        A = F.pad(A, (0, rounded - C, 0, rounded - C))
        X = torch.eye(rounded, dtype=A.dtype).expand_as(A).clone()
        while size < rounded:
            a, x = diagonal_blocks(A, 2 * size)[..., size:, :size], diagonal_blocks(X, 2 * size)
            x[..., size:, :size] = -(x[..., size:, size:] @ a @ x[..., :size, :size]) if size > 1 else -a
            size *= 2
        X = X[..., :C, :C]
        ctx.save_for_backward(X)
        return X

    @staticmethod
    def backward(ctx, grad):
        X_t = ctx.saved_tensors[0].mT
        return -(X_t @ grad @ X_t).tril(-1)


def delta_chunkwise(q, k, v, beta, chunk):
    """Compute the WY form (Yang et al. 2024, arXiv 2406.06484, section 3.2), in chunks of `chunk` tokens.

    With A = tril(beta k k^T, -1) and U = (I + A)^-1 (beta v - beta k S) in a chunk that starts with the state S:

        out = q S + tril(q k^T) U        next state = S + k^T U

    Of all chunks the best with solve_triangular was slower at every shape (results/operators.csv of commit 8b543a0).
    """
    B, H, L, Dk = q.shape
    Dv, chunk = v.shape[-1], min(chunk, L)
    padding = -L % chunk
    shape = (B * H, (L + padding) // chunk, chunk, -1)
    beta = beta.unsqueeze(-1)
    q, k, kb, vb = (F.pad(x, (0, 0, 0, padding)).reshape(shape) for x in (q, k, k * beta, v * beta))
    X = UnitLowerInverse.apply((kb @ k.mT).tril(-1))
    U = X @ vb
    kS = X @ kb if shape[1] > 1 else kb  # a single chunk starts from zeros and never reads it
    scores = (q @ k.mT).tril()
    if shape[1] == 1:
        out = scores @ U
    else:
        state, states, writes = q.new_zeros(B * H, Dk, Dv), [], []
        for U_n, kS_n, k_n in zip(U.unbind(1), kS.unbind(1), k.mT.unbind(1), strict=True):
            states.append(state)
            write = torch.baddbmm(U_n, kS_n, state, alpha=-1)
            state = torch.baddbmm(state, k_n, write)
            writes.append(write)
        out = scores @ torch.stack(writes, 1) + q @ torch.stack(states, 1)
    return out.reshape(B, H, L + padding, Dv)[:, :, :L]


def softmax_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def fast_transformers_sum():
    """Return the causal product of pytorch-fast-transformers, which is silently wrong on non-contiguous inputs."""
    from fast_transformers.causal_product import causal_dot_product

    return lambda q, k, v: causal_dot_product(q.contiguous(), k.contiguous(), v.contiguous())


def step_in_place(q, k, v, beta, state):
    """Compute one decoding step of the delta rule. It overwrites the given state, which our operators never do.

    Forms that do not were slower (results/operators.csv of commit 8b543a0).
    """
    k_, state_ = k.flatten(0, 1), state.view(-1, *state.shape[2:])
    write = torch.baddbmm(v.flatten(0, 1), k_, state_, alpha=-1).mul_(beta.view(-1, 1, 1))
    state_.baddbmm_(k_.mT, write)
    return torch.bmm(q.flatten(0, 1), state_).view_as(v), state
