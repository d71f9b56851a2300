"""fairseq's encoder and decoder layers with other attentions, and these attentions with fairseq's interface.

Shapes in fairseq's layers: x (L, B, D), source (S, B, D), time first; padding (B, S), True at padding.
"""

from typing import Any, TypeAlias

import torch
from fairseq.models import FairseqIncrementalDecoder
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from fairseq_fwp.models.attention_options import (
    LINEAR,
    AttentionOptions,
    build_attention,
    build_division,
    build_map,
    by_argument,
    construct,
    naming_flags,
)
from fairseq_fwp.modules.attention import SOFTMAX, FastWeightAttention, FastWeightState, LinearAttention
from fairseq_fwp.modules.attention.base import check_heads, reorder
from fairseq_fwp.modules.feature_maps import FeatureMap
from fairseq_fwp.modules.update_rules import UPDATE_RULES

IncrementalState: TypeAlias = dict[str, Any] | None


class SourceMemory(dict[nn.Module, FastWeightState]):
    """The states of the source, one for each cross-attention of a decoder: generation needs nothing else of it."""

    def reorder(self, new_order: Tensor) -> "SourceMemory":
        """The rows new_order (B',) of the batch, as beam search selects them."""
        return SourceMemory(reorder(dict(self), new_order))


class EncoderAttention(LinearAttention):
    """Linear self-attention as fairseq's encoder layer calls it."""

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Return the output (L, B, D), and None for weights; query (L, B, D) is also key and value."""
        if attn_mask is not None:
            raise ValueError(
                "attn_mask must be None for linear attention, which sees the whole sequence except padding"
            )
        x = query.transpose(0, 1)
        return super().forward(x, x, key_padding_mask).transpose(0, 1), None


class CrossAttention(LinearAttention):
    """Linear attention to the source as fairseq's decoder layer calls it.

    gives_weights: whether the decoder's last layer gets the weights that it requests outside training. Only
    --print-alignment uses them, and there is one for every pair of tokens.
    """

    gives_weights = False

    def make_generation_fast_(self, need_attn: bool = False, **kwargs: Any) -> None:
        """Prepare for generation; fairseq sets need_attn for --print-alignment."""
        self.gives_weights = need_attn

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor | SourceMemory,
        value: Tensor | SourceMemory,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState = None,
        static_kv: bool = True,
        need_weights: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (L, B, D), and weights (H, B, L, S) or None; key: the source (S, B, D) or its states."""
        x = query.transpose(0, 1)
        if isinstance(key, SourceMemory):
            return self.read(x, key[self]).transpose(0, 1), None
        source = key.transpose(0, 1)
        y = super().forward(x, source, key_padding_mask).transpose(0, 1)
        if not (need_head_weights and self.gives_weights):
            return y, None
        return y, self.weights(x, source, key_padding_mask).transpose(0, 1)


class CausalAttention(FairseqIncrementalDecoder):
    """Causal self-attention over fast weights as fairseq's decoder layer calls it; keeps its state while decoding."""

    def __init__(self, attention: FastWeightAttention) -> None:
        super().__init__(dictionary=None)  # the base class of fairseq's own attention, for the state of each module
        self.attention = attention
        self.num_heads = attention.num_heads
        self.head_dim = attention.head_dim

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState = None,
        need_weights: bool = False,
        attn_mask: None = None,
    ) -> tuple[Tensor, None]:
        """Return the output (L, B, D), and None for weights; query (L, B, D) is also key and value."""
        state = self.get_incremental_state(incremental_state, "state")
        keep = incremental_state is not None
        y, state = self.attention(query.transpose(0, 1), state, key_padding_mask, keep_state=keep)
        self.set_incremental_state(incremental_state, "state", state)
        return y.transpose(0, 1), None

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Keep the rows new_order of the decoding state, as beam search selects them."""
        state = self.get_incremental_state(incremental_state, "state")
        if state is not None:
            self.set_incremental_state(incremental_state, "state", reorder(state, new_order))

    def _get_input_buffer(self, incremental_state: IncrementalState) -> dict[str, Any]:
        """Return no past keys, which fairseq's layer asks for."""
        return {}


class FwpEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer with the attention that --encoder-feature-map names."""

    def build_self_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        """Return the attention of the configuration; softmax is fairseq's own."""
        heads = cfg.encoder_attention_heads
        check_side("encoder", embed_dim, heads)
        if cfg.encoder_feature_map == SOFTMAX:
            return super().build_self_attention(embed_dim, cfg)
        return build_linear_attention(EncoderAttention, cfg.encoder_feature_map, embed_dim, heads, cfg)


class FwpDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with the attentions that --decoder-update-rule and --cross-feature-map name."""

    def build_self_attention(self, embed_dim: int, cfg: Any, **options: Any) -> nn.Module:
        """Return the attention of the configuration; softmax is fairseq's own."""
        if cfg.decoder_update_rule == SOFTMAX:
            return super().build_self_attention(embed_dim, cfg, **options)
        attention = build_attention(AttentionOptions, cfg)
        if not isinstance(attention, FastWeightAttention):
            raise ValueError(
                f"--decoder-update-rule must be softmax or one of {', '.join(UPDATE_RULES)} in translation, got "
                f"{cfg.decoder_update_rule}"
            )
        q_k, v = attention.in_proj.weight.split(attention.sizes)[:2]
        initialize(q_k.chunk(2), v, attention.out_proj, attention.head_dim, attention.feature_map)
        return CausalAttention(attention)

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        """Return the attention of the configuration; softmax is fairseq's own."""
        heads, source_dim = cfg.decoder_attention_heads, cfg.encoder_embed_dim
        check_side("decoder", embed_dim, heads)
        if cfg.cross_feature_map == SOFTMAX:
            return super().build_encoder_attention(embed_dim, cfg)
        return build_linear_attention(
            CrossAttention, cfg.cross_feature_map, embed_dim, heads, cfg, source_dim=source_dim
        )


def check_side(side: str, embed_dim: int, num_heads: int) -> None:
    """Raise ValueError that names the side's flags unless the heads divide its dimension."""
    with naming_flags({"embed_dim": f"{side}_embed_dim", "num_heads": f"{side}_attention_heads"}):
        check_heads(embed_dim, num_heads)


def build_linear_attention(
    kind: type[LinearAttention], feature_map: str, embed_dim: int, num_heads: int, cfg: Any, **options: Any
) -> LinearAttention:
    """A linear attention with the map of that name."""
    feature_map_ = build_map(AttentionOptions, cfg, feature_map, embed_dim // num_heads, besides="softmax or ")
    attention: LinearAttention = construct(
        *(kind, cfg, by_argument(AttentionOptions, *LINEAR), embed_dim, num_heads, feature_map_),
        division=build_division(cfg),
        **options,
    )
    k, v = attention.kv_proj.weight.chunk(2)
    initialize((attention.q_proj.weight, k), v, attention.out_proj, attention.head_dim, attention.feature_map)
    return attention


def initialize(q_k: tuple[Tensor, ...], v: Tensor, out_proj: nn.Linear, head_dim: int, feature_map: FeatureMap) -> None:
    """Draw projections as fairseq's softmax attention, with queries and keys times d^(-1/4), here or in the map.

    So q . k starts as large as in softmax attention, which divides it by sqrt(d). FAVOR+, which estimates exp(q . k),
    then starts as an estimate of that attention.
    """
    gain = 2**-0.5
    with torch.no_grad():
        for weight in q_k:
            nn.init.xavier_uniform_(weight, gain * head_dim**-0.25 / feature_map.scale)
        nn.init.xavier_uniform_(v, gain)
        nn.init.xavier_uniform_(out_proj.weight)
