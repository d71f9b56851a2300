"""The two normalisations of Schlag et al. 2021, Sec. 4.2, independent of feature map and update rule.

Shapes: q, k (B, H, L, Dk), mapped and non-negative; v (B, H, L, Dv). z is the normaliser, the sum of the keys in
memory: (B, H, Dk) before the first token, and (B, H, L + 1, Dk) with all after it. first (B, L) is True at tokens with
which a document begins and z starts at zero; None = nowhere.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fairseq_fwp.modules.feature_maps.feature_map import FeatureMap
from fairseq_fwp.modules.precision import at_least_float32
from fairseq_fwp.modules.update_rules import UpdateRule

# DPFP can map a vector to all zeros: it stays zero (it writes and reads nothing). fast-transformers adds 1e-6 to z . q,
# the paper's public code 1e-5.
NORMALIZATION_EPSILON = FeatureMap.epsilon

# A product z . k of zero has no square root with a gradient; this one is zero to every float32 it is added to.
LEAST_PRODUCT = 1e-24

Kind = TypeVar("Kind", bound="Division")


@dataclass(frozen=True)
class Division:
    """By sums of features, which may be zero. The papers divide without an epsilon; here every divisor has one.

    epsilon: above 0, None = that of the layer's map; add_epsilon: add it to the divisor, as public code does. By
    default it is a lower bound: every larger divisor divides exactly as in the paper.
    """

    epsilon: float | None = None
    add_epsilon: bool = False

    def __post_init__(self) -> None:
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise ValueError(f"`epsilon` must be a number above 0, got {self.epsilon}")

    def with_epsilon(self: Kind, default: float) -> Kind:
        """Return the same, with the default where no epsilon is given."""
        return replace(self, epsilon=default) if self.epsilon is None else self

    def bound(self, divisor: Tensor) -> Tensor:
        """Return the divisor, at least epsilon, or with epsilon added to it."""
        epsilon = NORMALIZATION_EPSILON if self.epsilon is None else self.epsilon
        return divisor + epsilon if self.add_epsilon else divisor.clamp(min=epsilon)


@dataclass(frozen=True)
class SumNormalization(Division):
    """phi(x) / sum_j phi(x)_j (Eq. 29)."""

    def __call__(self, features: Tensor) -> Tensor:
        """Non-negative features (..., Dk) -> features of sum one, in their dtype."""
        # Not times the reciprocal, whose derivative overflows for the small sums of FAVOR+.
        return features / self.bound(features.sum(-1, keepdim=True))


@dataclass(frozen=True)
class AttentionNormalization(Division):
    """Divide the output by z . q, and what a rule retrieves before it writes by z . k (Eqs. 26-28).

    output_only: divide only the output (Eq. 28), as the paper's public code does by default.
    """

    output_only: bool = False

    def check(self, name: str, rule: UpdateRule) -> None:
        """Raise ValueError where this normalisation is not defined for the rule of that name."""
        if not rule.normalizes:
            raise ValueError(
                f"`attention_normalization` is not defined for the update rule {name}: leave it out "
                "(`sum_normalization` is)"
            )
        if rule.normalizer and not self.output_only:
            raise ValueError(
                f"the update rule {name} erases and forgets, and only its output can be normalised: give "
                "`output_only` as well"
            )

    def apply(
        self,
        rule: UpdateRule,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: list[Tensor],
        z: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the divisor of the output (B, H, L), k and v with which the rule retrieves normalised values, and z.

        z: before the first token, None = zeros, and after the last; options: of the operator, `first` among them.
        """
        if rule.forgets is not None:
            # The memory of the rule for values of one, which forgets as the rule does.
            ones = torch.ones_like(v[..., :1])
            wide = (at_least_float32(x) for x in (q, k, ones, *rule.forgets(*gates)))
            operator = rule.normalizer or rule.operator
            divisor, z = operator(*wide, None if z is None else z.unsqueeze(-1), **options)
            return self.bound(divisor.squeeze(-1)), k, v, z.squeeze(-1)
        first = options.get("first")
        sums = running_sum(k, z, first)
        divisor = self.output_divisor(q, sums)
        if rule.retrieves and not self.output_only:
            k, v = self.normalize_retrieval(k, v, sums, first)
        return divisor, k, v, sums[:, :, -1].clone()  # a slice would keep all of them

    def output_divisor(self, q: Tensor, z: Tensor) -> Tensor:
        """z_t . q_t (B, H, L), by which Eq. 28 divides the output after the write at t; in z's dtype."""
        return self.bound((z[:, :, 1:] * q).sum(-1))

    def retrieval_divisor(self, k: Tensor, z: Tensor, first: Tensor | None = None) -> Tensor:
        """c_t = z_{t-1} . k_t (B, H, L), by which Eq. 27 divides the value k_t W_{t-1} retrieved for removal.

        Where z_{t-1} . k_t = 0 nothing is stored under the key: k_t W_{t-1} = 0 as well, and c_t = 1. That is the
        paper's rule for the first position, v_bar_1 = 0, which padding may precede. It also holds for a key that
        shares no feature with any before it.

        W_t = W_{t-1} + k_t^T beta_t (v_t - k_t W_{t-1} / c_t) is the delta rule with c_t v_t for v_t and beta_t / c_t
        for beta_t. It is also the delta rule with k_t / sqrt(c_t) for k_t and sqrt(c_t) v_t for v_t, which half
        precision can represent for smaller c_t.
        """
        c = (before_each(z, first) * k).sum(-1)
        return torch.where(c > 0, Division(self.epsilon).bound(c), 1)

    def normalize_retrieval(self, k: Tensor, v: Tensor, z: Tensor, first: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return k and v with which the plain delta rule removes a normalised value, see `retrieval_divisor`.

        With add_epsilon as the paper's public code does: it multiplies beta by c_t and divides k_t by c_t + epsilon,
        with c_t = 1 only before an empty memory. The write is then c_t / (c_t + epsilon) as large as in the paper,
        and 0 for a key without any feature of those stored.
        """
        if not self.add_epsilon:
            root = self.retrieval_divisor(k, z, first).sqrt().unsqueeze(-1)
            return (k / root).to(k.dtype), (v * root).to(v.dtype)
        past = before_each(z, first)
        c = torch.where(past.sum(-1) > 0, (past * k).sum(-1), 1).clamp(min=LEAST_PRODUCT).unsqueeze(-1)
        # With r^2 = c and e = c + epsilon: k r/e beta (r v - k r/e W) = k c/e beta (v - k W / e)
        root = c.sqrt()
        return (k * root / self.bound(c)).to(k.dtype), (v * root).to(v.dtype)


def running_sum(k: Tensor, z: Tensor | None = None, first: Tensor | None = None) -> Tensor:
    """z_0 ... z_L with z_t = z_{t-1} + k_t (Eq. 26): (B, H, L + 1, Dk) in float32 (float64 for float64 keys).

    z: z_0 (B, H, Dk), None = zeros. Clone the last one to carry it: a slice keeps all of them in memory.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    if z is None:
        z = k.new_zeros(k.shape[0], k.shape[1], k.shape[3], dtype=wide)
    if first is None:
        return torch.cat([z.unsqueeze(2), k.to(wide)], dim=2).cumsum(2)
    # Each stretch between tokens that begin one in some row by itself: a difference of sums would lose their last bits.
    sums = [z.unsqueeze(2)]
    bounds = [0, *first[:, 1:].any(0).nonzero().add(1).flatten().tolist(), k.shape[2]]
    for start, stop in itertools.pairwise(bounds):
        empty = first[:, start : start + 1, None, None].transpose(1, 2)
        before = sums[-1][:, :, -1:].masked_fill(empty, 0)
        sums.append(torch.cat([before, k[:, :, start:stop].to(wide)], dim=2).cumsum(2)[:, :, 1:])
    return torch.cat(sums, 2)


def before_each(z: Tensor, first: Tensor | None) -> Tensor:
    """z_{t-1} (B, H, L, Dk) of every token."""
    past = z[:, :, :-1]
    return past if first is None else past.masked_fill(first[:, None, :, None], 0)


def fit_normalizations(
    feature_map: FeatureMap,
    sum_normalization: SumNormalization | None,
    attention_normalization: AttentionNormalization | None,
) -> tuple[SumNormalization | None, AttentionNormalization | None]:
    """Return both with the epsilons of the map. Raises ValueError for a map whose features may be negative."""
    if (sum_normalization or attention_normalization) and not feature_map.positive:
        raise ValueError(
            f"{type(feature_map).__name__} has features of either sign, and sum and attention normalisation divide by "
            "sums of features: choose another map, or neither normalisation"
        )
    # Features that sum to one have the same size with every map.
    epsilon = NORMALIZATION_EPSILON if sum_normalization else feature_map.epsilon
    return (
        sum_normalization and sum_normalization.with_epsilon(feature_map.epsilon),
        attention_normalization and attention_normalization.with_epsilon(epsilon),
    )
