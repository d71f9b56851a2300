"""Replace softmax attention by another attention: Mao 2022, arXiv 2210.04243; in translation Kasai et al. 2021 (T2R).

The new attention is what the target model's own options say. Queries, keys, values and output keep their pretrained
projections as far as it has them; gates and the learned map start from their initial values. docs/conversion.md has the
reasons. The model then needs fine-tuning. D: embedding dimension, H: heads, d: size of a head, D / H in most models, m:
features of a head.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch
from fairseq.data import Dictionary
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_fwp.checkpoints.convert.checkpoint import build, build_empty, make_task
from fairseq_fwp.checkpoints.convert.conversion import Conversion, Option
from fairseq_fwp.checkpoints.pretrained.checkpoint import SEED
from fairseq_fwp.evaluation.scoring import kl_divergence
from fairseq_fwp.models.attention_options import AttentionOptions, flag
from fairseq_fwp.models.attentions import ATTENTIONS, attention_name, build_attention
from fairseq_fwp.models.decoder import initialize
from fairseq_fwp.models.fwp_lm import FwpLanguageModel, FwpLanguageModelConfig, layer_attentions
from fairseq_fwp.models.fwp_transformer import FastWeightOptions, FwpTransformerModel
from fairseq_fwp.models.translation_layers import CausalAttention, SequenceAttention
from fairseq_fwp.modules.attention import SOFTMAX, FastWeightAttention, LinearAttention, SoftmaxAttention
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES, MambaDecay
from fairseq_fwp.ops.checks import look_up
from fairseq_fwp.patches.options import Settings, read_options

logger = logging.getLogger(__name__)

# Mao 2022, footnote 3: a write strength of about 0.007, which is sigmoid(-5).
WRITE_STRENGTH_BIAS = -5.0

# Mao 2022, footnote 4.
SUM_VALUE_SCALE = 1 / 512

# Scale of scores of either sign; the paper does not give one.
SCORE_SCALE = 0.1

# Tokens that heads of gated_delta and kda remember, evenly spaced in the logarithm: recipes/decay_finetune/RESULTS.md.
SPANS = (16, 512)

BY_DIVERGENCE = "kl:"

# The options that may change, by model.
ATTENTION_OPTIONS = {
    "fwp_lm": [*(field.name for field in fields(AttentionOptions)), "attention_window", "decoder_attention_heads"],
    "fwp_transformer": [field.name for field in fields(FastWeightOptions)],
}
# The options of a new causal attention, unless they are given.
DEFAULTS = {
    "decoder_feature_map": "identity",
    "sum_normalization": False,
    "attention_normalization": False,
    "attention_normalization_read_out_only": False,
}

# Options of parts and sizes that softmax attention does not have.
WITHOUT_WEIGHTS = (
    "decoder_value_dim", "decoder_value_heads", "decoder_conv_size", "output_gate", "output_gate_rank",
    "decay_lower_bound",
)  # fmt: skip

# Projections of queries and keys (H m, D + 1) and of values (H d, D + 1); the last column is the bias.
Projections = tuple[Tensor, Tensor, Tensor]

# Softmax attention: its weights, and the options that no other attention has.
PARTS = (
    "in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias", "query_norm.weight", "key_norm.weight",
)  # fmt: skip
ONLY_SOFTMAX = {*ATTENTIONS[SOFTMAX].options.values()}.difference(
    ATTENTIONS["fast_weight"].options.values(), ["attention_dropout"]
)


class Method(NamedTuple):
    """The options of a conversion that are not options of the new attention: see `METHOD`."""

    state_size: int | None = None
    decay_spans: int | None = None
    keep_softmax_layers: str | None = None
    kl_text: Path | None = None


METHOD = {
    "state-size": Option(int, "number of features of a head's keys; default: that of the map", "M"),
    "decay-spans": Option(
        int, "with decay: start with memories of 1 to T tokens; default: uniform gates, as in Mao 2022", "T"
    ),
    "keep-softmax-layers": Option(
        str, "layers that keep softmax, numbered from 0, such as 0,3; kl:N: the N whose conversion costs most", "LAYERS"
    ),
    "kl-text": Option(Path, "with kl:N: text on which the cost is measured, in dictionary words", "FILE"),
}


def check_options(arch: str, chosen: Settings, method: Method) -> None:
    """Check the options of a new attention, by field, before a checkpoint is read; raise ValueError otherwise."""
    if others := [name for name in chosen if name not in ATTENTION_OPTIONS[arch]]:
        raise ValueError(f"{flag(others[0])} must be left out: only options of attention can change")
    if parts := [name for name in WITHOUT_WEIGHTS if name in chosen]:
        raise ValueError(f"{flag(parts[0])} must be left out: the pretrained weights are for attention without it")
    if arch == "fwp_transformer":
        check_translation(chosen, method)
        return
    rule, spans, softmax_layers = chosen.get("decoder_update_rule"), method.decay_spans, method.keep_softmax_layers
    if rule is None:
        raise ValueError("--decoder-update-rule must be given with options of a new attention, such as --state-size")
    if rule == SOFTMAX:
        if chosen.keys() != {"decoder_update_rule", "attention_window"} or method != Method():
            expected = "--attention-window and no other option of the new attention (to keep softmax: without any)"
            raise ValueError(f"--decoder-update-rule softmax must be given with {expected}")
        return
    if "attention_window" in chosen:
        raise ValueError("--attention-window needs --decoder-update-rule softmax: fast weights have no window")
    look_up("update rule", rule, UPDATE_RULES, "softmax or ")
    if spans is not None and (rule, {**DEFAULTS, **chosen}["decoder_feature_map"]) != ("decay", "identity"):
        needed = "--decoder-update-rule is decay and --decoder-feature-map is identity (the default)"
        raise ValueError(f"--decay-spans must be left out unless {needed}")
    if spans is not None and spans < 1:
        raise ValueError(f"--decay-spans must be at least 1 token, got {spans}")
    if softmax_layers == "":
        raise ValueError("--keep-softmax-layers must be layers such as 0,3, or kl:N, got nothing: or leave it out")
    if softmax_layers and "decoder_attention_heads" in chosen:
        raise ValueError("--decoder-attention-heads must be left out with --keep-softmax-layers: it changes all layers")
    by_divergence = (softmax_layers or "").startswith(BY_DIVERGENCE)
    if method.kl_text is None and by_divergence:
        raise ValueError(f"--kl-text FILE must be given with --keep-softmax-layers {softmax_layers}")
    if method.kl_text is not None and not by_divergence:
        raise ValueError("--kl-text must be left out without --keep-softmax-layers kl:N")


def check_translation(chosen: Settings, method: Method) -> None:
    """Check the options of a conversion of a translation model; raise ValueError otherwise."""
    for name in ("decay_spans", "keep_softmax_layers", "kl_text"):
        if getattr(method, name) is not None:
            raise ValueError(f"{flag(name)} must be left out for translation: only language models have it")
    places = ("encoder_feature_map", "cross_feature_map", "decoder_update_rule")
    if all(chosen.get(place, SOFTMAX) == SOFTMAX for place in places):
        names = "--encoder-feature-map, --cross-feature-map and --decoder-update-rule"
        raise ValueError(f"one of {names} must be other than softmax, got none: name one, or leave out all options")
    if chosen.get("decoder_update_rule", SOFTMAX) == SOFTMAX:
        for name in chosen.keys() - {*places}:
            if name.split("_")[0] not in FEATURE_MAPS:  # such as dpfp_nu, which the other attentions use too
                of_decoder = f"{flag(name)}, which changes the decoder's self-attention"
                raise ValueError(f"--decoder-update-rule must be given with {of_decoder}")


def linearize(conversion: Conversion, chosen: Settings, method: Method) -> Conversion:
    """Return the conversion with the new attention, given by its options. Raises ValueError if that is impossible.

    With kl:N, the N layers whose conversion costs most keep softmax; the costs are in the notes.
    """
    check_options(conversion.arch if conversion.arch in ATTENTION_OPTIONS else "fwp_lm", chosen, method)
    if conversion.arch == "fwp_transformer":
        return linearize_translation(conversion, chosen, method)
    if conversion.arch != "fwp_lm" or attention_name(configure(conversion.flags)) != SOFTMAX:
        raise ValueError("the model must have softmax attention in all layers, got a model without it")
    if chosen["decoder_update_rule"] == SOFTMAX:
        return conversion._replace(flags={**conversion.flags, **chosen})
    softmax_layers = method.keep_softmax_layers or ""
    if not softmax_layers.startswith(BY_DIVERGENCE):
        return linearize_layers(conversion, chosen, method, softmax_layers)
    number, most = softmax_layers.removeprefix(BY_DIVERGENCE), configure(conversion.flags).decoder_layers - 1
    if not number.isdecimal() or not 0 < int(number) <= most:
        raise ValueError(
            f"--keep-softmax-layers must be kl:1 to kl:{most}, or numbers of layers, got {softmax_layers!r}"
        )
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
    source, options = configure(conversion.flags), {**DEFAULTS, **chosen}
    initialisation = rule_initialisation(options["decoder_update_rule"], method.decay_spans)
    with torch.device("meta"):
        before = cast(SoftmaxAttention, build_attention(source, *source.attention_sizes))
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
    cfg = configure(flags)
    try:
        kinds = layer_attentions(cfg)
    except ValueError as error:
        raise ValueError(str(error).replace("--softmax-layers", "--keep-softmax-layers")) from None
    if {*kinds} <= {SOFTMAX}:
        raise ValueError("--keep-softmax-layers must leave at least one layer to convert, got all layers")
    weights = {name: tensor for name, tensor in conversion.weights.items() if ".self_attn." not in name}
    with torch.random.fork_rng(devices=[]):
        for index, kind in enumerate(kinds):
            torch.manual_seed(SEED + index)  # a layer's start does not depend on which others are converted
            layer = f"decoder.layers.{index}."
            prefix = f"{layer}self_attn."
            softmax = {name: conversion.weights[prefix + name] for name in PARTS if prefix + name in conversion.weights}
            if kind == SOFTMAX:
                attention = build_attention(cfg, *cfg.attention_sizes, kind)
                zeros = {name: torch.zeros_like(tensor) for name, tensor in attention.state_dict().items()}
                attention.to(softmax["in_proj.weight"].dtype).load_state_dict({**zeros, **softmax})
            else:
                attention = build_attention(cfg, *cfg.attention_sizes)
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


def separate_heads(attention: SoftmaxAttention, softmax: Mapping[str, Tensor], inputs: Tensor | None) -> Projections:
    """Return queries, keys and values of each head (H d, D + 1), of which several may have shared keys and values.

    attention: the layer of the weights `softmax`, whose rotation of queries and keys is left out; inputs: see
    `without_norm`.
    """
    q, k, v = with_bias(softmax, "in_proj").split(attention.sizes)
    if attention.query_norm is not None:
        q, k = (without_norm(rows, softmax[f"{name}_norm.weight"], inputs) for name, rows in (("query", q), ("key", k)))
    shared, size = len(q) // len(k), len(q) // attention.num_heads
    k, v = (rows.unflatten(0, (-1, size)).repeat_interleave(shared, 0).flatten(0, 1) for rows in (k, v))
    return q, k, v


def without_norm(rows: Tensor, gains: Tensor, inputs: Tensor | None) -> Tensor:
    """Return projections (H d, D + 1) that need no RMS normalisation of a head, whose gains (d,) they get.

    They are divided by the root mean square that vectors of a head have if the D inputs are independent of each other.
    inputs (D,): root mean squares of these; None = 1.
    """
    heads = rows.unflatten(0, (-1, len(gains))).double()
    weights, biases = heads[..., :-1], heads[..., -1]
    squares = (weights if inputs is None else weights * inputs).square().sum(-1) + biases.square()
    sizes = squares.mean(-1).sqrt().clamp(min=1e-6)  # a head of zeros stays one
    return (heads * gains.unsqueeze(-1) / sizes.view(-1, 1, 1)).flatten(0, 1).to(rows)


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
    if size not in (None, features):
        raise ValueError(f"--state-size must be {features} for the map {feature_map}, got {size}")


def configure(flags: Settings) -> FwpLanguageModelConfig:
    """Return the configuration of a language model with these flags."""
    of_task = {"max_target_positions": None, "add_bos_token": False}
    cfg = OmegaConf.merge(OmegaConf.structured(FwpLanguageModelConfig), {**of_task, **flags})
    return read_options(FwpLanguageModelConfig, cfg)


def scale_by_decay(attention: FastWeightAttention, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Scale W_v by 1 - sigmoid(b_z) in every dimension: sums then have the size of one value (Mao 2022, Sec. 3)."""
    return q, k, v * (1 - attention.gate_biases["value_decay"].sigmoid()).to(v).unsqueeze(1)


def scale_unnormalized(attention: FastWeightAttention, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Scale W_v down, because nothing divides the sum (Mao 2022, footnote 4)."""
    return q, k, v if attention.memory.normalization else v * SUM_VALUE_SCALE


def write_little(attention: FastWeightAttention, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Set the write strength; values stay the same (Mao 2022, footnote 3)."""
    nn.init.constant_(attention.gate_biases["beta"], WRITE_STRENGTH_BIAS)
    return q, k, v


def spread_spans(attention: FastWeightAttention, q: Tensor, k: Tensor, v: Tensor, longest: int) -> Projections:
    """Set decays: feature i of m remembers s = longest^((i + 1/2) / m) tokens (decay s / (1 + s)), values `longest`.

    Features with the largest singular values forget first. Keys are scaled by the root of the forgotten share 1 / (1 +
    s). Sums of terms of either sign then have the size of one term for every span. Scores of either sign lack the mean
    of the values, which softmax has. The last feature is replaced by that mean, over about sqrt(longest) tokens.
    """
    heads, size = attention.num_heads, attention.key_dim
    spans = longest ** ((torch.arange(size) + 0.5) / size)
    spans[-1] = longest**0.5
    attention.gate_biases["key_decay"].copy_(spans.log().repeat(heads))
    nn.init.constant_(attention.gate_biases["value_decay"], math.log(longest))
    root = (1 + spans).rsqrt().to(k)
    q, k = q.unflatten(0, (heads, size)).clone(), k.unflatten(0, (heads, size)) * root.unsqueeze(1)
    for x in (q, k):
        x[:, -1] = 0
        x[:, -1, -1] = root[-1]  # the bias: q . k = 1 / (1 + s), which sums to one over the decays of that feature
    return q.flatten(0, 1), k.flatten(0, 1), v


def write_little_and_remember(attention: FastWeightAttention, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Set rates as delta's, as keys do not have length one here either; heads remember 16 to 512 tokens (`SPANS`)."""
    decay, heads = cast(MambaDecay, attention.gate_activations["decay"]), attention.num_heads
    shortest, longest = SPANS
    spans = shortest * (longest / shortest) ** ((torch.arange(heads) + 0.5) / heads)
    decay.log_rate.zero_()
    decay.bias.copy_(-spans.log().unsqueeze(1).expand_as(decay.bias))  # exp(-softplus(-log s)) = s / (1 + s)
    return write_little(attention, q, k, v)


class Initialisation(NamedTuple):
    """An initialisation: start(attention, q, k, v) sets the gates and returns the converted projections.

    bias: the attention needs one; by_singular_values: features always come from the singular value decomposition.
    """

    start: Callable[..., Projections] = lambda attention, q, k, v: (q, k, v)
    bias: bool = False
    by_singular_values: bool = False


INITIALISATIONS = {
    "sum": Initialisation(scale_unnormalized),
    "delta": Initialisation(write_little, bias=True),
    "decay": Initialisation(scale_by_decay),
    "fwm": Initialisation(write_little, bias=True),
    "delta_product": Initialisation(write_little, bias=True),
    "gated_delta": Initialisation(write_little_and_remember, bias=True),
    "kda": Initialisation(write_little_and_remember, bias=True),
}


def rule_initialisation(rule: str, spans: int | None = None) -> Initialisation:
    """Return the initialisation of a rule; rules that are not in the paper keep all projections."""
    if spans is not None:
        return Initialisation(partial(spread_spans, longest=spans), True, by_singular_values=True)
    return INITIALISATIONS.get(rule, Initialisation())


@torch.no_grad()
def convert_attention(
    attention: FastWeightAttention,
    projections: Projections,
    softmax: Mapping[str, Tensor],
    heads: int,
    initialisation: Initialisation,
) -> None:
    """Write the projections (D, D + 1) and the output of softmax attention, which has `heads`, into a new one."""
    q, k, v = projections
    attention.to(q.dtype)
    feature_map = attention.feature_map
    scores = (v.shape[0] // heads) ** -0.5 * (1 if feature_map.positive else SCORE_SCALE)
    q = q * (scores / feature_map.scale**2)
    # Spans follow singular values, even with as many features as dimensions.
    if attention.key_dim != attention.head_dim or initialisation.by_singular_values:
        q, k = fewer_features(q, k, attention.num_heads, attention.key_dim)
    q, k, v = initialisation.start(attention, q, k, v)
    if attention.rule.steps > 1:
        k, v = several_steps(attention, k, v)
    together = torch.cat([q, k, v])
    attention.in_proj.weight[: len(together)] = together[:, :-1]
    if attention.bias is not None:
        attention.bias.copy_(together[:, -1])
    fill(attention.out_proj, with_bias(softmax, "out_proj"))


@torch.no_grad()
def fill_translation(
    module: CausalAttention | SequenceAttention, softmax: Mapping[str, Tensor], initialisation: Initialisation
) -> None:
    """Write the weights of fairseq's softmax attention into a new one of a translation model."""
    q, k, v = (with_bias(softmax, f"{name}_proj") for name in "qkv")
    if isinstance(module, CausalAttention):
        attention = module.attention
        convert_attention(attention, (q, k, v), softmax, attention.num_heads, initialisation)
        return
    module.to(q.dtype)
    fill(module.q_proj, q * (module.head_dim**-0.5 / module.feature_map.scale**2))
    fill(module.kv_proj, torch.cat([k, v]))
    fill(module.out_proj, with_bias(softmax, "out_proj"))


def several_steps(attention: FastWeightAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of a rule of several steps a token; the last step has the pretrained ones.

    Earlier steps have random keys N(0, 0.02) and the same values, and write very little: `WRITE_STRENGTH_BIAS`.
    """
    before = attention.rule.steps - 1
    drawn = k.new_zeros(before, *k.shape)
    nn.init.normal_(drawn[..., :-1], std=0.02)
    attention.gate_biases["beta"].view(attention.num_heads, -1)[:, :before] = WRITE_STRENGTH_BIAS
    return torch.cat([*drawn, k]), torch.cat([v] * (before + 1))


def with_bias(softmax: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a projection (rows, D + 1) of vectors that end with a one; a missing bias is zero."""
    weight, bias = softmax[f"{name}.weight"], softmax.get(f"{name}.bias")
    return torch.cat([weight, weight.new_zeros(len(weight), 1) if bias is None else bias.unsqueeze(1)], dim=1)


def fill(projection: nn.Linear, rows: Tensor) -> None:
    """Write a projection (rows, D + 1) into a layer, whose bias it may lack."""
    projection.weight.copy_(rows[:, :-1])
    if projection.bias is not None:
        projection.bias.copy_(rows[:, -1])


def fewer_features(q: Tensor, k: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
    """Return projections of `size` queries and keys a head (heads x size, D + 1), with scores near those of q and k.

    q, k (D, D + 1). With A = q^T k of a head, its scores are x A y. The nearest ones of rank `size`, in the Frobenius
    norm, have the largest singular values of A. Further features have keys N(0, 0.02) and queries of zero.
    """
    found_q, found_k = [], []
    for of_q, of_k in zip(q.double().chunk(heads), k.double().chunk(heads), strict=True):
        (basis_q, root_q), (basis_k, root_k) = (torch.linalg.qr(part.T) for part in (of_q, of_k))
        left, singular, right = torch.linalg.svd(root_q @ root_k.T)
        rank = min(size, len(singular))
        root = singular[:rank].sqrt()
        new_q, new_k = of_q.new_zeros(size, of_q.shape[1]), of_k.new_zeros(size, of_k.shape[1])
        nn.init.normal_(new_k[rank:, :-1], std=0.02)
        new_q[:rank] = (basis_q @ left[:, :rank] * root).T
        new_k[:rank] = (basis_k @ right[:rank].T * root).T
        found_q.append(new_q)
        found_k.append(new_k)
    return torch.cat(found_q).to(q), torch.cat(found_k).to(k)


@torch.no_grad()
def costs(source: FwpLanguageModel, converted: FwpLanguageModel, blocks: Iterable[Tensor]) -> list[float]:
    """Return for each layer the divergence that its conversion causes, in nats per token, before any training.

    source, converted: models in evaluation mode that differ only in their attentions; blocks: tokens (L,). Li et al.
    2025, arXiv 2512.20569, measure it on a trained model instead.
    """

    def log_probs(tokens: Tensor) -> Tensor:
        scores: Tensor = source.get_normalized_probs(source(tokens.unsqueeze(0)), log_probs=True)
        return scores[0]

    layers = list(zip(source.decoder.layers, converted.decoder.layers, strict=True))
    totals, tokens = [0.0] * len(layers), 0
    for block in blocks:
        expected = log_probs(block)
        for index, (layer, other) in enumerate(layers):
            softmax, layer.self_attn = layer.self_attn, other.self_attn
            totals[index] += float(kl_divergence(log_probs(block), expected))
            layer.self_attn = softmax
        tokens += block.numel()
        logger.info("divergence of each layer after %s tokens: %s", f"{tokens:,}", shown(x / tokens for x in totals))
    return [cost / tokens for cost in totals]


def build_whole(conversion: Conversion) -> FwpLanguageModel:
    """Return the model of a conversion, in evaluation mode and in float32 or wider."""
    model = cast(FwpLanguageModel, build(conversion, configure(conversion.flags), make_task(conversion))).eval()
    return model.to(torch.promote_types(next(model.parameters()).dtype, torch.float32))


def read_text(path: Path, dictionary: Dictionary) -> Tensor:
    """Return the words of a text as numbers (N,). Raises ValueError for one that is empty or cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--kl-text must be a text, got {path}: {error}") from error
    words = [dictionary.encode_line(line, add_if_not_exist=False).long() for line in lines if line.strip()]
    if not words:
        raise ValueError(f"--kl-text must hold words, got the empty file {path}")
    text = torch.cat(words)
    unknown = int(text.eq(dictionary.unk()).sum())
    if unknown > len(text) / 2:
        share = f"{unknown:,} unknown ones of {len(text):,} in {path}"
        raise ValueError(f"--kl-text must hold words of the dictionary, got {share}: apply the BPE of the training")
    return text


def shown(values: Iterable[float]) -> str:
    """Return the number of each layer with its value."""
    return ", ".join(f"{index}: {value:.4f}" for index, value in enumerate(values))
