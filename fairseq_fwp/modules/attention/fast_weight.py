"""Causal self-attention whose memory is a matrix of constant size per head, written and read at every token.

Shapes: B batch, L tokens, H heads, D embed_dim, d = D / H, Dk feature_dim of the map, Dv = d.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_fwp.modules.attention.normalization import (
    AttentionNormalization,
    SumNormalization,
    fit_normalizations,
)
from fairseq_fwp.modules.attention.projection import RuleProjection
from fairseq_fwp.modules.attention.state import FastWeightState
from fairseq_fwp.modules.feature_maps.feature_map import FeatureMap
from fairseq_fwp.modules.precision import at_least_float32
from fairseq_fwp.modules.update_rules import unit_length


class FastWeightAttention(RuleProjection):
    """Attention with fast weights: a feature map, an update rule and two normalisations.

    Schlag et al. 2021, arXiv 2102.11174, Secs. 3 and 4.

    embed_dim: D; num_heads: H; feature_map: a map built for key_dim; update_rule: a key of `UPDATE_RULES`;
    key_dim: size of a head's key before the map, None = D / H (the m of Mao 2022 is smaller);
    sum_normalization: of mapped q and k;
    l2_normalization: divide mapped q and k by their lengths (Yang et al. 2024, arXiv 2406.06484, Sec. 3.3);
    attention_normalization: of the output, and of values that the rule retrieves;
    scale_output: times 1 / sqrt(D / H), as in the paper's public CUDA layers, not in its equations;
    norm_output: layer normalisation of each head's output, as in the public code of the rule fwm;
    bias: of q, k, v and the output, and of gates to which the rule gives none, from zero;
    negative_eigenvalues: rates of delta's family up to 2 instead of 1 (Grazzi et al. 2025, arXiv 2411.12537);
    backend: of the operators.

    Raises ValueError as `RuleProjection` does, and for a normalisation that the map or the rule does not have.
    """

    states = (FastWeightState,)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feature_map: FeatureMap,
        update_rule: str,
        *,
        key_dim: int | None = None,
        sum_normalization: SumNormalization | None = None,
        l2_normalization: bool = False,
        attention_normalization: AttentionNormalization | None = None,
        scale_output: bool = False,
        norm_output: bool = False,
        bias: bool = False,
        negative_eigenvalues: bool = False,
        backend: str = "auto",
    ) -> None:
        key_dim = embed_dim // max(num_heads, 1) if key_dim is None else key_dim
        super().__init__(embed_dim, num_heads, feature_map, update_rule, key_dim, bias, negative_eigenvalues)
        if attention_normalization:
            attention_normalization.check(update_rule, self.rule)
        self.sum_normalization, self.attention_normalization = fit_normalizations(
            feature_map, sum_normalization, attention_normalization
        )
        self.key_normalizations: list[Any] = [self.sum_normalization] if self.sum_normalization else []
        if l2_normalization:
            self.key_normalizations.append(unit_length)
        self.scale = self.head_dim**-0.5 if scale_output else 1.0
        self.backend = backend
        # A rule of a plug-in may not support documents.
        self.packs_documents = "first" in signature(self.rule.operator).parameters
        # Features that do not sum to one, and gradients through a small divisor, can overflow float16.
        self.overflows = attention_normalization is not None or sum_normalization is None
        self.read_out_norm = nn.LayerNorm(self.head_dim) if norm_output else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.initialize()

    def forward(
        self,
        x: Tensor,
        state: FastWeightState | None = None,
        key_padding_mask: Tensor | None = None,
        first: Tensor | None = None,
        *,
        keep_state: bool = True,
    ) -> tuple[Tensor, FastWeightState | None]:
        """Return y (B, L, D) for x (B, L, D), and the state after the last token, which may be None without keep_state.

        state: before the first token, None = empty; key_padding_mask (B, L): True at tokens that do not write;
        first (B, L): True at tokens that begin a document, where the memory is empty; None = nowhere.
        """
        queries_keys, v, gates = self.project(x)  # project
        if self.overflows and v.dtype == torch.float16:
            v = at_least_float32(v)
        features = self.feature_map(queries_keys)  # map
        for normalization in self.key_normalizations:
            features = normalization(features)  # normalise
        q, k, v, gates = self.arrange(features, v, gates, key_padding_mask)
        out, state = self.read(q, k, v, gates, state, first, keep_state)  # rule, normalise
        if self.read_out_norm is not None:
            out = self.read_out_norm(out.to(x.dtype))
        if self.scale != 1:
            out = out * self.scale
        return self.out_proj(self.merge_heads(out).to(x.dtype)), state  # project

    def read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: list[Tensor],
        state: FastWeightState | None,
        first: Tensor | None,
        keep_state: bool,
    ) -> tuple[Tensor, FastWeightState | None]:
        """Return the normalised output of the rule (B, H, L, Dv), and the state after the last token."""
        short = self.rule.short
        if short and state is None and first is None and self.backend == "auto" and short.suit(q, v):
            return self._read_scores(short(q, k), v, keep_state)
        weights, z = (None, None) if state is None else state
        options = {"backend": self.backend} if first is None else {"backend": self.backend, "first": first}
        divisor = None
        if self.attention_normalization:
            divisor, k, v, z = self.attention_normalization.apply(self.rule, q, k, v, gates, z, **options)
        out, weights = self.rule.operator(q, k, v, *gates, weights, **options)
        if divisor is not None:
            out = (out / divisor.unsqueeze(-1)).to(out.dtype)
        return out, FastWeightState(weights, z)

    def _read_scores(self, scores: Any, v: Tensor, keep_state: bool) -> tuple[Tensor, FastWeightState | None]:
        """Do the same for few tokens after an empty memory."""
        normalization = self.attention_normalization
        out = scores.read(v)
        if normalization:
            out = out / normalization.bound(scores.read_ones()).unsqueeze(-1)
        if not keep_state:
            return out, None
        return out, FastWeightState(scores.state(v), scores.state_of_ones() if normalization else None)

    def state_size(self, length: int, carried: bool = False) -> int:
        """Return the numbers in the fast weights for any length, without z as in Schlag et al. 2021, App. F."""
        return self.num_heads * self.feature_map.feature_dim * self.head_dim

    def extra_repr(self) -> str:
        normalizations = [*self.key_normalizations, self.attention_normalization]
        return f"num_heads={self.num_heads}, key_dim={self.key_dim}, normalizations={normalizations}"
