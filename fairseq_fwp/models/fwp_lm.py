"""The language model `fwp_lm`: a decoder-only Transformer whose attention is a fast weight programmer or softmax.

It can be a hybrid: some layers have softmax, the others fast weights.
"""

from argparse import ArgumentParser
from dataclasses import dataclass
from typing import Optional

from fairseq.data import Dictionary
from fairseq.models import register_model
from torch import nn

from fairseq_fwp.models.attention_options import AttentionOptions, add_choices
from fairseq_fwp.models.attentions import (
    ATTENTIONS,
    attention_name,
    make_attention,
    rule_choices,
    unused_options,
    used_options,
)
from fairseq_fwp.models.decoder import DecoderConfig, LanguageModelDecoder, check_probability
from fairseq_fwp.models.language_model import LanguageModel
from fairseq_fwp.modules.attention import SOFTMAX
from fairseq_fwp.modules.attention.base import AnyAttention
from fairseq_fwp.modules.dropout import Dropout
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.positions import LearnedPositions, SinusoidalPositions, VaswaniPositions
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import option, read_options


@dataclass
class FwpLanguageModelConfig(DecoderConfig, AttentionOptions):
    """Fast weights or softmax. Defaults: Schlag et al. 2021, *small*, the delta rule without normalisation."""

    final_dropout: float = option(
        0.0,
        "dropout probability after the last layer, from 0 to 1; in the papers' public code that of --dropout",
        same_function=True,
    )
    attention_window: Optional[int] = option(  # noqa: UP045  (fairseq's parser reads no other form)
        None,
        "number of tokens, itself included, that a token sees in softmax attention, at least 1; none: all past tokens, "
        "which hybrid cannot have",
    )
    attention_softmax_heads: Optional[int] = option(  # noqa: UP045
        None, "heads of softmax attention, a divisor of the embedding dimension; none: --decoder-attention-heads"
    )
    attention_kv_heads: Optional[int] = option(  # noqa: UP045
        None,
        "heads of keys and values in softmax attention, a divisor of its heads: several in a row share one; none: all",
    )
    attention_head_dim: Optional[int] = option(  # noqa: UP045
        None, "size of the heads of softmax attention, at least 1; none: embedding dimension / heads"
    )
    attention_qk_norm: bool = option(False, "RMS normalisation of each head's queries and keys in softmax attention")
    attention_qkv_bias: bool = option(False, "biases only of queries, keys and values in softmax attention")
    attention_rope_theta: Optional[float] = option(  # noqa: UP045
        None, "base, such as 10000, of the rotary positions of softmax attention (Su et al. 2021); none: no rotation"
    )
    attention_rope_scaling: Optional[str] = option(  # noqa: UP045
        None,
        "rotary positions for longer texts, as in Llama 3.1: factor, fewest and most turns, and tokens, such as "
        "8,1,4,8192; none: not scaled",
    )
    softmax_layers: Optional[str] = option(  # noqa: UP045
        None,
        "layers with softmax instead of fast weights: ascending numbers from 0, separated by commas; none: no layer",
    )
    no_token_positional_embeddings: bool = option(False, "no absolute positions")
    decoder_learned_pos: bool = option(False, "learned positions, --max-target-positions of them, instead of sinusoids")
    positions_from_end: bool = option(
        False,
        "sinusoids as in the papers' public code: positions are counted from the end of the sample; in "
        "decoding a sample has --tokens-per-sample tokens",
    )
    cuda_graphs: bool = option(
        False,
        "run the layers in training, and each step of decoding, as CUDA graphs, so that a GPU does not wait for Python",
        same_function=True,
    )


@register_model("fwp_lm", dataclass=FwpLanguageModelConfig)
class FwpLanguageModel(LanguageModel):
    """A language model over fast weights; it works with fairseq's own tasks, criteria and commands."""

    config = FwpLanguageModelConfig

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Add the flags of the configuration; their choices are the current rules and maps of the tables."""
        choices = {"decoder_update_rule": rule_choices(), "decoder_feature_map": FEATURE_MAPS}
        add_choices(parser, FwpLanguageModelConfig, choices)
        super().add_args(parser)  # it skips flags that exist already

    @classmethod
    def build_decoder(cls, cfg: FwpLanguageModelConfig, dictionary: Dictionary) -> "FwpDecoder":
        return FwpDecoder(cfg, dictionary)

    @classmethod
    def unused_flags(cls, cfg: FwpLanguageModelConfig) -> list[str]:
        cfg = read_options(FwpLanguageModelConfig, cfg)
        kinds = (ATTENTIONS[name] for name in set(layer_attentions(cfg)))
        return unused_options(cfg, (used_options(cfg, kind, cfg.decoder_feature_map) for kind in kinds))

    def max_decoder_positions(self) -> int:
        """Longest generation: learned positions have an end, other positions do not."""
        positions = self.decoder.embed_positions
        most: int = super().max_decoder_positions()
        return positions.table.num_embeddings if isinstance(positions, LearnedPositions) else most


class FwpDecoder(LanguageModelDecoder):
    """`LanguageModelDecoder` over fast weights or softmax attention, or over both in different layers."""

    def __init__(self, cfg: FwpLanguageModelConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg, dictionary)
        check_probability("final_dropout", cfg.final_dropout)
        self.final_dropout = Dropout(cfg.final_dropout, self)
        packs = all(attention.packs_documents for attention in self.attentions)
        self.packs_documents = packs and not cfg.positions_from_end
        self.cuda_graphs = cfg.cuda_graphs

    def build_positions(self, cfg: FwpLanguageModelConfig) -> nn.Module | None:
        if cfg.positions_from_end:
            off = "--positions-from-end must be off with"
            check(not cfg.no_token_positional_embeddings, f"{off} --no-token-positional-embeddings, got on")
            check(not cfg.decoder_learned_pos, f"{off} --decoder-learned-pos, got on: it is for sinusoids")
            return VaswaniPositions(cfg.decoder_embed_dim, cfg.tokens_per_sample)
        if cfg.no_token_positional_embeddings:
            return None
        if cfg.decoder_learned_pos:
            return LearnedPositions(self.max_target_positions, cfg.decoder_embed_dim)
        return SinusoidalPositions(cfg.decoder_embed_dim, offset=self.padding_idx + 1)

    def build_attention(self, cfg: FwpLanguageModelConfig, index: int) -> AnyAttention:
        names = layer_attentions(cfg)
        depth = (index - names.index(names[index])) / len(names)  # of the first of its kind 0
        return make_attention(cfg, *cfg.attention_sizes, names[index], depth)


def layer_attentions(cfg: FwpLanguageModelConfig, given: str = "--softmax-layers") -> list[str]:
    """Return the name in ATTENTIONS of each layer's attention.

    given: the flag that the ValueError for impossible layers names.
    """
    name, layers = attention_name(cfg), [str(index) for index in range(cfg.decoder_layers)]
    if cfg.softmax_layers is None:
        return [name] * len(layers)
    left_out = f"{given} must be left out with --decoder-update-rule softmax, got {cfg.softmax_layers!r}"
    check(cfg.decoder_update_rule != SOFTMAX, left_out)
    chosen = str(cfg.softmax_layers).split(",")  # a number if --model-overrides gives one
    # One spelling for the same layers: options of checkpoints are compared as text.
    ascending = [index for index in layers if index in chosen] == chosen
    check(
        ascending,
        f"{given} must be ascending numbers from 0 to {layers[-1]}, separated by commas, got {cfg.softmax_layers!r}",
    )
    return [SOFTMAX if index in chosen else name for index in layers]
