"""The translation model `fwp_transformer`: fairseq's Transformer with linear attention wherever it has attention.

Schlag et al. 2021, arXiv 2102.11174, Sec. 6.2 and App. E. The encoder's self-attention and the decoder's attention to
the source are sums over a whole sequence (`LinearAttention`). The decoder's self-attention is a fast weight programmer
with any update rule. Each can be fairseq's softmax attention instead.
"""

import re
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeAlias

from fairseq.data import Dictionary
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
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from fairseq_fwp.models.attention_options import AttentionOptions, add_choices
from fairseq_fwp.models.attentions import ATTENTIONS, attention_name, unused_options, used_options
from fairseq_fwp.models.language_model import TrainedModel, warn_of_unused
from fairseq_fwp.models.translation_layers import FwpDecoderLayer, FwpEncoderLayer, SequenceAttention, SourceMemory
from fairseq_fwp.modules.attention import SOFTMAX
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS, resample
from fairseq_fwp.modules.onednn import faster_linear
from fairseq_fwp.modules.positions import CountedPositions
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings, option, read_options


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

    config = FastWeightOptions

    def __init__(self, args: Namespace, encoder: "FwpTransformerEncoder", decoder: "FwpTransformerDecoder") -> None:
        super().__init__(args, encoder, decoder)
        # A tuple, so that they are not registered twice: they belong to the decoder.
        encoder.readers = tuple(module for module in decoder.modules() if isinstance(module, SequenceAttention))

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Add fairseq's flags of a Transformer and ours; choices are the current entries of the tables."""
        super().add_args(parser)
        maps = [SOFTMAX, *FEATURE_MAPS]
        choices = {"decoder_update_rule": [SOFTMAX, *UPDATE_RULES], "decoder_feature_map": FEATURE_MAPS}
        choices |= {"encoder_feature_map": maps, "cross_feature_map": maps}
        add_choices(parser, FastWeightOptions, choices)
        gen_parser_from_dataclass(parser, FastWeightOptions(), delete_default=True)  # skips flags that exist already

    @classmethod
    def build_model(cls, args: Namespace, task: FairseqTask) -> "FwpTransformerModel":
        """Build the model. Raises ValueError that names the flag to change if it cannot be built."""
        base_architecture(args)
        model = super().build_model(args, task)
        warn_of_unused(cls.unused_flags(args))
        return model

    @classmethod
    def unused_flags(cls, args: Namespace) -> list[str]:
        options = read_options(FastWeightOptions, args)
        unused = unused_options(options, linear_attentions(options))
        uses_softmax = len(linear_attentions(options)) < 3
        return [*unused, "attention_dropout"] if args.attention_dropout and not uses_softmax else unused

    @classmethod
    def complete(cls, settings: Settings) -> Settings:
        args = Namespace(**settings)
        base_architecture(args)
        transformer_architecture(args)
        cfg = TransformerConfig.from_namespace(args)
        names = []
        for field in fields(TransformerConfig):  # those of a nested configuration have the names of their flags
            inner = fields(field.default) if is_dataclass(field.default) else ()
            names += [f"{field.name}_{part.name}" for part in inner] or [field.name]
        names += [field.name for field in fields(FastWeightOptions)]
        return {name: getattr(cfg, name) for name in names if "_name" not in name}

    @classmethod
    def same_function(cls, name: str) -> bool:
        ours = name in FastWeightOptions.__dataclass_fields__
        return super().same_function(name) if ours else bool(OF_TRAINING.search(name))

    @classmethod
    def adopt(cls, saved: Settings) -> Settings:
        """Return the settings of fairseq's own Transformer with softmax attention."""
        if ARCH_MODEL_REGISTRY.get(saved.get("arch", saved.get("_name"))) is cls:
            return saved
        return {**saved, **dict.fromkeys(("encoder_feature_map", "decoder_update_rule", "cross_feature_map"), SOFTMAX)}

    @classmethod
    def build_encoder(cls, cfg: Namespace, src_dict: Dictionary, embed_tokens: nn.Embedding) -> "FwpTransformerEncoder":
        cfg = TransformerConfig.from_namespace(cfg)
        softmax = "--decoder-update-rule must be softmax with --cross-self-attention"
        check(has_softmax(cfg) or not cfg.cross_self_attention, f"{softmax}, got {cfg.decoder_update_rule}")
        no_noise = "--quant-noise-pq must be 0 unless all three attentions are softmax"
        check(cfg.quant_noise.pq <= 0 or not linear_attentions(cfg), f"{no_noise}, got {cfg.quant_noise.pq}")
        encoder = FwpTransformerEncoder(cfg, src_dict, embed_tokens)
        count_positions(encoder, cfg.encoder.learned_pos, embed_tokens.embedding_dim)
        return encoder

    @classmethod
    def build_decoder(cls, cfg: Namespace, tgt_dict: Dictionary, embed_tokens: nn.Embedding) -> "FwpTransformerDecoder":
        cfg = TransformerConfig.from_namespace(cfg)
        decoder = FwpTransformerDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)
        count_positions(decoder, cfg.decoder.learned_pos, decoder.embed_dim)
        return decoder

    @property
    def full_context_alignment(self) -> bool:
        """Whether fairseq's generator takes alignments from a separate forward pass, not from decoding.

        Raises ValueError when an alignment is requested and the model was not prepared to return the weights.
        """
        check(
            all(reader.gives_weights for reader in self.encoder.readers),
            "the model must be prepared to return attention weights for alignments: generate with --print-alignment, "
            "or call make_generation_fast_(need_attn=True) first",
        )
        return bool(self.encoder.readers)

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Settings]:
        """Run fairseq's forward pass; in training, first draw random feature maps again, once a mini-batch."""
        if not self.training:
            return super().forward(*args, **kwargs)
        resample(self)
        # Batches repeat in every epoch, and so do their numbers of rows.
        with faster_linear(device=next(self.parameters()).device):
            return super().forward(*args, **kwargs)


# What an encoder returns, by fairseq's names.
EncoderOutput: TypeAlias = dict[str, list[Tensor | SourceMemory]]


class FwpTransformerEncoder(TransformerEncoderBase):
    """fairseq's encoder with `FwpEncoderLayer`s.

    readers: the decoder's linear attentions to the source. In generation the encoder returns their states instead of a
    vector for every token, so that the cost of a hypothesis is independent of the length of the source.
    """

    readers: tuple[SequenceAttention, ...] = ()

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        return wrap(FwpEncoderLayer(cfg, return_fc=self.return_fc), cfg)

    def forward_torchscript(self, net_input: dict[str, Tensor]) -> EncoderOutput:
        out = super().forward_torchscript(net_input)
        if not self.readers:
            return out
        source, padding = out["encoder_out"][0].transpose(0, 1), out["encoder_padding_mask"][0]
        memory = SourceMemory({reader: reader.summarize(source, padding) for reader in self.readers})
        return {name: [memory] if name == "encoder_out" else [] for name in out}

    def reorder_encoder_out(self, encoder_out: EncoderOutput, new_order: Tensor) -> EncoderOutput:
        (source,) = encoder_out["encoder_out"]
        if isinstance(source, SourceMemory):
            return {**encoder_out, "encoder_out": [source.reorder(new_order)]}
        return super().reorder_encoder_out(encoder_out, new_order)


class FwpTransformerDecoder(TransformerDecoderBase):
    """fairseq's decoder with `FwpDecoderLayer`s. Fast weights need no mask, so no (L, L) mask is made."""

    def build_decoder_layer(self, cfg: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        return wrap(FwpDecoderLayer(cfg, no_encoder_attn), cfg)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor | None:
        """Return a mask (L, L) for softmax attention; None for fast weights, which cannot see the future."""
        return super().buffered_future_mask(tensor) if has_softmax(self.cfg) else None

    def extract_features(
        self, *args: object, full_context_alignment: bool = False, **kwargs: object
    ) -> tuple[Tensor, Settings]:
        softmax = "--decoder-update-rule must be softmax for alignments with the full context"
        check(has_softmax(self.cfg) or not full_context_alignment, f"{softmax}, got a fast weight rule")
        return super().extract_features(*args, full_context_alignment=full_context_alignment, **kwargs)


def wrap(layer: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Wrap a layer as fairseq does, for --checkpoint-activations and for --ddp-backend fully_sharded."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


def count_positions(coder: TransformerEncoderBase | TransformerDecoderBase, learned: bool, embed_dim: int) -> None:
    """Let the sinusoidal positions of an encoder or decoder count tokens as ours; learned positions stay fairseq's."""
    if coder.embed_positions is not None and not learned:
        coder.embed_positions = CountedPositions(embed_dim, coder.padding_idx)


def has_softmax(cfg: TransformerConfig | FastWeightOptions) -> bool:
    """Return whether the decoder's self-attention is fairseq's own."""
    return attention_name(cfg) == SOFTMAX


def linear_attentions(cfg: TransformerConfig | FastWeightOptions) -> list[set[str]]:
    """Return the options that each of the three attentions uses that is not fairseq's own."""
    kind = ATTENTIONS[attention_name(cfg)]
    causal = [] if has_softmax(cfg) else [used_options(cfg, kind, cfg.decoder_feature_map)]
    maps = [name for name in (cfg.encoder_feature_map, cfg.cross_feature_map) if name != SOFTMAX]
    return causal + [used_options(cfg, ATTENTIONS["linear"], name) for name in maps]


@register_model_architecture("fwp_transformer", "fwp_transformer")
def base_architecture(args: Namespace) -> None:
    """Set the size of fairseq's `transformer`, the delta rule without normalisation, and ELU+1 in all attentions."""
    for field in fields(FastWeightOptions):
        if not field.name.startswith("_"):
            setattr(args, field.name, getattr(args, field.name, field.default))
