"""flash-linear-attention's DeltaNet, Gated DeltaNet, Kimi Delta Attention and RWKV-7, as folders of transformers.

Both directions use one table of names, `names_of`. Models are `fwp_lm` with the options of their architectures here.
Latent attention and experts are refused. D: hidden_size, H heads with keys of size K, HV with values of V.
Names of earlier versions of RWKV-7, with all mixtures in one tensor x_x, are read too.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from math import inf, isclose
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_fwp.checkpoints.convert import folder
from fairseq_fwp.checkpoints.convert.checkpoint import check_weights
from fairseq_fwp.checkpoints.convert.config import (
    POSITIVE,
    SWITCH,
    WHOLE,
    Kind,
    check_expected,
    check_kinds,
    is_number,
    look_up,
    unread_note,
)
from fairseq_fwp.checkpoints.convert.conversion import Conversion, Options, Source, Tensors
from fairseq_fwp.checkpoints.convert.vocabulary import arrange, take_tables
from fairseq_fwp.checkpoints.pretrained.folder import CONFIG
from fairseq_fwp.models.fwp_lm import FwpLanguageModel
from fairseq_fwp.models.presets import MODERN, RWKV7
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings, flag

NAME = "flash-linear-attention"
# Settings that config.json must have, and defaults of those that it may leave out.
REQUIRED = ("hidden_size", "num_hidden_layers", "vocab_size")
DEFAULTS = {
    "allow_neg_eigval": False, "conv_size": 4, "eos_token_id": 2, "hidden_ratio": 4, "intermediate_size": None,
    "lower_bound": None, "max_position_embeddings": 2048, "norm_eps": 1e-6, "num_v_heads": None,
    "tie_word_embeddings": False,
}  # fmt: skip
# Of a model: the class there, our rule, and defaults of its own.
MODELS: dict[str, tuple[str, str, Settings]] = {
    "delta_net": ("DeltaNetForCausalLM", "delta", {"expand_k": 1.0, "expand_v": 1.0, "use_gate": False}),
    "gated_deltanet": (
        "GatedDeltaNetForCausalLM",
        "gated_delta",
        {"expand_v": 2.0, "head_dim": 256, "output_gate_activation": "swish", "use_gate": True},
    ),
    "kda": ("KDAForCausalLM", "kda", {"expand_v": 1.0, "head_dim": 128}),
    "rwkv7": (
        "RWKV7ForCausalLM",
        "time_mix",
        {"a_low_rank_dim": None, "decay_low_rank_dim": None, "fuse_norm": True, "gate_low_rank_dim": None,
         "head_dim": 64, "norm_eps": 1e-5, "num_heads": None, "v_low_rank_dim": None},
    ),
}  # fmt: skip
EXPECTED = {
    "attnres_block_size": (None, "its layers attend to the outputs of earlier ones"),
    "hidden_act": ("swish", "its feed-forward blocks have another activation"),
    "qk_activation": ("silu", "its queries and keys have another activation"),
    "qk_norm": ("l2", "its queries and keys have another normalisation"),
    "use_beta": (True, "it always writes with full strength"),
    "use_output_norm": (True, "its layers do not normalise what they read"),
    "use_short_conv": (True, "it has no short convolution"),
}
EXPECTED_OF_RWKV7 = {
    "attn": (None, "some of its layers have softmax attention, which has no values of the first layer"),
    "hidden_act": ("sqrelu", "its feed-forward blocks have another activation"),
    "norm_bias": (True, "its layer normalisation has no biases"),
    "norm_first": (True, "it does not normalise its embeddings"),
}
# Settings of the layers with softmax attention, under "attn" next to their numbers, "layers", and our options.
SOFTMAX = {
    "num_heads": "attention_softmax_heads",
    "num_kv_heads": "attention_kv_heads",
    "qkv_bias": "attention_qkv_bias",
    "window_size": "attention_window",
    "rope_theta": "attention_rope_theta",
}
NEGATIVE = Kind("a number below 0", lambda value: is_number(value) and -inf < value < 0)
GATE = Kind("swish, silu or sigmoid", lambda value: value in ("swish", "silu", "sigmoid"))
LAYERS = Kind(
    "a list of numbers of layers",
    lambda value: isinstance(value, list) and value != [] and all(type(one) is int and one >= 0 for one in value),
)
KINDS = {
    WHOLE: (
        "attn.num_heads", "attn.num_kv_heads", "attn.window_size", "a_low_rank_dim", "conv_size", "decay_low_rank_dim",
        "gate_low_rank_dim", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_heads",
        "num_hidden_layers", "num_v_heads", "v_low_rank_dim", "vocab_size",
    ),
    POSITIVE: ("attn.rope_theta", "expand_k", "expand_v", "hidden_ratio", "norm_eps"),
    NEGATIVE: ("lower_bound",),
    SWITCH: ("allow_neg_eigval", "attn.qkv_bias", "fuse_norm", "tie_word_embeddings", "use_gate"),
    GATE: ("output_gate_activation",),
    LAYERS: ("attn.layers",),
}  # fmt: skip
# Settings of training, of kernels and of the folder, which change nothing here.
NOT_READ = {
    "_name_or_path", "architectures", "attn_mode", "auto_map", "bos_token_id", "dtype", "fuse_cross_entropy",
    "fuse_linear_cross_entropy", "fuse_swiglu", "initializer_range", "max_window_layers", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache", "use_l2warp",
}  # fmt: skip
# Settings that are read, also by name, those of the command, and those that are not.
KNOWN = {
    *NOT_READ, *chain(*KINDS.values()), *EXPECTED, *EXPECTED_OF_RWKV7, *DEFAULTS, "end", "line_start", "model_type",
    "safe_gate", "value_dim",
}  # fmt: skip
# Letters of RWKV-7's mixtures, in our order; and of its projections of low rank, with the settings of their ranks.
MIXTURES = "rwkvag"
LOW_RANKS = {
    "decay": ("w", "decay_low_rank_dim"),
    "rate": ("a", "a_low_rank_dim"),
    "value": ("v", "v_low_rank_dim"),
    "output_gate": ("g", "gate_low_rank_dim"),
}


class Sizes(NamedTuple):
    """The sizes of a layer: see the module."""

    dim: int
    heads: int
    value_heads: int
    key: int
    value: int
    ffn: int


def read(path: Path) -> tuple[dict[str, Tensor], Settings]:
    """The weights in a folder and its config.json. Raises ValueError where either is missing or damaged."""
    tensors, config = folder.read(path, NAME, REQUIRED)
    return tensors, {"eos_token_id": DEFAULTS["eos_token_id"], **config}  # null: no token ends a text


def complete(config: Settings) -> Settings:
    """Return the configuration with defaults. Raises ValueError for a model that cannot be converted."""
    _, _, defaults = look_up(config, "model_type", MODELS)
    kind: str = config["model_type"]
    check_expected(config, EXPECTED | EXPECTED_OF_RWKV7 if kind == "rwkv7" else EXPECTED)
    settings, softmax = {**DEFAULTS, **defaults, **config}, given_softmax(config.get("attn"))
    check_kinds({**settings, **{f"attn.{name}": value for name, value in softmax.items()}}, KINDS)
    size = settings["hidden_size"]
    if kind == "rwkv7":
        dims = settings.get("value_dim")
        if config.get("head_dim") or not settings["num_heads"]:
            check_divides("head_dim", settings["head_dim"], size)
            settings["num_heads"] = size // settings["head_dim"]
        if dims is not None and any(dim != size for dim in (dims if isinstance(dims, list) else [dims])):
            raise ValueError(f"{CONFIG} has value_dim = {dims!r}, which cannot be converted: it must be {size}")
    if softmax:
        check_divides("attn.num_heads", softmax["num_heads"], size)
        usual = {"num_kv_heads": softmax["num_heads"], "qkv_bias": False, "window_size": None, "rope_theta": 10000.0}
        settings["attn"] = {**usual, **softmax, "layers": sorted(softmax["layers"])}
    if settings.get("num_heads") is None:
        raise ValueError(f"{CONFIG} must be the configuration of a {NAME}, got one without num_heads")
    return settings


def given_softmax(attn: Any) -> Settings:
    """Return the settings under "attn" that are not null. Raises ValueError for other settings than ours."""
    settings = {name: value for name, value in attn.items() if value is not None} if isinstance(attn, dict) else {}
    needed, allowed = {"layers", "num_heads"}, {"layers", *SOFTMAX}
    others = ", ".join(name for name in SOFTMAX if name not in needed)
    got = ", ".join(sorted(settings.keys() - allowed)) or repr(attn)
    needs = f"layers and num_heads, and nothing else but {others}"
    check(attn is None or needed <= settings.keys() <= allowed, f"attn in {CONFIG} must have {needs}, got {got}")
    return settings


def check_divides(name: str, part: int, size: int) -> None:
    """Raise ValueError unless a setting divides hidden_size."""
    check(size % part == 0, f"{name} in {CONFIG} must divide hidden_size = {size}, got {part}")


def sizes_of(config: Settings) -> Sizes:
    """Return the sizes of a complete configuration. Raises ValueError if they are not whole numbers."""
    dim, heads = config["hidden_size"], config["num_heads"]
    if config["model_type"] == "rwkv7":
        ffn = config["intermediate_size"] or 32 * -(-int(dim * (config["hidden_ratio"] or 4)) // 32)
        return Sizes(dim, heads, heads, dim // heads, dim // heads, ffn)
    key = config["head_dim"] if "head_dim" in config else dim * config["expand_k"] / heads
    value = (key if "head_dim" in config else dim / heads) * config["expand_v"]
    for name, size in (("key", key), ("value", value)):
        whole = size < inf and isclose(size, round(size)) and round(size) >= 1
        check(whole, f"{CONFIG} must give heads with {name}s of a whole size, got {size}")
    ffn = config["intermediate_size"] or 256 * -(-int(dim * config["hidden_ratio"] * 2 / 3) // 256)
    return Sizes(dim, heads, config["num_v_heads"] or heads, round(key), round(value), ffn)


def flags_of(config: Settings) -> Settings:
    """Return the options of `fwp_lm` for a complete configuration."""
    kind, sizes, length = config["model_type"], sizes_of(config), config["max_position_embeddings"]
    shared = {
        "decoder_layers": config["num_hidden_layers"],
        "decoder_embed_dim": sizes.dim,
        "decoder_ffn_embed_dim": sizes.ffn,
        "decoder_attention_heads": sizes.heads,
        "norm_epsilon": config["norm_eps"],
        "output_layer": "tied" if config["tie_word_embeddings"] else "untied",
        "tokens_per_sample": length,
        "max_target_positions": length,
    }
    if softmax := config.get("attn"):
        layers = ",".join(map(str, softmax["layers"]))
        shared |= {"softmax_layers": layers, **{ours: softmax[name] for name, ours in SOFTMAX.items()}}
    if kind == "rwkv7":
        ranks = {f"{ours}_rank": config[setting] for ours, (_, setting) in LOW_RANKS.items()}
        return {**RWKV7, **shared, **ranks, "l2_normalization_epsilon": 1e-6 if config["fuse_norm"] else 0.0}
    sigmoid = kind == "kda" or config.get("output_gate_activation") == "sigmoid"
    gate = "none" if config.get("use_gate") is False else "sigmoid" if sigmoid else "silu"
    return {
        **MODERN,
        **shared,
        "decoder_key_dim": sizes.key,
        "decoder_value_dim": sizes.value,
        "decoder_value_heads": sizes.value_heads,
        "decoder_update_rule": MODELS[kind][1],
        "decoder_conv_size": config["conv_size"],
        "output_gate": gate,
        "output_gate_rank": sizes.value if kind == "kda" else None,
        "negative_eigenvalues": config["allow_neg_eigval"],
        "decay_lower_bound": config["lower_bound"] if kind == "kda" else None,
    }


def names_of(config: Settings) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield each of our tensors but those of words, and theirs, which it joins, with numbers of rows."""
    dim, rwkv7 = config["hidden_size"], config["model_type"] == "rwkv7"
    tensors, softmax = names_of_rwkv7(config) if rwkv7 else names_of_layer(config), config.get("attn")
    for index in range(config["num_hidden_layers"]):
        chosen = with_softmax(tensors, dim, softmax) if softmax and index in softmax["layers"] else tensors
        for ours, theirs in chosen.items():
            if index > 0 or ".value." not in ours:  # the first layer of RWKV-7 has no other's values
                renamed = {f"model.layers.{index}.{name}": rows for name, rows in theirs.items()}
                yield f"decoder.layers.{index}.{ours}", renamed
    for kind in ("weight", "bias") if rwkv7 else ("weight",):
        yield f"decoder.layer_norm.{kind}", {f"model.norm.{kind}": dim}
        if rwkv7:
            yield f"decoder.layernorm_embedding.{kind}", {f"model.layers.0.pre_norm.{kind}": dim}


def with_softmax(tensors: dict[str, dict[str, int]], dim: int, softmax: Settings) -> dict[str, dict[str, int]]:
    """Return the same of a layer with softmax attention; softmax: its settings."""
    shared = dim // softmax["num_heads"] * softmax["num_kv_heads"]
    rows = {"attn.q_proj": dim, "attn.k_proj": shared, "attn.v_proj": shared}
    kinds = ("weight", "bias") if softmax["qkv_bias"] else ("weight",)
    return {
        **{f"self_attn.in_proj.{kind}": {f"{name}.{kind}": size for name, size in rows.items()} for kind in kinds},
        "self_attn.out_proj.weight": {"attn.o_proj.weight": dim},
        **{name: theirs for name, theirs in tensors.items() if not name.startswith("self_attn.")},
    }


def names_of_rwkv7(config: Settings) -> dict[str, dict[str, int]]:
    """Return the same of a layer of RWKV-7, without its number."""
    dim, heads, ffn = config["hidden_size"], config["num_heads"], sizes_of(config).ffn
    layer = {
        "self_attn.token_shift.mix": {f"attn.x_{name}": 1 for name in MIXTURES},
        "self_attn.removal_scale": {"attn.k_k": dim},
        "self_attn.rate_scale": {"attn.k_a": dim},
        "self_attn.bonus": {"attn.r_k": heads},
        "self_attn.q_proj.weight": {"attn.r_proj.weight": dim},
        "self_attn.k_proj.weight": {"attn.k_proj.weight": dim},
        "self_attn.v_proj.weight": {"attn.v_proj.weight": dim},
        "self_attn.out_proj.weight": {"attn.o_proj.weight": dim},
        "token_shift.mix": {"ffn.x_k": dim},
        "fc1.weight": {"ffn.key.weight": ffn},
        "fc2.weight": {"ffn.value.weight": dim},
    }
    for ours, (letter, setting) in LOW_RANKS.items():
        theirs = f"attn.{letter}_lora.lora"
        layer[f"self_attn.{ours}.0.weight"] = {f"{theirs}.0.weight": config[setting]}
        layer[f"self_attn.{ours}.2.weight"] = {f"{theirs}.2.weight": dim}
        if ours != "output_gate":
            layer[f"self_attn.{ours}.2.bias"] = {f"{theirs}.2.bias": dim}
    norms = {
        "self_attn.read_out_norm": "attn.g_norm",
        "self_attn_layer_norm": "attn_norm",
        "final_layer_norm": "ffn_norm",
    }
    for ours, theirs in norms.items():
        layer |= {f"{ours}.{kind}": {f"{theirs}.{kind}": dim} for kind in ("weight", "bias")}
    return layer


def names_of_layer(config: Settings) -> dict[str, dict[str, int]]:
    """Return the same of a layer of another model."""
    kind, (dim, heads, value_heads, key, value, ffn) = config["model_type"], sizes_of(config)
    keys, values = heads * key, value_heads * value
    projections = {"attn.q_proj": keys, "attn.k_proj": keys, "attn.v_proj": values}
    convolutions = {name.replace("proj", "conv1d"): rows for name, rows in projections.items()}
    gates = {"attn.b_proj": value_heads}
    layer: dict[str, dict[str, int]] = {}
    if kind == "gated_deltanet":
        gates = {"attn.a_proj": value_heads, **gates}
    if kind == "kda":
        gates = {"attn.f_proj.0": value, **gates}
        layer["self_attn.gate_expansions.decay"] = {"attn.f_proj.1": value_heads * key}
        layer["self_attn.output_gate.0"] = {"attn.g_proj.0": value}
        layer["self_attn.output_gate.1"] = {"attn.g_proj.1": values}
    elif config["use_gate"]:
        layer["self_attn.output_gate"] = {"attn.g_proj": values}
    layer |= {
        "self_attn.in_proj": {**projections, **gates},
        "self_attn.convolution": convolutions,
        "self_attn.read_out_norm": {"attn.o_norm": value},
        "self_attn.out_proj": {"attn.o_proj": dim},
        "self_attn_layer_norm": {"attn_norm": dim},
        "final_layer_norm": {"mlp_norm": dim},
        "fc1": {"mlp.gate_proj": ffn, "mlp.up_proj": ffn},
        "fc2": {"mlp.down_proj": dim},
    }
    tensors = {
        f"{ours}.weight": {f"{name}.weight": rows for name, rows in theirs.items()} for ours, theirs in layer.items()
    }
    if kind == "kda":
        tensors["self_attn.output_gate.1.bias"] = {"attn.g_proj.1.bias": values}
    if kind != "delta_net":
        decays = value_heads * (key if kind == "kda" else 1)
        tensors["self_attn.gate_activations.decay.log_rate"] = {"attn.A_log": value_heads}
        tensors["self_attn.gate_activations.decay.bias"] = {"attn.dt_bias": decays}
    return tensors


def convert(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    config, unread = complete(options), Tensors(tensors)
    vocabulary, value_heads = arrange(folder.with_end(words, options)), sizes_of(config).value_heads
    if config["model_type"] == "rwkv7":
        for name in [name for name in unread if name.endswith(".attn.x_x")]:
            mixtures = unread.take_rows(name, len(MIXTURES)).unflatten(0, (-1, 1, 1))
            unread |= {f"{name[:-1]}{letter}": part for letter, part in zip(MIXTURES, mixtures, strict=True)}
        for letter, setting in LOW_RANKS.values():
            shapes = [unread[name].shape for name in unread if name.endswith(f".{letter}_lora.lora.0.weight")]
            config[setting] = config[setting] or next((shape[0] for shape in shapes if shape), 1)
    weights: dict[str, Tensor] = {}
    for ours, theirs in names_of(config):
        joined = unread.join(ours, theirs)
        if ".convolution." in ours or ".self_attn.token_shift." in ours:
            joined = joined.reshape(len(joined), -1)
        elif ".token_shift." in ours:
            joined = joined.unsqueeze(0)
        elif ".gate_activations." in ours:
            joined = joined.view(value_heads, -1)
        weights[ours] = joined
    weights |= take_tables(unread, vocabulary, "model.embeddings.weight", config["tie_word_embeddings"])
    unread.rename({})  # refuses what is left
    notes = [*unread_note(options, KNOWN), *vocabulary.notes]
    return Conversion("fwp_lm", flags_of(config), weights, vocabulary.words, notes, options.get("line_start"))


def write(conversion: Conversion, out: Path) -> None:
    """Write config.json and model.safetensors, which flash-linear-attention and transformers read, or nothing.

    Raises ValueError if the folder exists and is not empty, for a model with other parts than theirs, and for a
    dictionary that does not hold numbers of tokens.
    """
    if conversion.arch != "fwp_lm":
        raise ValueError(f"the model must be fwp_lm to be written for {NAME}, got {conversion.arch}")
    masked = conversion.weights.get("decoder.adaptive_softmax.bias", torch.zeros(len(Dictionary()))).isneginf()
    rows, eos = rows_of_tokens(conversion.words, bool(masked[Dictionary().eos()]))
    ranks = {
        f"{name}_rank": len(tensor)
        for name in LOW_RANKS
        for key, tensor in conversion.weights.items()
        if key.endswith(f".self_attn.{name}.0.weight")
    }
    config = complete(config_of({**conversion.flags, **ranks}, len(rows), eos))
    check_weights(conversion)
    tensors: dict[str, Tensor] = {}
    for ours, theirs in names_of(config):
        joined = conversion.weights[ours]
        if ".convolution." in ours or ".self_attn.token_shift." in ours:
            joined = joined.unsqueeze(1)
        elif ".token_shift." in ours or ".gate_activations." in ours:
            joined = joined.flatten()
        tensors |= zip(theirs, joined.split([*theirs.values()]), strict=True)
    tensors["model.embeddings.weight"] = conversion.weights["decoder.embed_tokens.weight"][rows]
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = conversion.weights["decoder.adaptive_softmax.words.weight"][rows]
    dtype = tensors["model.embeddings.weight"].dtype
    described = {"architectures": [MODELS[config["model_type"]][0]], **config, "torch_dtype": str(dtype)[6:]}
    folder.write(out, described, tensors)


def rows_of_tokens(words: Any, without_end: bool) -> tuple[Tensor, int | None]:
    """Return the row of our dictionary for each token, and the token that ends a text, None without one."""
    special = Dictionary()
    places = {int(word): special.nspecial + row for row, word in enumerate(words) if str(word).isdecimal()}
    eos = None if without_end else next(number for number in range(len(words) + 1) if number not in places)
    if eos is not None:
        places[eos] = special.eos()
    if isinstance(words, dict) or len(places) < len(words) + (eos is not None) or max(places) >= len(places):
        numbers = "the numbers of tokens and </s>, as --source fla writes them"
        raise ValueError(f"the dictionary must hold {numbers}: other words have no tokenizer there")
    return torch.tensor([places[number] for number in range(len(places))]), eos


def config_of(flags: Settings, words: int, eos: int | None) -> Settings:
    """Return the configuration of a model with these options. Raises ValueError for options that they do not have."""
    full_flags = FwpLanguageModel.complete(dict(flags))
    rules = {rule: kind for kind, (_, rule, _) in MODELS.items()}
    if (rule := full_flags["decoder_update_rule"]) not in rules:
        raise ValueError(f"--decoder-update-rule must be one of {', '.join(rules)} for {NAME}, got {rule}")
    kind, dim, heads = rules[rule], full_flags["decoder_embed_dim"], full_flags["decoder_attention_heads"]
    for name in ("decoder_key_dim", "decoder_value_dim"):
        full_flags[name] = full_flags[name] or dim // heads
    full_flags["decoder_value_heads"] = full_flags["decoder_value_heads"] or heads
    if full_flags["softmax_layers"] is not None:
        full_flags["attention_softmax_heads"] = full_flags["attention_softmax_heads"] or heads
        full_flags["attention_kv_heads"] = full_flags["attention_kv_heads"] or full_flags["attention_softmax_heads"]
    config = {
        "model_type": kind,
        "hidden_size": dim,
        "num_hidden_layers": full_flags["decoder_layers"],
        "num_heads": heads,
        "intermediate_size": full_flags["decoder_ffn_embed_dim"],
        "norm_eps": full_flags["norm_epsilon"],
        "tie_word_embeddings": full_flags["output_layer"] == "tied",
        "max_position_embeddings": flags.get("tokens_per_sample") or DEFAULTS["max_position_embeddings"],
        "vocab_size": words,
        "eos_token_id": eos,
        "bos_token_id": None,
        "attn": attn_of(full_flags),
        **(settings_of_rwkv7(full_flags) if kind == "rwkv7" else settings_of_layer(kind, full_flags)),
    }
    # The options that these settings give must be those of the model.
    lost = FwpLanguageModel.differences(full_flags, flags_of(complete(config)))
    had = ", ".join(f"{flag(name)} {ours} (there {theirs})" for name, (ours, theirs) in lost.items())
    check(not lost, f"the model must have the parts of {kind} to be written for {NAME}, got {had}")
    return config


def attn_of(flags: Settings) -> Settings | None:
    """Return the settings of layers with softmax attention, None = there are none."""
    if flags["softmax_layers"] is None:
        return None
    layers = [int(index) for index in str(flags["softmax_layers"]).split(",")]
    return {"layers": layers, **{name: flags[ours] for name, ours in SOFTMAX.items()}}


def settings_of_rwkv7(flags: Settings) -> Settings:
    """Return the settings that only RWKV-7 has."""
    ranks = {setting: flags[f"{ours}_rank"] for ours, (_, setting) in LOW_RANKS.items()}
    fused, size = flags["l2_normalization_epsilon"] > 0, flags["decoder_embed_dim"] // flags["decoder_attention_heads"]
    return {"head_dim": size, **ranks, "hidden_act": "sqrelu", "fuse_norm": fused}


def settings_of_layer(kind: str, flags: Settings) -> Settings:
    """Return the settings that RWKV-7 does not have."""
    dim, heads, gated = flags["decoder_embed_dim"], flags["decoder_attention_heads"], flags["output_gate"] != "none"
    key, value, bound = flags["decoder_key_dim"], flags["decoder_value_dim"], flags["decay_lower_bound"]
    settings = {
        "hidden_act": "swish",
        "use_short_conv": True,
        "conv_size": flags["decoder_conv_size"],
        "allow_neg_eigval": flags["negative_eigenvalues"],
        **({"safe_gate": bound is not None, "lower_bound": bound} if kind == "kda" else {"use_gate": gated}),
    }
    if kind == "delta_net":
        return {**settings, "expand_k": heads * key / dim, "expand_v": heads * value / dim}
    if kind == "gated_deltanet" and flags["output_gate"] == "sigmoid":
        settings["output_gate_activation"] = "sigmoid"
    return {**settings, "head_dim": key, "expand_v": value / key, "num_v_heads": flags["decoder_value_heads"]}


SOURCE = Source(folder.OPTIONS, read, convert, partial(folder.words_of_tokens, NAME, REQUIRED))
