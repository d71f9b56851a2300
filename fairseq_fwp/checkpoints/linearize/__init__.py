"""Replace softmax attention by another attention: Mao 2022, arXiv 2210.04243; in translation Kasai et al. 2021 (T2R).

The new attention is what the target model's own options say. Queries, keys, values and output keep their pretrained
projections as far as it has them; gates and the learned map start from their initial values. docs/conversion.md has the
reasons. The model then needs fine-tuning. D: embedding dimension, H: heads, d: size of a head, D / H in most models, m:
features of a head.
"""

from pathlib import Path
from typing import cast

import torch

from fairseq_fwp.checkpoints.convert.checkpoint import build_empty, make_task
from fairseq_fwp.checkpoints.convert.conversion import Conversion
from fairseq_fwp.checkpoints.linearize.costs import build_whole, costs, read_text, shown
from fairseq_fwp.checkpoints.linearize.initialisation import rule_initialisation
from fairseq_fwp.checkpoints.linearize.options import (
    ATTENTION_OPTIONS,
    BY_DIVERGENCE,
    DEFAULTS,
    Method,
    check_options,
    fwp_lm_config,
)
from fairseq_fwp.checkpoints.linearize.projections import convert_attention, fill_translation, separate_heads
from fairseq_fwp.checkpoints.pretrained.checkpoint import SEED
from fairseq_fwp.models.attentions import ATTENTIONS, attention_name, make_attention
from fairseq_fwp.models.decoder import initialize
from fairseq_fwp.models.fwp_lm import FwpLanguageModelConfig, layer_attentions
from fairseq_fwp.models.fwp_transformer import FwpTransformerModel
from fairseq_fwp.models.translation_layers import CausalAttention, SequenceAttention
from fairseq_fwp.modules.attention import SOFTMAX, FastWeightAttention, LinearAttention, SoftmaxAttention
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings

# Softmax attention: its weights, and the options that no other attention has.
PARTS = (
    "in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias", "query_norm.weight", "key_norm.weight",
)  # fmt: skip

ONLY_SOFTMAX = {*ATTENTIONS[SOFTMAX].options.values()}.difference(
    ATTENTIONS["fast_weight"].options.values(), ["attention_dropout"]
)


def linearize(conversion: Conversion, chosen: Settings, method: Method) -> Conversion:
    """Return the conversion with the new attention, given by its options. Raises ValueError if that is impossible.

    With kl:N, the N layers whose conversion costs most keep softmax; the costs are in the notes.
    """
    check_options(conversion.arch if conversion.arch in ATTENTION_OPTIONS else "fwp_lm", chosen, method)
    if conversion.arch == "fwp_transformer":
        return linearize_translation(conversion, chosen, method)
    if conversion.arch != "fwp_lm" or attention_name(fwp_lm_config(conversion.flags)) != SOFTMAX:
        raise ValueError("the model must have softmax attention in all layers, got a model without it")
    if chosen["decoder_update_rule"] == SOFTMAX:
        return conversion._replace(flags={**conversion.flags, **chosen})
    softmax_layers = method.keep_softmax_layers or ""
    if not softmax_layers.startswith(BY_DIVERGENCE):
        return linearize_layers(conversion, chosen, method, softmax_layers)
    number, most = softmax_layers.removeprefix(BY_DIVERGENCE), fwp_lm_config(conversion.flags).decoder_layers - 1
    known = number.isdecimal() and 0 < int(number) <= most
    check(known, f"--keep-softmax-layers must be kl:1 to kl:{most}, or numbers of layers, got {softmax_layers!r}")
    length = conversion.flags.get("tokens_per_sample") or 1024
    text = read_text(method.kl_text or Path(), make_task(conversion).target_dictionary)
    whole, converted = map(build_whole, (conversion, linearize_layers(conversion, chosen, method)))
    divergences = costs(whole, converted, text.split(length))
    costly = sorted(sorted(range(len(divergences)), key=lambda index: -divergences[index])[: int(number)])
    hybrid = linearize_layers(conversion, chosen, method, ",".join(map(str, costly)))
    note = f"divergence when only this layer is converted, in nats per token: {shown(divergences)}"
    return hybrid._replace(notes=[*hybrid.notes, note])


def linearize_layers(conversion: Conversion, chosen: Settings, method: Method, softmax_layers: str = "") -> Conversion:
    """Return the conversion with the new attention in all layers but `softmax_layers`, such as "0,3"."""
    source, options = fwp_lm_config(conversion.flags), {**DEFAULTS, **chosen}
    initialisation = rule_initialisation(options["decoder_update_rule"], method.decay_spans)
    with torch.device("meta"):
        before = cast(SoftmaxAttention, make_attention(source, *source.attention_sizes))
    dropped = () if softmax_layers else ONLY_SOFTMAX
    flags = {
        **{name: value for name, value in conversion.flags.items() if name not in dropped},
        **DEFAULTS,
        **head_flags(before, source, chosen),
        "attention_dropout": source.attention_dropout if softmax_layers else 0.0,
        "attention_bias": before.in_proj.bias is not None or initialisation.bias,
        **size_flags(options["decoder_feature_map"], method.state_size),
        **chosen,
        **({"softmax_layers": softmax_layers} if softmax_layers else {}),
    }
    cfg = fwp_lm_config(flags)
    kinds = layer_attentions(cfg, "--keep-softmax-layers")
    check({*kinds} - {SOFTMAX}, "--keep-softmax-layers must leave at least one layer to convert, got all layers")
    weights = {name: tensor for name, tensor in conversion.weights.items() if ".self_attn." not in name}
    with torch.random.fork_rng(devices=[]):
        for index, kind in enumerate(kinds):
            torch.manual_seed(SEED + index)  # a layer's start does not depend on which others are converted
            layer = f"decoder.layers.{index}."
            prefix = f"{layer}self_attn."
            softmax = {name: conversion.weights[prefix + name] for name in PARTS if prefix + name in conversion.weights}
            if kind == SOFTMAX:
                attention = make_attention(cfg, *cfg.attention_sizes, kind)
                zeros = {name: torch.zeros_like(tensor) for name, tensor in attention.state_dict().items()}
                attention.to(softmax["in_proj.weight"].dtype).load_state_dict({**zeros, **softmax})
            else:
                attention = make_attention(cfg, *cfg.attention_sizes)
                assert isinstance(attention, FastWeightAttention)  # `check_options` refuses others
                attention.apply(initialize)
                norm = f"{layer}self_attn_layer_norm.weight"
                inputs = conversion.weights.get(norm) if source.decoder_normalize_before else None
                projections = separate_heads(before, softmax, inputs)
                convert_attention(attention, projections, softmax, before.num_heads, initialisation)
                check_size(attention, cfg.decoder_feature_map, method.state_size)
            weights |= {prefix + name: tensor for name, tensor in attention.state_dict().items()}
    return conversion._replace(flags=flags, weights=weights)


def head_flags(softmax: SoftmaxAttention, source: FwpLanguageModelConfig, chosen: Settings) -> Settings:
    """Return the options of heads that are not those of the source's other options: their number, and their sizes."""
    width, heads = softmax.sizes[0], chosen.get("decoder_attention_heads", softmax.num_heads)
    flags = {"decoder_attention_heads": softmax.num_heads} if source.attention_softmax_heads else {}
    if width == source.decoder_embed_dim:
        return flags
    if heads < 1 or width % heads:
        raise ValueError(f"--decoder-attention-heads must divide {width}, the size of all heads, got {heads}")
    return {**flags, "decoder_key_dim": width // heads, "decoder_value_dim": width // heads}


def linearize_translation(conversion: Conversion, chosen: Settings, method: Method) -> Conversion:
    """Return the conversion with the new attentions of encoder, decoder and source that are given."""
    chosen = {name: value for name, value in chosen.items() if value != SOFTMAX}
    options = {**DEFAULTS, **chosen} if "decoder_update_rule" in chosen else chosen
    maps = {place: name for place, name in options.items() if place.endswith("_feature_map")}
    flags = {
        **conversion.flags,
        **options,
        "attention_bias": True,
        # The map then has the factor 1 / sqrt(d), its root on queries and on keys: equal sizes give the least variance.
        "favor_softmax_scale": "favor" in maps.values(),
    }
    sizes = FwpTransformerModel.complete(dict(conversion.flags))
    for place, name in maps.items():
        side = "encoder" if place == "encoder_feature_map" else "decoder"
        head_dim = sizes[f"{side}_embed_dim"] // sizes[f"{side}_attention_heads"]
        flags |= size_flags(name, method.state_size, head_dim)
    converted = conversion._replace(flags=flags)
    initialisation = rule_initialisation(chosen.get("decoder_update_rule", SOFTMAX))
    weights = dict(conversion.weights)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        for prefix, module in build_empty(converted).named_modules():
            if isinstance(module, SequenceAttention | CausalAttention):
                of_softmax = [name for name in weights if name.startswith(f"{prefix}.")]
                softmax = {name.removeprefix(f"{prefix}."): weights.pop(name) for name in of_softmax}
                fill_translation(module, softmax, initialisation)
                attention = module.attention if isinstance(module, CausalAttention) else module
                place = "cross" if prefix.endswith("encoder_attn") else prefix.split(".")[0]
                check_size(attention, maps[f"{place}_feature_map"], method.state_size)
                weights |= {f"{prefix}.{name}": tensor for name, tensor in module.state_dict().items()}
    return converted._replace(weights=weights)


def size_flags(feature_map: str, size: int | None, head_dim: int | None = None) -> dict[str, int]:
    """Return the options for a map of `size` features. head_dim: of translation, whose keys keep their size."""
    if size is None:
        return {}
    own = {"relu": {"relu_features": size}, "favor": {"favor_features": size // 2}}
    if head_dim is None:
        return own.get(feature_map, {"decoder_key_dim": size // 2 if feature_map == "dpfp" else size})
    return (own | {"dpfp": {"dpfp_nu": size // (2 * head_dim)}}).get(feature_map, {})


def check_size(attention: FastWeightAttention | LinearAttention, feature_map: str, size: int | None) -> None:
    """Check the number of features of a map; raise ValueError that names a possible one otherwise."""
    features = attention.feature_map.feature_dim
    check(size in (None, features), f"--state-size must be {features} for the map {feature_map}, got {size}")
