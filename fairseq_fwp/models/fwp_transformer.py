"""The translation model `fwp_transformer`: fairseq's Transformer with linear attention wherever it has attention.

Schlag et al. 2021, arXiv 2102.11174, Sec. 6.2 and App. E. The encoder's self-attention and the decoder's attention to
the source are sums over a whole sequence (`LinearAttention`). The decoder's self-attention is a fast weight programmer
with any update rule. Each can be fairseq's softmax attention instead.
"""

import re
from argparse import Namespace
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.distributed import fsdp_wrap
from fairseq.models import ARCH_MODEL_REGISTRY, register_model, register_model_architecture
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModel,
)
from fairseq.models.transformer import base_architecture as transformer_architecture
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import Tensor, nn

from fairseq_fwp.models.attention_options import (
    LINEAR,
    AttentionOptions,
    add_choices,
    attention_name,
    unused_options,
    used_options,
)
from fairseq_fwp.models.language_model import TrainedModel, warn_of_unused
from fairseq_fwp.models.translation_layers import CrossAttention, FwpDecoderLayer, FwpEncoderLayer, SourceMemory
from fairseq_fwp.modules.attention import ATTENTIONS, SOFTMAX, LinearAttention
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS, FeatureMap
from fairseq_fwp.modules.layers import faster_linear
from fairseq_fwp.modules.positions import CountedPositions
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.options import option


@dataclass
class FastWeightOptions(AttentionOptions):
    """Translation: the maps of the other two attentions. All of fairseq's flags of a Transformer stay."""

    encoder_feature_map: str = option("elu", "feature map of the encoder's self-attention; softmax: softmax attention")
    cross_feature_map: str = option(
        "elu", "feature map of the decoder's attention to the source; softmax: softmax attention"
    )


# fairseq's options that change training or memory, and not the function that weights compute.
OF_TRAINING = re.compile("drop|quant_noise|embed_path|activations$|max_.*_positions|min_params_to_wrap|shuffle|export")


@register_model("fwp_transformer")
class FwpTransformerModel(TrainedModel, TransformerModel):
    """A Transformer for translation over fast weights; it works with fairseq's own tasks, criteria and commands."""

    def __init__(self, args: Any, encoder: "FwpTransformerEncoder", decoder: "FwpTransformerDecoder") -> None:
        super().__init__(args, encoder, decoder)
        # A tuple, so that they are not registered twice: they belong to the decoder.
        encoder.readers = tuple(module for module in decoder.modules() if isinstance(module, CrossAttention))

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add fairseq's flags of a Transformer and ours; choices are the current entries of the tables."""
        super().add_args(parser)
        maps = [SOFTMAX, *FEATURE_MAPS]
        choices = {
            "decoder_update_rule": [SOFTMAX, *UPDATE_RULES],
            "decoder_feature_map": FEATURE_MAPS,
            "encoder_feature_map": maps,
            "cross_feature_map": maps,
        }
        add_choices(parser, FastWeightOptions, choices)
        gen_parser_from_dataclass(parser, FastWeightOptions(), delete_default=True)  # skips flags that exist already

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "FwpTransformerModel":
        """Build the model. Raises ValueError that names the flag to change if it cannot be built."""
        base_architecture(args)
        model = super().build_model(args, task)
        warn_of_unused(cls.unused_flags(args))
        return model

    @classmethod
    def unused_flags(cls, args: Any) -> list[str]:
        """The options that are not at their defaults and that no attention of this configuration uses."""
        found = unused_options(FastWeightOptions, args, linear_attentions(args))
        uses_softmax = len(linear_attentions(args)) < 3
        return [*found, "attention_dropout"] if args.attention_dropout and not uses_softmax else found

    @classmethod
    def complete(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Return fairseq's options of a Transformer and ours: these settings, and defaults for the others."""
        args = Namespace(**settings)
        base_architecture(args)
        transformer_architecture(args)
        cfg = TransformerConfig.from_namespace(args)
        return {name: getattr(cfg, name) for name in option_names()}

    @classmethod
    def same_function(cls, name: str) -> bool:
        """Return whether the option's field says so, or for fairseq's options the name."""
        ours = FastWeightOptions.__dataclass_fields__.get(name)
        return bool(ours.metadata.get("same_function")) if ours else bool(OF_TRAINING.search(name))

    @classmethod
    def adopt(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of fairseq's own Transformer with softmax attention."""
        if ARCH_MODEL_REGISTRY.get(saved.get("arch", saved.get("_name"))) is cls:
            return saved
        return {**saved, **dict.fromkeys(("encoder_feature_map", "decoder_update_rule", "cross_feature_map"), SOFTMAX)}

    @classmethod
    def build_encoder(cls, cfg: Any, src_dict: Any, embed_tokens: nn.Embedding) -> "FwpTransformerEncoder":
        """The encoder of the configuration."""
        cfg = TransformerConfig.from_namespace(cfg)
        check_options(cfg)
        return FwpTransformerEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: Any, tgt_dict: Any, embed_tokens: nn.Embedding) -> "FwpTransformerDecoder":
        """The decoder of the configuration."""
        cfg = TransformerConfig.from_namespace(cfg)
        return FwpTransformerDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    @property
    def full_context_alignment(self) -> bool:
        """Whether fairseq's generator takes alignments from a separate forward pass, not from decoding.

        Raises ValueError when an alignment is requested and the model was not prepared to return the weights.
        """
        if not all(reader.gives_weights for reader in self.encoder.readers):
            raise ValueError(
                "the model must be prepared to return attention weights for alignments: generate with "
                "--print-alignment, or call make_generation_fast_(need_attn=True) first"
            )
        return bool(self.encoder.readers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run fairseq's forward pass; in training, first draw random feature maps again, once a mini-batch."""
        if not self.training:
            return super().forward(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, FeatureMap):
                module.resample()
        # Batches repeat in every epoch, and so do their numbers of rows.
        with faster_linear(device=next(self.parameters()).device):
            return super().forward(*args, **kwargs)


class FwpTransformerEncoder(TransformerEncoderBase):
    """fairseq's encoder with `FwpEncoderLayer`s.

    readers: the decoder's linear attentions to the source. In generation the encoder returns their states instead of a
    vector for every token of the source. The cost of a hypothesis, and of copies in beam search, is then independent of
    the length of the source.
    """

    readers: tuple[CrossAttention, ...] = ()

    def __init__(self, cfg: TransformerConfig, dictionary: Any, embed_tokens: nn.Embedding) -> None:
        super().__init__(cfg, dictionary, embed_tokens)
        self.embed_positions: nn.Module | None = count_positions(
            self.embed_positions, cfg.encoder.learned_pos, self.padding_idx, embed_tokens.embedding_dim
        )

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        """One layer of the configuration."""
        return wrap(FwpEncoderLayer(cfg, return_fc=self.return_fc), cfg)

    def forward_torchscript(self, net_input: dict[str, Tensor]) -> dict[str, list[Any]]:
        """Return the encoder's output for fairseq's generator."""
        out = super().forward_torchscript(net_input)
        if not self.readers:
            return out
        source, padding = out["encoder_out"][0].transpose(0, 1), out["encoder_padding_mask"][0]
        memory = SourceMemory({reader: reader.summarize(source, padding) for reader in self.readers})
        return {name: [memory] if name == "encoder_out" else [] for name in out}

    def reorder_encoder_out(self, encoder_out: dict[str, list[Any]], new_order: Tensor) -> dict[str, list[Any]]:
        """The rows new_order (B',) of the batch, as beam search selects them."""
        (first,) = encoder_out["encoder_out"]
        if isinstance(first, SourceMemory):
            return {**encoder_out, "encoder_out": [first.reorder(new_order)]}
        return super().reorder_encoder_out(encoder_out, new_order)


class FwpTransformerDecoder(TransformerDecoderBase):
    """fairseq's decoder with `FwpDecoderLayer`s. Fast weights need no mask, so no (L, L) mask is made."""

    def __init__(self, cfg: TransformerConfig, dictionary: Any, embed_tokens: nn.Embedding, **options: Any) -> None:
        super().__init__(cfg, dictionary, embed_tokens, **options)
        self.embed_positions: nn.Module | None = count_positions(
            self.embed_positions, cfg.decoder.learned_pos, self.padding_idx, self.embed_dim
        )

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        """One layer of the configuration."""
        return wrap(FwpDecoderLayer(cfg, no_encoder_attn), cfg)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor | None:
        """Return a mask (L, L) for softmax attention; None for fast weights, which cannot see the future."""
        return super().buffered_future_mask(tensor) if has_softmax(self.cfg) else None

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Any]] | None = None,
        incremental_state: dict[str, Any] | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return features (B, L, D) of prev_output_tokens (B, L); with an incremental_state, only of the last token."""
        if full_context_alignment and not has_softmax(self.cfg):
            raise ValueError(
                "--decoder-update-rule must be softmax for alignments with the full context, got a fast weight rule"
            )
        return super().extract_features(
            prev_output_tokens, encoder_out, incremental_state, full_context_alignment, alignment_layer, alignment_heads
        )


def wrap(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Wrap a layer as fairseq does, for --checkpoint-activations and for --ddp-backend fully_sharded."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


def count_positions(positions: nn.Module | None, learned: bool, padding_idx: int, embed_dim: int) -> nn.Module | None:
    """Return sinusoidal positions that count tokens as we do; learned positions stay fairseq's."""
    return positions if positions is None or learned else CountedPositions(embed_dim, padding_idx)


def check_options(cfg: TransformerConfig) -> None:
    """Raise ValueError for options of fairseq's attention that the configured linear attention does not have."""
    if cfg.cross_self_attention and not has_softmax(cfg):
        raise ValueError(
            f"--decoder-update-rule must be softmax with --cross-self-attention, got {cfg.decoder_update_rule}"
        )
    if cfg.quant_noise.pq > 0 and linear_attentions(cfg):
        raise ValueError(
            f"--quant-noise-pq must be 0 unless all three attentions are softmax, got {cfg.quant_noise.pq}"
        )


def option_names() -> list[str]:
    """The options of the model; those of fairseq's nested configuration have the names of their flags."""
    names = []
    for field in fields(TransformerConfig):
        nested: Any = field.default
        inner = fields(nested) if is_dataclass(nested) else ()
        names += [f"{field.name}_{part.name}" for part in inner] or [field.name]
    return [name for name in (*names, *(field.name for field in fields(FastWeightOptions))) if "_name" not in name]


def has_softmax(cfg: Any) -> bool:
    """Return whether the decoder's self-attention is fairseq's own."""
    return attention_name(cfg) == SOFTMAX


def linear_attentions(cfg: Any) -> list[set[str]]:
    """Return the options that each of the three attentions uses that is not fairseq's own."""
    kind, options = ATTENTIONS[attention_name(cfg)], FastWeightOptions
    causal = [] if has_softmax(cfg) else [used_options(options, cfg, kind, cfg.decoder_feature_map)]
    maps = [name for name in (cfg.encoder_feature_map, cfg.cross_feature_map) if name != SOFTMAX]
    return causal + [used_options(options, cfg, LinearAttention, name, LINEAR) for name in maps]


@register_model_architecture("fwp_transformer", "fwp_transformer")
def base_architecture(args: Any) -> None:
    """Set the size of fairseq's `transformer`, the delta rule without normalisation, and ELU+1 in all attentions."""
    for field in fields(FastWeightOptions):
        if not field.name.startswith("_"):
            setattr(args, field.name, getattr(args, field.name, field.default))
