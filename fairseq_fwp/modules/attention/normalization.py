"""The two normalisations of Schlag et al. 2021, Sec. 4.2, independent of feature map and update rule.

Shapes: q, k (B, H, L, Dk), mapped and non-negative; v (B, H, L, Dv). z is the normaliser, the sum of the keys in
memory: (B, H, Dk) before the first token, or (B, H, L + 1, Dk) with all later ones. first (B, L) is True at tokens that
begin a document, where z starts at zero; None = nowhere.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from fairseq_fwp.modules.feature_maps import FeatureMap
from fairseq_fwp.modules.update_rules import UpdateRule, to_unit_length
from fairseq_fwp.ops.arguments import state_dtype
from fairseq_fwp.ops.checks import check

# DPFP can map a vector to zero: it stays zero, and neither writes nor reads. fast-transformers adds 1e-6 to z . q,
# the paper's public code 1e-5.
NORMALIZATION_EPSILON = FeatureMap.epsilon

# The square root of z . k = 0 has no finite gradient. This number changes no float32 that it is added to.
LEAST_PRODUCT = 1e-24

LEAST_LENGTH = 1e-12  # by which `F.normalize` divides

Form: TypeAlias = tuple[str, bool, float]  # of a normalisation: norm, adds and epsilon of `ops.projection.Layout`

Self = TypeVar("Self", bound="Division")


@dataclass(frozen=True)
class Division:
    """Division by sums of features, which may be zero. Unlike in the papers, every divisor has an epsilon.

    epsilon: above 0, None = the epsilon of the layer's map; add_epsilon: add it to the divisor, as public code does. By
    default it is a lower bound: larger divisors divide exactly as in the paper.
    """

    epsilon: float | None = None
    add_epsilon: bool = False

    def __post_init__(self) -> None:
        valid = self.epsilon is None or 0 < self.epsilon < math.inf
        check(valid, f"`epsilon` must be a number above 0, got {self.epsilon}")

    def with_epsilon(self: Self, default: float) -> Self:
        """Return a copy with the default epsilon if none was given."""
        return replace(self, epsilon=default) if self.epsilon is None else self

    def bound(self, divisor: Tensor) -> Tensor:
        """Return the divisor with the lower bound epsilon, or with epsilon added."""
        epsilon = NORMALIZATION_EPSILON if self.epsilon is None else self.epsilon
        return divisor + epsilon if self.add_epsilon else divisor.clamp(min=epsilon)


@dataclass(frozen=True)
class SumNormalization(Division):
    """Sum normalisation: phi(x) / sum_j phi(x)_j (Eq. 29)."""

    def __call__(self, features: Tensor) -> Tensor:
        """Return non-negative features (..., Dk) scaled to sum one, in their dtype."""
        # Not times the reciprocal, whose derivative overflows for the small sums of FAVOR+.
        return features / self.bound(features.sum(-1, keepdim=True))

    @property
    def form(self) -> Form:
        """The arguments of the kernel."""
        return "sum", self.add_epsilon, NORMALIZATION_EPSILON if self.epsilon is None else self.epsilon


@dataclass(frozen=True)
class LengthNormalization:
    """Division by the length, x / ||x||; epsilon: added to ||x||^2, at least 0. By default the length has a bound."""

    epsilon: float = 0.0

    def __post_init__(self) -> None:
        check(self.epsilon >= 0, f"`l2_normalization_epsilon` must be at least 0, got {self.epsilon}")

    def __call__(self, x: Tensor) -> Tensor:
        """Return x (..., Dk) of length one, in float32 or wider."""
        return to_unit_length(x, self.epsilon)

    @property
    def form(self) -> Form:
        """The arguments of the kernel."""
        return "length", self.epsilon > 0, self.epsilon or LEAST_LENGTH


@dataclass(frozen=True)
class AttentionNormalization(Division):
    """Attention normalisation: divide outputs by z . q, and values retrieved for writes by z . k (Eqs. 26-28).

    read_out_only: divide only the output (Eq. 28), as the paper's public code does by default.
    """

    read_out_only: bool = False

    def check_rule(self, name: str, rule: UpdateRule) -> None:
        """Raise ValueError if this normalisation is not defined for the rule of that name."""
        if rule.normalizer is None:
            raise ValueError(
                f"`attention_normalization` must be left out for the update rule {name}, where it is not defined: use "
                "`sum_normalization`"
            )
        check(
            self.read_out_only or not rule.normalizer.output_only,
            f"`read_out_only` must be given with `attention_normalization` for the update rule {name}: it erases and "
            "forgets, so only its output can be normalised",
        )

    def output_divisor(self, q: Tensor, z: Tensor) -> Tensor:
        """Return z_t . q_t (B, H, L), the divisor of the output after the write at t (Eq. 28), in z's dtype."""
        return self.bound((z[:, :, 1:] * q).sum(-1))

    def retrieval_divisor(self, k: Tensor, z: Tensor, first: Tensor | None = None) -> Tensor:
        """Return c_t = z_{t-1} . k_t (B, H, L), the divisor of the value k_t W_{t-1} retrieved for removal (Eq. 27).

        If z_{t-1} . k_t = 0, nothing is stored under the key: k_t W_{t-1} = 0 too, and c_t = 1. This is the paper's
        rule for the first position, v_bar_1 = 0, which padding may precede. It also holds for a key that shares no
        feature with earlier ones.

        W_t = W_{t-1} + k_t^T beta_t (v_t - k_t W_{t-1} / c_t) is the delta rule with c_t v_t for v_t and beta_t / c_t
        for beta_t. It is also the delta rule with k_t / sqrt(c_t) for k_t and sqrt(c_t) v_t for v_t. Half precision can
        represent this form for smaller c_t.
        """
        c = (before_each(z, first) * k).sum(-1)
        return torch.where(c > 0, Division(self.epsilon).bound(c), 1)

    def normalize_retrieval(self, k: Tensor, v: Tensor, z: Tensor, first: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return k and v with which the plain delta rule removes a normalised value, see `retrieval_divisor`.

        add_epsilon is as in the paper's public code. It multiplies beta by c_t and divides k_t by c_t + epsilon, with
        c_t = 1 only before an empty memory. The write is then c_t / (c_t + epsilon) times that of the paper, and 0 for
        a key that shares no feature with stored ones.
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
    """Return z_0 ... z_L with z_t = z_{t-1} + k_t (Eq. 26): (B, H, L + 1, Dk) in float32 (float64 for float64 keys).

    z: z_0 (B, H, Dk), None = zeros. Clone the last sum to carry it: a slice keeps all of them in memory.
    """
    wide = state_dtype(k.dtype)
    if z is None:
        z = k.new_zeros(k.shape[0], k.shape[1], k.shape[3], dtype=wide)
    if first is None:
        return torch.cat([z.unsqueeze(2), k.to(wide)], dim=2).cumsum(2)
    # Each stretch between beginnings of documents is summed separately: differences of sums would lose bits.
    sums = [z.unsqueeze(2)]
    bounds = [0, *first[:, 1:].any(0).nonzero().add(1).flatten().tolist(), k.shape[2]]
    for start, stop in itertools.pairwise(bounds):
        empty = first[:, start : start + 1, None, None]
        before = sums[-1][:, :, -1:].masked_fill(empty, 0)
        sums.append(torch.cat([before, k[:, :, start:stop].to(wide)], dim=2).cumsum(2)[:, :, 1:])
    return torch.cat(sums, 2)


def before_each(z: Tensor, first: Tensor | None) -> Tensor:
    """Return z_{t-1} (B, H, L, Dk) for every token."""
    past = z[:, :, :-1]
    return past if first is None else past.masked_fill(first[:, None, :, None], 0)


def fit_normalizations(
    feature_map: FeatureMap, of_sum: SumNormalization | None, of_attention: AttentionNormalization | None
) -> tuple[SumNormalization | None, AttentionNormalization | None]:
    """Return both normalisations with the map's epsilon. Raises ValueError for features that may be negative."""
    check(
        feature_map.positive or not (of_sum or of_attention),
        f"features must not be negative for sum and attention normalisation, which divide by their sums, got those of "
        f"{type(feature_map).__name__}: choose another map, or neither normalisation (an architecture without "
        "presets, such as fwp_lm, has none)",
    )
    # Features of sum one have the same size with every map.
    epsilon = NORMALIZATION_EPSILON if of_sum else feature_map.epsilon
    return of_sum and of_sum.with_epsilon(feature_map.epsilon), of_attention and of_attention.with_epsilon(epsilon)
