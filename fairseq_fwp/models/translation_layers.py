"""fairseq's encoder and decoder layers with other attentions, and these attentions with fairseq's interface.

Shapes in fairseq's layers: x (L, B, D), source (S, B, D), time first; padding (B, S), True at padding.
"""

from typing import TypeAlias

import torch
from fairseq.models import FairseqIncrementalDecoder
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from fairseq_fwp.models.attention_options import AttentionOptions, naming_flags
from fairseq_fwp.models.attentions import ATTENTIONS, build_division, build_map, construct, make_attention
from fairseq_fwp.modules.attention import SOFTMAX, FastWeightAttention, FastWeightState, LinearAttention
from fairseq_fwp.modules.attention.base import check_heads, reorder
from fairseq_fwp.modules.feature_maps import FeatureMap
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings, read_options

IncrementalState: TypeAlias = Settings | None
Mask: TypeAlias = Tensor | None


class SourceMemory(dict[nn.Module, FastWeightState]):
    """The states of the source, one for each cross-attention of a decoder: generation needs nothing else of it."""

    def reorder(self, new_order: Tensor) -> "SourceMemory":
        return SourceMemory(reorder(dict(self), new_order))


class SequenceAttention(LinearAttention):
    """Linear attention as fairseq's layers call it: the encoder's to itself, and the decoder's to the source.

    gives_weights: whether the decoder's last layer gets the weights that it requests outside training. Only
    --print-alignment uses them, and there is one for every pair of tokens.
    """

    gives_weights = False

    def make_generation_fast_(self, need_attn: bool = False, **kwargs: object) -> None:
        """Prepare for generation; fairseq sets need_attn for --print-alignment."""
        self.gives_weights = need_attn

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor | SourceMemory,
        value: Tensor | SourceMemory,
        key_padding_mask: Mask = None,
        attn_mask: Mask = None,
        need_head_weights: bool = False,
        **others: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (L, B, D), and weights (H, B, L, S) or None; key: the source (S, B, D) or its states."""
        sees_all = "linear attention, which sees the whole sequence except padding"
        check(attn_mask is None, f"attn_mask must be None for {sees_all}")
        x = query.transpose(0, 1)
        if isinstance(key, SourceMemory):
            return self.read(x, key[self]).transpose(0, 1), None
        source = x if key is query else key.transpose(0, 1)
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
        self.head_dim = attention.value_dim

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Mask = None,
        incremental_state: IncrementalState = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        """Return the output (L, B, D), and None for weights; query (L, B, D) is also key and value."""
        x = query.transpose(0, 1)
        if incremental_state is None:
            return self.attention.read_whole(x, key_padding_mask).transpose(0, 1), None
        state = self.get_incremental_state(incremental_state, "state")
        y, state = self.attention(x, state, key_padding_mask)
        self.set_incremental_state(incremental_state, "state", state)
        return y.transpose(0, 1), None

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Keep the rows new_order of the decoding state, as beam search selects them."""
        state = self.get_incremental_state(incremental_state, "state")
        if state is not None:
            self.set_incremental_state(incremental_state, "state", reorder(state, new_order))

    def _get_input_buffer(self, incremental_state: IncrementalState) -> Settings:
        """Return no past keys, which fairseq's layer asks for."""
        return {}


class FwpEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer with the attention that --encoder-feature-map names; softmax is fairseq's own."""

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        heads = heads_of("encoder", embed_dim, cfg)
        if cfg.encoder_feature_map == SOFTMAX:
            return super().build_self_attention(embed_dim, cfg)
        return build_linear_attention(cfg.encoder_feature_map, embed_dim, heads, cfg)


class FwpDecoderLayer(TransformerDecoderLayerBase):
    """The same for the decoder, with --decoder-update-rule and --cross-feature-map."""

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig, **options: object) -> nn.Module:
        if cfg.decoder_update_rule == SOFTMAX:
            return super().build_self_attention(embed_dim, cfg, **options)
        attention = make_attention(read_options(AttentionOptions, cfg), embed_dim, cfg.decoder_attention_heads)
        if not isinstance(attention, FastWeightAttention):
            raise ValueError(
                f"--decoder-update-rule must be softmax or one of {', '.join(UPDATE_RULES)} in translation, got "
                f"{cfg.decoder_update_rule}"
            )
        q_k, v, *_ = attention.in_proj.weight.split([*attention.columns.values()])
        draw_projections(q_k.chunk(2), v, attention.out_proj, attention.value_dim, attention.feature_map)
        return CausalAttention(attention)

    def build_encoder_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        heads = heads_of("decoder", embed_dim, cfg)
        if cfg.cross_feature_map == SOFTMAX:
            return super().build_encoder_attention(embed_dim, cfg)
        return build_linear_attention(cfg.cross_feature_map, embed_dim, heads, cfg, source_dim=cfg.encoder_embed_dim)


def heads_of(side: str, embed_dim: int, cfg: TransformerConfig) -> int:
    """Return the number of heads. Raises ValueError that names the side's flags unless they divide its dimension."""
    with naming_flags({"embed_dim": f"{side}_embed_dim", "num_heads": f"{side}_attention_heads"}):
        check_heads(embed_dim, getattr(cfg, f"{side}_attention_heads"))
    return int(getattr(cfg, f"{side}_attention_heads"))


def build_linear_attention(
    name: str, embed_dim: int, num_heads: int, cfg: TransformerConfig, **options: object
) -> SequenceAttention:
    """Return linear attention with the map of that name."""
    given = read_options(AttentionOptions, cfg)
    feature_map = build_map(given, name, embed_dim // num_heads, besides="softmax or ")
    sizes, table = (embed_dim, num_heads), ATTENTIONS["linear"].options
    parts = {"feature_map": feature_map, "division": build_division(given), **options}
    attention = construct(SequenceAttention, given, table, *sizes, **parts)
    k, v = attention.kv_proj.weight.chunk(2)
    draw_projections((attention.q_proj.weight, k), v, attention.out_proj, attention.head_dim, attention.feature_map)
    return attention


def draw_projections(
    q_k: tuple[Tensor, ...], v: Tensor, out_proj: nn.Linear, head_dim: int, feature_map: FeatureMap
) -> None:
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
