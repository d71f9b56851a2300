"""Convert the softmax attention of a translation model: encoder, decoder and attention to the source.

Each of the three is converted or kept. Projections are the pretrained ones. Softmax scores are q . k / sqrt(d); the
factor is in the queries, or in the map if it has one. The decoder's update rule begins as in `swap.py`. After Kasai et
al. 2021 (T2R, arXiv 2103.13076), which fine-tunes on data only, without a teacher.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_fwp.convert.checkpoint import SEED, build_empty
from fairseq_fwp.convert.source import Conversion
from fairseq_fwp.convert.swap import Target, convert_attention, fill_output, rule_initialisation, with_bias
from fairseq_fwp.models.fwp_transformer import FwpTransformerModel
from fairseq_fwp.models.translation_layers import CausalAttention
from fairseq_fwp.modules.attention import LinearAttention

# Options of a target that only language models have.
OF_LANGUAGE_MODELS = {
    "window": "--attention-window",
    "heads": "--decoder-attention-heads",
    "decay_spans": "--decay-spans",
    "keep_softmax_layers": "--keep-softmax-layers",
    "kl_text": "--kl-text",
}
OF_DECODER = {
    "feature_map": "--decoder-feature-map",
    "sum_normalization": "--sum-normalization",
    "attention_normalization": "--attention-normalization",
    "read_out_only": "--attention-normalization-read-out-only",
}


def swap_translation(conversion: Conversion, target: Target) -> Conversion:
    """The conversion with the new attentions. Raises ValueError for an impossible target."""
    flags = {**conversion.flags, **translation_flags(conversion.flags, target)}
    converted = conversion._replace(flags=flags)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = build_empty(converted)
        new: dict[str, Tensor] = {}
        replaced: list[str] = []
        for name, module in model.named_modules():
            if isinstance(module, LinearAttention | CausalAttention):
                fill_attention(module, part(conversion.weights, name), target)
                new |= {f"{name}.{key}": tensor for key, tensor in module.state_dict().items()}
                replaced.append(f"{name}.")
    kept = {name: tensor for name, tensor in conversion.weights.items() if not name.startswith(tuple(replaced))}
    return converted._replace(weights={**kept, **new})


def translation_flags(flags: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The flags of `fairseq-train` that make the new attentions. Raises ValueError for an impossible target."""
    for name, flag in OF_LANGUAGE_MODELS.items():
        if getattr(target, name) is not None:
            raise ValueError(f"{flag} must be left out for translation: only language models have it")
    for name, flag in OF_DECODER.items():
        if not target.update_rule and getattr(target, name) != Target._field_defaults[name]:
            raise ValueError(
                f"--decoder-update-rule must be given with {flag}, which changes the decoder's self-attention"
            )
    places = {"encoder_feature_map": target.encoder_feature_map, "cross_feature_map": target.cross_feature_map}
    found: dict[str, Any] = {name: value for name, value in places.items() if value is not None}
    if target.update_rule:
        found |= {
            "decoder_update_rule": target.update_rule,
            "decoder_feature_map": target.feature_map,
            "sum_normalization": target.sum_normalization,
            "attention_normalization": target.attention_normalization,
            "attention_normalization_read_out_only": target.read_out_only,
        }
    maps = {value for name, value in found.items() if name.endswith("_feature_map")}
    # The map then has the factor 1 / sqrt(d), its root on queries and on keys: equal sizes give the smallest variance.
    found |= {"attention_bias": True, "favor_softmax_scale": "favor" in maps}
    used = {place: str(name) for place, name in found.items() if place.endswith("_feature_map")}
    return found | (all_sizes(flags, used, target.state_size) if target.state_size is not None else {})


def all_sizes(flags: Mapping[str, Any], places: Mapping[str, str], size: int) -> dict[str, int]:
    """The flags that give the maps of these places this many features. Raises ValueError if one cannot."""
    settings = FwpTransformerModel.complete(dict(flags))
    found: dict[str, int] = {}
    for place, name in places.items():
        side = "encoder" if place.startswith("encoder") else "decoder"
        head_dim = settings[f"{side}_embed_dim"] // settings[f"{side}_attention_heads"]
        for flag, value in size_flags(name, head_dim, size).items():
            if found.setdefault(flag, value) != value:
                named = f"--{flag.replace('_', '-')}"
                raise ValueError(
                    f"{named} must be one number for encoder and decoder, got {found[flag]} and {value}, because their "
                    f"heads differ in size: leave out --state-size, or use another map than {name}"
                )
    return found


def size_flags(name: str, head_dim: int, size: int) -> dict[str, int]:
    """The flags that give a map on heads of d this many features. Raises ValueError if it cannot have them."""
    step = 2 * head_dim
    found: dict[str, tuple[dict[str, int], int, str]] = {
        "relu": ({"relu_features": size}, size, "at least 1"),
        "favor": ({"favor_features": size // 2}, size // 2 * 2, "an even number of at least 2"),
        "dpfp": ({"dpfp_nu": size // step}, size // step * step, f"{step} or a multiple of it"),
    }
    made, features, allowed = found.get(name, ({}, head_dim, str(head_dim)))
    if features != size or size < 1:
        raise ValueError(
            f"--state-size must be {allowed} for the map {name} on heads of {head_dim} dimensions, got {size}"
        )
    return made


def part(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights of a module under its own names."""
    return {name[len(prefix) + 1 :]: tensor for name, tensor in weights.items() if name.startswith(f"{prefix}.")}


def fill_attention(module: nn.Module, softmax: Mapping[str, Tensor], target: Target) -> None:
    """Write the weights of fairseq's softmax attention into a new one."""
    projections = {
        name: with_bias(softmax[f"{name}_proj.weight"], softmax.get(f"{name}_proj.bias")) for name in ("q", "k", "v")
    }
    out = {f"out_proj.{name}": softmax.get(f"out_proj.{name}") for name in ("weight", "bias")}
    q, k, v = projections.values()
    if isinstance(module, CausalAttention):
        attention: Any = module.attention
        convert_attention(attention, (q, k, v), out, attention.num_heads, rule_initialisation(target))
        return
    linear: Any = module
    linear.to(q.dtype)
    scale = linear.head_dim**-0.5 / linear.feature_map.scale**2
    with torch.no_grad():
        for projection, rows in ((linear.q_proj, q * scale), (linear.kv_proj, torch.cat([k, v]))):
            projection.weight.copy_(rows[:, :-1])
            projection.bias.copy_(rows[:, -1])
        fill_output(linear, out)
