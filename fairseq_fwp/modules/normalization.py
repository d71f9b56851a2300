"""The two normalisations of Schlag et al. 2021, Sec. 4.2, independent of feature map and update rule.

Shapes: q, k (B, H, L, Dk), mapped and non-negative; z the running normaliser (B, H, L + 1, Dk); first (B, L), True at
tokens with which a document begins and z starts at zero, None = nowhere.

The paper divides without an epsilon. Here every divisor has one, in one of two styles: by default it is a lower bound,
so that every larger divisor divides exactly as in the paper; with add_epsilon it is added, as public code does.
"""

import itertools

import torch
from torch import Tensor

# DPFP can map a vector to all zeros: it stays zero (it writes and reads nothing). fast-transformers adds 1e-6 to z . q,
# the paper's public code 1e-5.
NORMALIZATION_EPSILON = 1e-6

# A product z . k of zero has no square root with a gradient; this one is zero to every float32 it is added to.
LEAST_PRODUCT = 1e-24


def sum_normalize(features: Tensor, epsilon: float = NORMALIZATION_EPSILON, add_epsilon: bool = False) -> Tensor:
    """phi(x) / sum_j phi(x)_j (Eq. 29) of non-negative features (..., D), in their dtype."""
    # Not times the reciprocal, whose derivative overflows for the small sums of FAVOR+.
    return features / bound(features.sum(-1, keepdim=True), epsilon, add_epsilon)


def running_normalizer(k: Tensor, normalizer: Tensor | None = None, first: Tensor | None = None) -> Tensor:
    """z_0 ... z_L with z_t = z_{t-1} + k_t (Eq. 26): (B, H, L + 1, Dk) in float32 (float64 for float64 keys).

    normalizer: z_0 (B, H, Dk), None = zeros. Clone the last one to carry it: a slice keeps all of z in memory.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    if normalizer is None:
        normalizer = k.new_zeros(k.shape[0], k.shape[1], k.shape[3], dtype=wide)
    if first is None:
        return torch.cat([normalizer.unsqueeze(2), k.to(wide)], dim=2).cumsum(2)
    # Each stretch between tokens that begin one in some row by itself: a difference of sums would lose their last bits.
    z = [normalizer.unsqueeze(2)]
    bounds = [0, *first[:, 1:].any(0).nonzero().add(1).flatten().tolist(), k.shape[2]]
    for start, stop in itertools.pairwise(bounds):
        empty = first[:, start : start + 1, None, None].transpose(1, 2)
        before = z[-1][:, :, -1:].masked_fill(empty, 0)
        z.append(torch.cat([before, k[:, :, start:stop].to(wide)], dim=2).cumsum(2)[:, :, 1:])
    return torch.cat(z, 2)


def before_each(z: Tensor, first: Tensor | None) -> Tensor:
    """z_{t-1} (B, H, L, Dk) of every token."""
    past = z[:, :, :-1]
    return past if first is None else past.masked_fill(first[:, None, :, None], 0)


def read_divisor(q: Tensor, z: Tensor, epsilon: float = NORMALIZATION_EPSILON, add_epsilon: bool = False) -> Tensor:
    """z_t . q_t (B, H, L), by which Eq. 28 divides the read-out after the write at t; in z's dtype."""
    return bound((z[:, :, 1:] * q).sum(-1), epsilon, add_epsilon)


def retrieval_divisor(
    k: Tensor, z: Tensor, epsilon: float = NORMALIZATION_EPSILON, first: Tensor | None = None
) -> Tensor:
    """c_t = z_{t-1} . k_t (B, H, L), by which Eq. 27 divides the value k_t W_{t-1} retrieved for removal; in z's dtype.

    Where z_{t-1} . k_t = 0 nothing is stored under the key: k_t W_{t-1} = 0 as well, and c_t = 1. That is the paper's
    rule for the first position, v_bar_1 = 0, in front of which padding may stand, and it holds for a key that shares
    no feature with any before it.

    W_t = W_{t-1} + k_t^T beta_t (v_t - k_t W_{t-1} / c_t) is the delta rule with c_t v_t for v_t and beta_t / c_t for
    beta_t, or with k_t / sqrt(c_t) for k_t and sqrt(c_t) v_t for v_t, which half precision holds for smaller c_t.
    """
    c = (before_each(z, first) * k).sum(-1)
    return torch.where(c > 0, bound(c, epsilon), 1)


def normalize_retrieval(
    k: Tensor,
    v: Tensor,
    z: Tensor,
    epsilon: float = NORMALIZATION_EPSILON,
    add_epsilon: bool = False,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """k and v (B, H, L, Dv) with which the plain delta rule removes a normalised value, as `retrieval_divisor` says.

    With add_epsilon as the paper's public code does: it multiplies beta by c_t and divides k_t by c_t + epsilon, with
    c_t = 1 before an empty memory alone. The write is then c_t / (c_t + epsilon) as large as in the paper, and 0 for
    a key without any feature of those stored.
    """
    if not add_epsilon:
        root = retrieval_divisor(k, z, epsilon, first).sqrt().unsqueeze(-1)
        return (k / root).to(k.dtype), (v * root).to(v.dtype)
    past = before_each(z, first)
    c = torch.where(past.sum(-1) > 0, (past * k).sum(-1), 1).clamp(min=LEAST_PRODUCT).unsqueeze(-1)
    # With r^2 = c and e = c + epsilon: k r/e beta (r v - k r/e W) = k c/e beta (v - k W / e)
    root = c.sqrt()
    return (k * root / (c + epsilon)).to(k.dtype), (v * root).to(v.dtype)


def bound(divisor: Tensor, epsilon: float = NORMALIZATION_EPSILON, add_epsilon: bool = False) -> Tensor:
    """The divisor, at least epsilon, or with epsilon added to it."""
    return divisor + epsilon if add_epsilon else divisor.clamp(min=epsilon)
