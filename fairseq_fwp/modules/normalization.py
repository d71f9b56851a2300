"""The two normalisations of Schlag et al. 2021, Sec. 4.2, independent of feature map and update rule."""

import torch
from torch import Tensor

# The paper divides without an epsilon. DPFP can map a vector to all zeros, so a sum below this bound is replaced by
# it: a zero vector stays zero (it writes and reads nothing), every larger sum is divided exactly as in the paper.
SUM_NORMALIZATION_EPSILON = 1e-6
# The same for the read-out's divisor z . q (fast-transformers adds 1e-6, the paper's public code 1e-5).
ATTENTION_NORMALIZATION_EPSILON = 1e-6


def sum_normalize(features: Tensor) -> Tensor:
    """phi(x) / sum_j phi(x)_j (Eq. 29) of non-negative features (..., D), in their dtype."""
    return features * features.sum(-1, keepdim=True).clamp(min=SUM_NORMALIZATION_EPSILON).reciprocal()


def attention_normalize(out: Tensor, q: Tensor, k: Tensor, normalizer: Tensor | None) -> tuple[Tensor, Tensor]:
    """Divides the read-out by z_t . q_t with z_t = z_0 + k_1 + ... + k_t (Eqs. 26 and 28).

    out (B, H, L, Dv); q, k (B, H, L, Dk), non-negative; normalizer z_0 (B, H, Dk) in float32 (float64 for float64
    inputs) or None for zeros. Returns the divided read-out in out's dtype and the new normalizer z_L.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    if normalizer is None:
        normalizer = k.new_zeros(k.shape[0], k.shape[1], k.shape[3], dtype=wide)
    z = normalizer.unsqueeze(2) + k.to(wide).cumsum(2)
    divisor = (z * q).sum(-1, keepdim=True).clamp(min=ATTENTION_NORMALIZATION_EPSILON)
    return (out / divisor).to(out.dtype), z[:, :, -1] if z.shape[2] else normalizer
