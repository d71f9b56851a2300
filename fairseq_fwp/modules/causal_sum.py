"""Causal linear attention by matrix products over chunks, for memories too large to be visited token by token.

B batch, L queries, M keys, Dk size of a key, Dv size of a value.
"""

import torch
from torch import Tensor

Number = float | Tensor

# Queries that share one product of scores. Sums before a chunk cost 2 Dk Dv a query, scores chunk * (Dk + Dv).
CHUNK = 256


def causal_sum(
    q: Tensor, k: Tensor, v: Tensor, chunk: int = CHUNK, scale: Number = 1.0, offset: Number = 0.0
) -> Tensor:
    """Return out_t = sum over i < M - L + 1 + t of (scale q_t . k_i + offset) v_i; the last query sees all keys.

    For M = L, scale 1 and offset 0 this is `ops.sum_rule` with one head. That operator visits a Dk x Dv memory L times,
    which suits heads. Here the memory is a weight matrix, often larger than L x L scores, and sums are matrix products.
    These are scores within a chunk, and the sum of all keys and values before it. This is the linear part of the mixed
    chunk attention of Hua et al. 2022, arXiv 2202.10447, Sec. 3.2. It is exact, and differentiable any number of times.

    q (B, L, Dk), k (B, M, Dk), v (B, M, Dv), numbers scale and offset -> (B, L, Dv); M at least L - 1.
    """
    length, size = q.shape[1], k.shape[2] + v.shape[2]
    summing = length * size > 2 * (
        chunk * size + 2 * k.shape[2] * v.shape[2]
    )  # otherwise scores of all pairs are cheaper
    first = k.shape[1] - length + 1  # keys that query 0 sees
    outs, summed = [], 0
    memory: Number = 0.0
    total: Number = 0.0
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        before: Number = 0.0
        if start and summing:
            old = slice(summed, start + first)
            memory, total = memory + k[:, old].mT @ v[:, old], total + v[:, old].sum(1, keepdim=True)
            before, summed = scale * (q[:, start:end] @ memory) + offset * total, start + first
        seen = slice(summed, end - 1 + first)
        scores = scale * (q[:, start:end] @ k[:, seen].mT) + offset
        outs.append(scores.tril(start + first - 1 - summed) @ v[:, seen] + before)
    return torch.cat(outs, 1) if outs else v.new_zeros(q.shape[0], 0, v.shape[2])


def cumulative_sum(v: Tensor, length: int) -> Tensor:
    """Return out_t = sum over i < M - L + 1 + t of v_i, for scores of one: v (B, M, Dv) -> (B, length, Dv)."""
    padded = torch.cat([v.new_zeros(v.shape[0], 1, v.shape[2]), v], 1)
    return padded.cumsum(1)[:, padded.shape[1] - length :]
