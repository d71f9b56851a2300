"""The language model `fwp_lm`: a decoder-only Transformer whose attention is a fast weight programmer or softmax."""

from dataclasses import dataclass
from inspect import signature
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_fwp._options import option
from fairseq_fwp.models.decoder import DecoderConfig, DecoderState, LanguageModelDecoder, check_probability
from fairseq_fwp.models.language_model import LanguageModel
from fairseq_fwp.modules.dropout import Dropout
from fairseq_fwp.modules.fast_weight_attention import FastWeightAttention, check_heads
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.feature_maps.favor import DRAWS
from fairseq_fwp.modules.feature_maps.feature_map import FeatureMap
from fairseq_fwp.modules.learned_positions import LearnedPositions
from fairseq_fwp.modules.local_attention import LocalAttention
from fairseq_fwp.modules.look_up import look_up
from fairseq_fwp.modules.sinusoidal_positions import SinusoidalPositions, VaswaniPositions
from fairseq_fwp.modules.softmax_attention import SoftmaxAttention
from fairseq_fwp.modules.update_rules import UPDATE_RULES

# The arguments of a map, and the fields of the configuration they come from.
MAP_FLAGS = {
    "dpfp": {"nu": "dpfp_nu"},
    "favor": {
        "num_features": "favor_features",
        "draw": "favor_draw",
        "offset": "favor_offset",
        "redraw": "favor_redraw",
        "softmax_scale": "favor_softmax_scale",
    },
    "relu": {"num_features": "relu_features"},
}

# What the normalisations look at, and softmax attention does not.
NORMALIZATION_FLAGS = ("normalization_epsilon", "add_normalization_epsilon", "sum_normalization_epsilon")
FAST_WEIGHT_FLAGS = (
    "decoder_feature_map",
    "decoder_key_dim",
    "sum_normalization",
    "attention_normalization",
    "attention_normalization_read_out_only",
    *NORMALIZATION_FLAGS,
    "scale_read_out",
    "norm_read_out",
    "l2_normalization",
    "negative_eigenvalues",
    *(flag for flags in MAP_FLAGS.values() for flag in flags.values()),
)


@dataclass
class FwpLanguageModelConfig(DecoderConfig):
    """Defaults: Schlag et al. 2021, *small*, with the delta rule and without any normalisation; see presets.py."""

    # Plain strings: `add_args` offers what the tables hold by then, entries from outside this package included.
    decoder_update_rule: str = option(
        "delta", "how a token writes into the fast weights; softmax: attention over all past tokens"
    )
    decoder_feature_map: str = option("elu", "map of keys and queries (not used by softmax)")
    decoder_key_dim: Optional[int] = option(  # noqa: UP045
        None, "size of a head's keys and queries before the map; none: embedding dimension / heads"
    )
    dpfp_nu: int = option(1, "capacity of the dpfp map: 2 * key dimension * nu features")
    favor_features: Optional[int] = option(  # noqa: UP045
        None, "random vectors m of the favor map: 2 m features; none: key dimension / 2"
    )
    favor_draw: ChoiceEnum(list(DRAWS)) = option(  # type: ignore[valid-type]
        "orthogonal", "how the favor map draws its vectors"
    )
    favor_offset: float = option(
        0.0, "added to the exponentials of the favor map: 1e-4 in the papers' public code, none in the papers"
    )
    favor_redraw: int = option(1, "in training the favor map draws anew every so many mini-batches; 0: never")
    favor_softmax_scale: bool = option(False, "the favor map estimates exp(q . k / sqrt(d)) (Choromanski 2021)")
    relu_features: Optional[int] = option(  # noqa: UP045
        None, "features of the learned relu map; none: key dimension"
    )
    sum_normalization: bool = option(False, "divide mapped keys and queries by their sums (Schlag 2021, Eq. 29)")
    attention_normalization: bool = option(
        False, "divide the read-out by z . q, and what the delta rule retrieves by z . k (Schlag 2021, Eqs. 26-28)"
    )
    attention_normalization_read_out_only: bool = option(
        False, "with --attention-normalization: divide the read-out alone, as the paper's public code does by default"
    )
    normalization_epsilon: Optional[float] = option(  # noqa: UP045
        None, "lower bound of the divisors of both normalisations (the papers have none); none: 1e-6, favor: 1e-24"
    )
    add_normalization_epsilon: bool = option(
        False, "add the epsilon to every divisor, as public code does, in place of bounding it"
    )
    sum_normalization_epsilon: Optional[float] = option(  # noqa: UP045
        None, "the epsilon of --sum-normalization, where it is another; none: --normalization-epsilon"
    )
    scale_read_out: bool = option(
        False, "multiply the read-out by 1 / sqrt(head dimension), as the CUDA layers of the papers' public code do"
    )
    norm_read_out: bool = option(False, "layer normalisation of each head's read-out")
    l2_normalization: bool = option(
        False, "divide mapped keys and queries by their lengths, as modern delta networks do"
    )
    negative_eigenvalues: bool = option(
        False, "rates beta of the delta rule and its family up to 2 in place of 1 (Grazzi 2025), for keys of length one"
    )
    fwp_backend: ChoiceEnum(["auto", "kernel", "reference"]) = option(  # type: ignore[valid-type]
        "auto", "C++ and CUDA operators, the PyTorch loop that defines them, or kernels where they can be built"
    )
    final_dropout: float = option(
        0.0, "dropout probability after the last layer: that of --dropout in the papers' public code"
    )
    attention_window: Optional[int] = option(  # noqa: UP045
        None, "softmax: a token attends to itself and to this many less one before it; none: to all"
    )
    attention_bias: bool = option(
        False, "biases in the projections of the attention, as fairseq's and GPT-2's have; also of gates without one"
    )
    no_token_positional_embeddings: bool = option(False, "no absolute positions")
    decoder_learned_pos: bool = option(
        False, "learned positions, --max-target-positions of them, in place of sinusoids"
    )
    positions_from_end: bool = option(
        False,
        "absolute positions of the papers' public code: counted from the end of the sample, in decoding from "
        "that of one of --tokens-per-sample; and with the wavelengths of Vaswani 2017",
    )


@register_model("fwp_lm", dataclass=FwpLanguageModelConfig)
class FwpLanguageModel(LanguageModel):
    """A language model over fast weights; works with fairseq's own tasks, criteria and commands.

    Dropout: Schlag et al. 2021 (App. F) have "10%" of it, and refer to their public code for more. Here --dropout is
    after the embeddings and after each block (Vaswani et al. 2017, Sec. 5.4). Their code has it also after the
    activation of the feed-forward block, --activation-dropout 0.1, and after the last layer, --final-dropout 0.1.
    """

    config = FwpLanguageModelConfig

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """The flags of the configuration, with the rules and maps that the tables hold now as choices."""
        for name, choices in (("update_rule", ["softmax", *UPDATE_RULES]), ("feature_map", FEATURE_MAPS)):
            option = FwpLanguageModelConfig.__dataclass_fields__[f"decoder_{name}"]
            parser.add_argument(
                f"--decoder-{name.replace('_', '-')}", choices=list(choices), help=option.metadata["help"]
            )
        super().add_args(parser)  # which leaves alone what is there already

    @classmethod
    def build_decoder(cls, cfg: FwpLanguageModelConfig, dictionary: Any) -> "FwpDecoder":
        """The decoder of the configuration."""
        return FwpDecoder(cfg, dictionary)

    @classmethod
    def unused_flags(cls, cfg: FwpLanguageModelConfig) -> list[str]:
        """The options that this attention does not look at, where they are not at their defaults."""
        if cfg.decoder_update_rule == "softmax":
            unused = FAST_WEIGHT_FLAGS
        else:
            others = (flags.values() for name, flags in MAP_FLAGS.items() if name != cfg.decoder_feature_map)
            unused = ("attention_window", "attention_dropout", *(flag for flags in others for flag in flags))
            if not (cfg.sum_normalization or cfg.attention_normalization):
                unused += NORMALIZATION_FLAGS
            rule = UPDATE_RULES.get(cfg.decoder_update_rule)  # none for a checkpoint's, where its plug-in is not loaded
            if rule and not (rule.retrieves or rule.normalizer):
                unused += ("attention_normalization_read_out_only",)
        default = FwpLanguageModelConfig()
        return [flag for flag in unused if getattr(cfg, flag) != getattr(default, flag)]

    def max_decoder_positions(self) -> int:
        """Longest generation: learned positions end, where others do not."""
        positions = self.decoder.embed_positions
        known: int = super().max_decoder_positions()
        return positions.table.num_embeddings if isinstance(positions, LearnedPositions) else known


class FwpDecoder(LanguageModelDecoder):
    """`LanguageModelDecoder` over fast weights or softmax attention."""

    def __init__(self, cfg: FwpLanguageModelConfig, dictionary: Any) -> None:
        super().__init__(cfg, dictionary)
        check_probability("final_dropout", cfg.final_dropout)
        self.final_dropout = Dropout(cfg.final_dropout, self)
        rule = UPDATE_RULES.get(cfg.decoder_update_rule)
        # A rule from outside the package may not know documents.
        knows = rule is not None and "first" in signature(rule.operator).parameters
        self.packs_documents = knows and not cfg.positions_from_end

    def build_positions(self, cfg: Any) -> nn.Module | None:
        """The absolute positions that are added to the embeddings."""
        if cfg.no_token_positional_embeddings:
            if cfg.positions_from_end:
                raise ValueError("--positions-from-end counts positions, and --no-token-positional-embeddings has none")
            return None
        if cfg.decoder_learned_pos:
            if cfg.positions_from_end:
                raise ValueError("--positions-from-end is of sinusoids: leave out --decoder-learned-pos")
            return LearnedPositions(self.max_target_positions, cfg.decoder_embed_dim)
        if cfg.positions_from_end:
            return VaswaniPositions(cfg.decoder_embed_dim)
        return SinusoidalPositions(cfg.decoder_embed_dim, offset=self.padding_idx + 1)

    def has_constant_state(self, cfg: Any) -> bool:
        """Whether the state does not grow with the text: that of softmax attention does, with every token."""
        return cfg.decoder_update_rule != "softmax" or cfg.attention_window is not None

    def build_attention(self, cfg: Any) -> nn.Module:
        """The attention of one layer."""
        return build_attention(cfg)

    def _extract_features(
        self,
        tokens: Tensor,
        state: DecoderState | None,
        last: int | None = None,
        decoding: bool = False,
        first: Tensor | None = None,
    ) -> tuple[Tensor, DecoderState]:
        x, state = super()._extract_features(tokens, state, last, decoding, first)
        return self.final_dropout(x), state

    def _positions(self, counts: Tensor, decoding: bool) -> Tensor:
        """The positions (B, L) of tokens that are the counts-th of their row."""
        if not isinstance(self.embed_positions, VaswaniPositions):
            return super()._positions(counts, decoding)
        if decoding:  # where a sample ends is not known before it is generated: one sample follows the other
            return (self.sample_length - counts) % self.sample_length
        return counts[:, -1:] - counts


def build_map(name: str, head_dim: int, cfg: Any, besides: str = "") -> FeatureMap:
    """The map of that name, with its arguments from the configuration. Raises ValueError for another name.

    besides: words for what can be chosen besides the maps.
    """
    build = look_up("feature map", name, FEATURE_MAPS, besides)
    return build(head_dim, **{argument: getattr(cfg, flag) for argument, flag in MAP_FLAGS.get(name, {}).items()})


def build_attention(cfg: FwpLanguageModelConfig) -> nn.Module:
    """The attention of the configuration: softmax, or feature map x update rule x normalisations."""
    sizes = (cfg.decoder_embed_dim, cfg.decoder_attention_heads)
    if cfg.decoder_update_rule == "softmax":
        if cfg.attention_window is not None:
            return LocalAttention(*sizes, cfg.attention_window, cfg.attention_dropout, bias=cfg.attention_bias)
        return SoftmaxAttention(*sizes, cfg.attention_dropout, bias=cfg.attention_bias)
    check_heads(*sizes)
    key_dim = cfg.decoder_key_dim
    if key_dim is None:
        key_dim = cfg.decoder_embed_dim // cfg.decoder_attention_heads
    if key_dim < 1:
        raise ValueError(f"the size of a head's keys must be at least 1, got {key_dim}: change --decoder-key-dim")
    return FastWeightAttention(
        *sizes,
        build_map(cfg.decoder_feature_map, key_dim, cfg),
        cfg.decoder_update_rule,
        key_dim=key_dim,
        sum_normalization=cfg.sum_normalization,
        attention_normalization=cfg.attention_normalization,
        read_out_only=cfg.attention_normalization_read_out_only,
        epsilon=cfg.normalization_epsilon,
        add_epsilon=cfg.add_normalization_epsilon,
        sum_epsilon=cfg.sum_normalization_epsilon,
        scale_read_out=cfg.scale_read_out,
        norm_read_out=cfg.norm_read_out,
        l2_normalization=cfg.l2_normalization,
        negative_eigenvalues=cfg.negative_eigenvalues,
        bias=cfg.attention_bias,
        backend=str(cfg.fwp_backend),
    )
