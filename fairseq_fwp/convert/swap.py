"""Convert the softmax attention of a pretrained model: Mao 2022, arXiv 2210.04243, Secs. 3 and 4.

Queries, keys, values and output keep their pretrained projections as far as the new attention has them. Gates and the
learned map start from their initial values. The model then needs fine-tuning. D: embedding dimension, H: heads, d = D /
H, m: state size.

*The state size m.* The paper does not define it for several heads: it writes the state of one head, R^(d x m), and
GPT-2 has several. Here every head has keys and queries of m features, as in the works that it compares with (Kasai et
al. 2021; Peng et al. 2022). A layer's state then has m D numbers: H matrices of m x d. Read literally, the paper's d is
the embedding dimension, and a layer has one head with one decay of m for all values. That is `heads` = 1, also with m D
numbers.

*Queries and keys.* Softmax scores are q . k / sqrt(d); here the factor is in the queries. The paper's linear map from d
to m dimensions is part of their projections (Sec. 3, below Eq. 8), and the paper does not say its initial value. Here
the two maps give the scores nearest to the pretrained ones. They are the truncated singular value decomposition of Wq^T
Wk of each head, biases included, with the root of the singular values on either side. Features beyond d have random
keys and queries of zero. Without a map that makes scores positive, they are scaled to a tenth of softmax's. Nothing
divides them by their sum, and without the scale the output is about three times as long as softmax's. With the scale, a
model of the PEPs starts with a fifth of the perplexity.

*Initialisations* of the paper: `INITIALISATIONS` below. The paper scales W_v; here the bias of values is scaled too,
which it does not mention. Biases of decay come from the rule (uniform gate initialisation). All else is N(0, 0.02), as
in models here.

*Spans of memory* (`decay_spans`) are an alternative to the paper's initialisation. Under uniform gates a state is
multiplied by products of two uniform numbers, with a mean of 1/4: only one in two hundred of its numbers remembers ten
tokens. The paper trains for 100,000 updates. With a few hundred updates, features should begin with memories of one
token up to a whole sample, evenly spaced in the logarithm. Time scales of state space models are spaced so too (S4D: Gu
et al. 2022, arXiv 2206.11893). One feature begins with the mean of the last values: `spread_spans`.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_fwp.convert.checkpoint import build, make_task
from fairseq_fwp.convert.layer_choice import BY_DIVERGENCE, costs, read_blocks, read_count, shown
from fairseq_fwp.convert.source import Conversion
from fairseq_fwp.models.attention_options import attention_name, build_attention
from fairseq_fwp.models.decoder import initialize
from fairseq_fwp.models.fwp_lm import FwpLanguageModelConfig, layer_attentions
from fairseq_fwp.modules.attention import SOFTMAX
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.layers import look_up
from fairseq_fwp.modules.update_rules import UPDATE_RULES

# Seed of random weights: repeated conversions give the same model.
SEED = 1

# Mao 2022, footnote 3: a write strength of about 0.007, which is sigmoid(-5).
WRITE_STRENGTH_BIAS = -5.0

# Mao 2022, footnote 4.
SUM_VALUE_SCALE = 1 / 512

# Scale of scores of either sign, see above; the paper does not give one.
SCORE_SCALE = 0.1

# Tokens that heads of gated_delta and kda remember, evenly spaced in the logarithm: recipes/decay_finetune/RESULTS.md.
SPANS = (16, 512)

# Projections of queries and keys (H m, D + 1) and of values (D, D + 1); the last column is the bias.
Projections = tuple[Tensor, Tensor, Tensor]

# The weights of softmax attention.
PARTS = ("in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias")


class Target(NamedTuple):
    """The new attention.

    update_rule, feature_map: keys of their tables. For local attention, update_rule is softmax, with a window.
    encoder_feature_map, cross_feature_map: maps of translation. Without one, softmax stays there.
    state_size: m, None = the map's own size for heads of d. heads: None = as many as the source has.
    read_out_only: attention normalisation divides only the output, as in the paper, not the value that delta retrieves.
    decay_spans: for the rule decay, the longest initial memory in tokens, None = the paper's uniform gates.
    keep_softmax_layers: layers whose attention stays: their numbers, or "kl:N" for the N whose conversion costs most.
    kl_text: a file of words of the dictionary, on which kl:N measures.
    """

    update_rule: str = ""
    feature_map: str = "identity"
    state_size: int | None = None
    sum_normalization: bool = False
    attention_normalization: bool = False
    read_out_only: bool = False
    window: int | None = None
    heads: int | None = None
    decay_spans: int | None = None
    keep_softmax_layers: str | None = None
    kl_text: Path | None = None
    encoder_feature_map: str | None = None
    cross_feature_map: str | None = None


def keep(attention: Any, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    return q, k, v


def scale_by_decay(attention: Any, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Scale W_v by 1 - sigmoid(b_z) in every dimension: sums then have the size of one value (Mao 2022, Sec. 3)."""
    return q, k, v * (1 - attention.gate_biases["value_decay"].sigmoid()).to(v).unsqueeze(1)


def scale_unnormalized(attention: Any, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Scale W_v down, because nothing divides the sum (Mao 2022, footnote 4)."""
    return q, k, v if attention.attention_normalization else v * SUM_VALUE_SCALE


def write_little(attention: Any, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Set the write strength; values stay the same (Mao 2022, footnote 3)."""
    nn.init.constant_(attention.gate_biases["beta"], WRITE_STRENGTH_BIAS)
    return q, k, v


def spread_spans(attention: Any, q: Tensor, k: Tensor, v: Tensor, longest: int) -> Projections:
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


def write_little_and_remember(attention: Any, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Set rates as delta's, as keys do not have length one here either; heads remember 16 to 512 tokens (`SPANS`)."""
    decay, heads = attention.gate_activations["decay"], attention.num_heads
    shortest, longest = SPANS
    spans = shortest * (longest / shortest) ** ((torch.arange(heads) + 0.5) / heads)
    decay.log_rate.zero_()
    decay.bias.copy_(-spans.log().unsqueeze(1).expand_as(decay.bias))  # exp(-softplus(-log s)) = s / (1 + s)
    return write_little(attention, q, k, v)


class Initialisation(NamedTuple):
    """An initialisation: start(attention, q, k, v) sets the gates and returns the converted projections.

    bias: the attention needs one; by_singular_values: features always come from the singular value decomposition.
    """

    start: Callable[..., Projections] = keep
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


def swap(conversion: Conversion, target: Target) -> Conversion:
    """Return the conversion with the new attention. Raises ValueError without softmax or for an impossible target."""
    flags = conversion.flags
    if conversion.arch != "fwp_lm" or attention_name(configure(flags)) != SOFTMAX:
        raise ValueError(
            "the model to convert must have softmax attention over all past tokens, got a model without it"
        )
    if target.update_rule == SOFTMAX:
        return conversion._replace(flags={**flags, "attention_window": target.window})
    if target.keep_softmax_layers == "":
        raise ValueError(
            "--keep-softmax-layers must be layers such as 0,3, or kl:N, got nothing: leave it out for none"
        )
    chosen = target.keep_softmax_layers or ""
    if chosen and target.heads is not None:
        raise ValueError("--decoder-attention-heads must be left out with --keep-softmax-layers: it changes all layers")
    if chosen.startswith(BY_DIVERGENCE):
        return swap_by_divergence(conversion, target, chosen)
    if target.kl_text is not None:
        raise ValueError("--kl-text must be left out without --keep-softmax-layers kl:N")
    return swap_layers(conversion, target, chosen)


def swap_by_divergence(conversion: Conversion, target: Target, chosen: str) -> Conversion:
    """Convert all layers except those where conversion costs most; the costs are in the notes."""
    converted = swap_layers(conversion, target)
    count = read_count(chosen, configure(conversion.flags).decoder_layers)
    if target.kl_text is None:
        raise ValueError(f"--kl-text FILE must be given with --keep-softmax-layers {chosen}")
    dictionary = make_task(conversion).target_dictionary
    blocks = read_blocks(target.kl_text, dictionary, conversion.flags.get("tokens_per_sample") or 1024)
    found = costs(build_whole(conversion), build_whole(converted), blocks)
    kept = sorted(sorted(range(len(found)), key=lambda index: -found[index])[:count])
    hybrid = swap_layers(conversion, target, ",".join(map(str, kept)))
    note = f"divergence when only this layer is converted, in nats per token: {shown(found)}"
    return hybrid._replace(notes=[*hybrid.notes, note])


def swap_layers(conversion: Conversion, target: Target, kept: str = "") -> Conversion:
    """The conversion with the new attention in all layers except `kept`, such as "0,3"."""
    source, flags = configure(conversion.flags), {**conversion.flags, **target_flags(target, conversion.flags)}
    if kept:
        flags |= {"softmax_layers": kept, "attention_dropout": source.attention_dropout}
    cfg = configure(flags)
    weights = {name: tensor for name, tensor in conversion.weights.items() if ".self_attn." not in name}
    with torch.random.fork_rng(devices=[]):
        for index, kind in enumerate(attentions_of_layers(cfg)):
            torch.manual_seed(SEED + index)  # a layer's start does not depend on which others are converted
            prefix = f"decoder.layers.{index}.self_attn."
            of_layer = {name: conversion.weights.get(prefix + name) for name in PARTS}
            if kind == SOFTMAX:
                attention = same_attention(cfg, of_layer)
            else:
                attention = new_attention(cfg, target, of_layer, source.decoder_attention_heads)
            weights |= {prefix + name: tensor for name, tensor in attention.state_dict().items()}
    return conversion._replace(flags=flags, weights=weights)


def attentions_of_layers(cfg: Any) -> list[str]:
    """Return the attention of each layer. Raises ValueError for layers that cannot be kept."""
    try:
        found = layer_attentions(cfg)
    except ValueError as error:
        raise ValueError(str(error).replace("--softmax-layers", "--keep-softmax-layers")) from None
    if set(found) == {SOFTMAX}:
        raise ValueError("--keep-softmax-layers must leave at least one layer to convert, got all layers")
    return found


def same_attention(cfg: Any, softmax: dict[str, Tensor | None]) -> Any:
    """The same softmax attention, with biases of zero if the new attentions have biases."""
    attention = build_attention(FwpLanguageModelConfig, cfg, SOFTMAX)
    given = {name: tensor for name, tensor in softmax.items() if tensor is not None}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in attention.state_dict().items()}
    attention.to(given["in_proj.weight"].dtype).load_state_dict({**zeros, **given})
    return attention


def build_whole(conversion: Conversion) -> Any:
    """The model of a conversion, in evaluation mode and in float32 or wider."""
    model = build(conversion, configure(conversion.flags), make_task(conversion)).eval()
    return model.to(torch.promote_types(next(model.parameters()).dtype, torch.float32))


def configure(flags: dict[str, Any]) -> Any:
    """The configuration of a model with these flags."""
    of_task = {"max_target_positions": None, "add_bos_token": False}
    return OmegaConf.merge(OmegaConf.structured(FwpLanguageModelConfig), {**of_task, **flags})


def target_flags(target: Target, flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of `fairseq-train` that make the new attention. Raises ValueError for an impossible target."""
    look_up("update rule", target.update_rule, UPDATE_RULES, "softmax or ")
    look_up("feature map", target.feature_map, FEATURE_MAPS)
    if target.window is not None:
        raise ValueError(
            "--attention-window must be left out unless --decoder-update-rule is softmax: fast weights have no window"
        )
    check_spans(target)
    found = {
        "decoder_update_rule": target.update_rule,
        "decoder_feature_map": target.feature_map,
        "sum_normalization": target.sum_normalization,
        "attention_normalization": target.attention_normalization,
        "attention_normalization_read_out_only": target.read_out_only,
        "attention_dropout": 0.0,
        "attention_bias": flags.get("attention_bias", False) or rule_initialisation(target).bias,
    }
    if target.heads is not None:
        found["decoder_attention_heads"] = target.heads
    if target.state_size is not None:
        found |= state_size_flags(target.feature_map, target.state_size)
    return found


def check_spans(target: Target) -> None:
    """Check that the rule has spans and that they are positive; raise ValueError otherwise."""
    if target.decay_spans is None:
        return
    if target.update_rule != "decay" or target.feature_map != "identity":
        raise ValueError(
            "--decay-spans must be left out unless --decoder-update-rule is decay and --decoder-feature-map is "
            "identity (the default)"
        )
    if target.decay_spans < 1:
        raise ValueError(f"--decay-spans must be at least 1 token, got {target.decay_spans}")


def rule_initialisation(target: Target) -> Initialisation:
    """Return the initialisation of the target's rule; rules that are not in the paper keep all projections."""
    if target.decay_spans is not None:
        return Initialisation(partial(spread_spans, longest=target.decay_spans), True, by_singular_values=True)
    return INITIALISATIONS.get(target.update_rule, Initialisation())


def state_size_flags(feature_map: str, size: int) -> dict[str, int]:
    """The flags that give a map this many features: its own flag, or the size of the keys that it maps."""
    if feature_map == "relu":
        return {"relu_features": size}
    if feature_map == "favor":
        return {"favor_features": size // 2}
    return {"decoder_key_dim": size // 2 if feature_map == "dpfp" else size}


def new_attention(cfg: Any, target: Target, softmax: dict[str, Tensor | None], heads: int) -> Any:
    """The attention of a layer, with the converted weights of softmax attention, which has `heads`."""
    attention: Any = build_attention(FwpLanguageModelConfig, cfg)
    attention.apply(initialize)
    size = attention.feature_map.feature_dim
    if target.state_size not in (None, size):
        raise ValueError(f"--state-size must be {size} for the map {target.feature_map}, got {target.state_size}")
    q, k, v = with_bias(softmax["in_proj.weight"], softmax["in_proj.bias"]).chunk(3)
    convert_attention(attention, (q, k, v), softmax, heads, rule_initialisation(target))
    return attention


def convert_attention(
    attention: Any,
    projections: Projections,
    output: Mapping[str, Tensor | None],
    heads: int,
    initialisation: Initialisation,
) -> None:
    """Write the projections (D, D + 1) and the output of softmax attention, which has `heads`, into a new one."""
    q, k, v = projections
    attention.to(q.dtype)
    with torch.no_grad():
        feature_map = attention.feature_map
        scores = (v.shape[0] // heads) ** -0.5 * (1 if feature_map.positive else SCORE_SCALE)
        q = q * (scores / feature_map.scale**2)
        # Spans follow singular values, even with as many features as dimensions.
        if attention.key_dim != attention.head_dim or initialisation.by_singular_values:
            q, k = fewer_features(q, k, attention.num_heads, attention.key_dim)
        q, k, v = initialisation.start(attention, q, k, v)
        if attention.rule.steps > 1:
            k, v = several_steps(attention, k, v)
        fill(attention, torch.cat([q, k, v]), output)


def several_steps(attention: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of a rule of several steps a token; the last step has the pretrained ones.

    Earlier steps have random keys N(0, 0.02) and the same values, and write very little: `WRITE_STRENGTH_BIAS`.
    """
    before = attention.rule.steps - 1
    drawn = k.new_zeros(before, *k.shape)
    nn.init.normal_(drawn[..., :-1], std=0.02)
    attention.gate_biases["beta"].view(attention.num_heads, -1)[:, :before] = WRITE_STRENGTH_BIAS
    return torch.cat([*drawn, k]), torch.cat([v] * (before + 1))


def with_bias(weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return a projection (rows, D + 1) of vectors that end with a one."""
    assert weight is not None
    return torch.cat([weight, weight.new_zeros(len(weight), 1) if bias is None else bias.unsqueeze(1)], dim=1)


def fill(attention: Any, projections: Tensor, output: Mapping[str, Tensor | None]) -> None:
    """Write queries, keys and values (rows, D + 1), and the output's projection, into the new attention."""
    weight, bias = projections[:, :-1], projections[:, -1]
    attention.in_proj.weight[: len(weight)] = weight
    if attention.bias is not None:
        attention.bias.copy_(bias)
    fill_output(attention, output)


def fill_output(attention: Any, output: Mapping[str, Tensor | None]) -> None:
    """Write the output's projection, with a bias of zero where softmax attention has none."""
    weight, bias = output["out_proj.weight"], output["out_proj.bias"]
    assert weight is not None
    attention.out_proj.weight.copy_(weight)
    if attention.out_proj.bias is not None:
        attention.out_proj.bias.copy_(torch.zeros_like(attention.out_proj.bias) if bias is None else bias)


def fewer_features(q: Tensor, k: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
    """Return projections of `size` queries and keys a head (heads x size, D + 1), with scores near those of q and k.

    q, k (D, D + 1). With A = q^T k of a head, its scores are x A y. The nearest ones of rank `size`, in the Frobenius
    norm, have the largest singular values of A. Further features have keys N(0, 0.02) and queries of zero.
    """
    found_q, found_k = [], []
    for of_q, of_k in zip(q.double().chunk(heads), k.double().chunk(heads), strict=True):
        (basis_q, root_q), (basis_k, root_k) = (torch.linalg.qr(part.T) for part in (of_q, of_k))
        left, singular, right = torch.linalg.svd(root_q @ root_k.T)
        kept = min(size, len(singular))
        root = singular[:kept].sqrt()
        new_q, new_k = of_q.new_zeros(size, of_q.shape[1]), of_k.new_zeros(size, of_k.shape[1])
        nn.init.normal_(new_k[kept:, :-1], std=0.02)
        new_q[:kept] = (basis_q @ left[:, :kept] * root).T
        new_k[:kept] = (basis_k @ right[:kept].T * root).T
        found_q.append(new_q)
        found_k.append(new_k)
    return torch.cat(found_q).to(q), torch.cat(found_k).to(k)
