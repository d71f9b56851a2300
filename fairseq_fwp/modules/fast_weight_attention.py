"""Causal self-attention whose memory is a matrix of constant size per head, written and read at every token.

Shapes: B batch, L tokens, H heads, D embed_dim, d = D / H, Dk feature_dim of the map, Dv = d.
"""

from typing import NamedTuple

from torch import Tensor, nn

from fairseq_fwp.modules.normalization import attention_normalize, sum_normalize
from fairseq_fwp.modules.update_rules import UPDATE_RULES


class FastWeightState(NamedTuple):
    """What a layer remembers: weights (B, H, Dk, Dv) and, with attention normalisation, normalizer (B, H, Dk)."""

    weights: Tensor
    normalizer: Tensor | None = None

    def detach(self) -> "FastWeightState":
        """The same values, cut from the graph (truncated back-propagation through time)."""
        return FastWeightState(self.weights.detach(), None if self.normalizer is None else self.normalizer.detach())

    def reorder(self, new_order: Tensor) -> "FastWeightState":
        """The rows new_order (B',) of the batch, as beam search selects them."""
        return FastWeightState(
            self.weights.index_select(0, new_order),
            None if self.normalizer is None else self.normalizer.index_select(0, new_order),
        )


class FastWeightAttention(nn.Module):
    """Feature map x update rule x two normalisations (Schlag et al. 2021, arXiv 2102.11174, Secs. 3 and 4).

    q, k, v and the rule's gates come from one projection without bias, as in the paper's Eqs. 4 and 21. The output
    is not scaled: the paper's equations have no factor 1 / sqrt(d) there, its public CUDA layers do.

    embed_dim: D; num_heads: H; feature_map: a map built for head_dim D / H; update_rule: a key of `UPDATE_RULES`;
    sum_normalization: divide mapped q and k by their sums (Eq. 29); attention_normalization: divide the read-out by
    z . q (Eqs. 26, 28); backend: of the operators.

    Raises ValueError for an unknown rule, a head count that does not divide embed_dim, or a normalisation with a map
    whose features may be negative.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feature_map: nn.Module,
        update_rule: str,
        sum_normalization: bool = False,
        attention_normalization: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        if update_rule not in UPDATE_RULES:
            raise ValueError(f"unknown update rule {update_rule!r}: choose one of {', '.join(UPDATE_RULES)}")
        if (sum_normalization or attention_normalization) and not feature_map.positive:
            raise ValueError(
                f"{type(feature_map).__name__} has features of either sign, and sum and attention normalisation "
                "divide by sums of features: choose another feature map, or --arch fwp_lm, which has neither"
            )
        self.rule = UPDATE_RULES[update_rule]
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.feature_map = feature_map
        self.sum_normalization = sum_normalization
        self.attention_normalization = attention_normalization
        self.backend = backend
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim + len(self.rule.gates) * num_heads, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(
        self, x: Tensor, state: FastWeightState | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, FastWeightState]:
        """x (B, L, D) -> y (B, L, D) and the state after the last token.

        state: before the first token, None = empty; key_padding_mask (B, L): True at tokens that write nothing.
        """
        q, k, v, gates = self._project(x)
        if key_padding_mask is not None:
            k = k.masked_fill(key_padding_mask[:, None, :, None], 0)
        weights, normalizer = (None, None) if state is None else state
        out, weights = self.rule.operator(q, k, v, *gates, weights, backend=self.backend)
        if self.attention_normalization:
            out, normalizer = attention_normalize(out, q, k, normalizer)
        return self.out_proj(out.transpose(1, 2).flatten(2)), FastWeightState(weights, normalizer)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """q, k (B, H, L, Dk), mapped and normalised; v (B, H, L, Dv); gates, each (B, H, L). All of one dtype."""
        width = self.num_heads * self.head_dim
        queries_keys, values, gates = self.in_proj(x).split(
            [2 * width, width, len(self.rule.gates) * self.num_heads], dim=-1
        )
        # (B, L, 2, H, d): one call maps queries and keys
        features = self.feature_map(queries_keys.unflatten(-1, (2, self.num_heads, self.head_dim)))
        if self.sum_normalization:
            features = sum_normalize(features)
        v = values.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        q, k = features.to(v.dtype).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v, self._activate(gates)

    def _activate(self, gates: Tensor) -> list[Tensor]:
        if not self.rule.gates:
            return []
        split = gates.unflatten(-1, (len(self.rule.gates), self.num_heads)).permute(2, 0, 3, 1).unbind(0)
        return [gate.activation(part) for gate, part in zip(self.rule.gates, split, strict=True)]

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, sum_normalization={self.sum_normalization}, "
            f"attention_normalization={self.attention_normalization}, backend={self.backend!r}"
        )


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Raises ValueError unless num_heads divides embed_dim."""
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(
            f"the embedding dimension {embed_dim} is not divisible by {num_heads} attention heads: change "
            "--decoder-embed-dim or --decoder-attention-heads"
        )
