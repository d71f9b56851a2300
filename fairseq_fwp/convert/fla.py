"""flash-linear-attention's DeltaNet, Gated DeltaNet and Kimi Delta Attention, from and to folders of transformers.

Both directions use one table of names, `names_of`. Models are `fwp_lm` with the options of their architectures here.
Layers of softmax attention and experts are refused. D: hidden_size, H heads with keys of size K, HV with values of V.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_fwp.convert import folder
from fairseq_fwp.convert.files import Conversion, Options, Source, Tensors, arrange, check
from fairseq_fwp.convert.folder import CONFIG
from fairseq_fwp.models.attention_options import flag
from fairseq_fwp.models.fwp_lm import FwpLanguageModel
from fairseq_fwp.models.presets import MODERN

NAME = "flash-linear-attention"
# Settings that config.json must have, and defaults of those that it may leave out.
REQUIRED = ("hidden_size", "num_hidden_layers", "num_heads", "vocab_size")
DEFAULTS = {
    "allow_neg_eigval": False, "conv_size": 4, "eos_token_id": 2, "hidden_ratio": 4, "intermediate_size": None,
    "lower_bound": None, "max_position_embeddings": 2048, "norm_eps": 1e-6, "num_v_heads": None,
    "tie_word_embeddings": False,
}  # fmt: skip
# Of a model: the class there, our rule, and defaults of its own.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "delta_net": ("DeltaNetForCausalLM", "delta", {"expand_k": 1.0, "expand_v": 1.0, "use_gate": False}),
    "gated_deltanet": ("GatedDeltaNetForCausalLM", "gated_delta", {"expand_v": 2.0, "head_dim": 256, "use_gate": True}),
    "kda": ("KDAForCausalLM", "kda", {"expand_v": 1.0, "head_dim": 128}),
}
# Settings with the only value that can be converted, and what the model does with another value.
EXPECTED = {
    "attn": (None, "some of its layers have softmax attention with rotary positions"),
    "attnres_block_size": (None, "its layers attend to the outputs of earlier ones"),
    "hidden_act": ("swish", "its feed-forward blocks have another activation"),
    "qk_activation": ("silu", "its queries and keys have another activation"),
    "qk_norm": ("l2", "its queries and keys have another normalisation"),
    "use_beta": (True, "it always writes with full strength"),
    "use_short_conv": (True, "it has no short convolution"),
}


class Sizes(NamedTuple):
    """The sizes of a layer: see the module."""

    dim: int
    heads: int
    value_heads: int
    key: int
    value: int
    ffn: int


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights in a folder and its config.json. Raises ValueError where either is missing or damaged."""
    return folder.read(path, NAME, REQUIRED)


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with defaults. Raises ValueError for a model that cannot be converted."""
    kind = config.get("model_type")
    if kind not in MODELS:
        raise ValueError(
            f"model_type in {CONFIG} must be one of {', '.join(MODELS)}, got {kind!r}: no other can be loaded"
        )
    for name, (value, reason) in EXPECTED.items():
        if config.get(name, value) != value:
            raise ValueError(f"{CONFIG} has {name} = {config[name]!r}, which cannot be converted: {reason}")
    return {**DEFAULTS, **MODELS[kind][2], **config}


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """Return the sizes of a complete configuration. Raises ValueError if they are not whole numbers."""
    dim, heads = config["hidden_size"], config["num_heads"]
    key = config["head_dim"] if "head_dim" in config else dim * config["expand_k"] / heads
    value = (key if "head_dim" in config else dim / heads) * config["expand_v"]
    for name, size in (("key", key), ("value", value)):
        if not isclose(size, round(size)) or round(size) < 1:
            raise ValueError(f"{CONFIG} must give heads with {name}s of a whole size, got {size}")
    ffn = config["intermediate_size"] or 256 * -(-int(dim * config["hidden_ratio"] * 2 / 3) // 256)
    return Sizes(dim, heads, config["num_v_heads"] or heads, round(key), round(value), ffn)


def flags_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `fwp_lm` for a complete configuration."""
    kind, sizes, length = config["model_type"], sizes_of(config), config["max_position_embeddings"]
    gate = {"kda": "sigmoid"}.get(kind, "silu" if config.get("use_gate") else "none")
    return {
        **MODERN,
        "decoder_layers": config["num_hidden_layers"],
        "decoder_embed_dim": sizes.dim,
        "decoder_ffn_embed_dim": sizes.ffn,
        "decoder_attention_heads": sizes.heads,
        "decoder_key_dim": sizes.key,
        "decoder_value_dim": sizes.value,
        "decoder_value_heads": sizes.value_heads,
        "decoder_update_rule": MODELS[kind][1],
        "decoder_conv_size": config["conv_size"],
        "norm_epsilon": config["norm_eps"],
        "output_gate": gate,
        "output_gate_rank": sizes.value if kind == "kda" else None,
        "negative_eigenvalues": config["allow_neg_eigval"],
        "decay_lower_bound": config["lower_bound"] if kind == "kda" else None,
        "output_layer": "tied" if config["tie_word_embeddings"] else "untied",
        "tokens_per_sample": length,
        "max_target_positions": length,
    }


def names_of(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield each of our tensors but those of words, and theirs, which it joins, with numbers of rows."""
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
    for index in range(config["num_hidden_layers"]):
        for ours, theirs in tensors.items():
            renamed = {f"model.layers.{index}.{name}": rows for name, rows in theirs.items()}
            yield f"decoder.layers.{index}.{ours}", renamed
    yield "decoder.layer_norm.weight", {"model.norm.weight": dim}


def convert(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    config = complete(options)
    rest, vocabulary, value_heads = Tensors(tensors), arrange(words), sizes_of(config).value_heads
    weights: dict[str, Tensor] = {}
    for ours, theirs in names_of(config):
        parts = [rest.take(name) for name in theirs]
        for name, part in zip(theirs, parts, strict=True):
            if len(part) != theirs[name]:
                raise ValueError(f"{name} must have {theirs[name]} rows as {CONFIG} says, got {len(part)}")
        joined = torch.cat(parts)
        if ".convolution." in ours:
            joined = joined.flatten(1)
        elif ".gate_activations." in ours:
            joined = joined.view(value_heads, -1)
        weights[ours] = joined
    table = rest.take("model.embeddings.weight")
    if len(table) != len(words):
        raise ValueError(f"model.embeddings.weight must have the {len(words)} words of {CONFIG}, got {len(table)}")
    weights["decoder.embed_tokens.weight"] = vocabulary.place(table, fill=0.0)
    if not config["tie_word_embeddings"]:
        weights["decoder.adaptive_softmax.words.weight"] = vocabulary.place(rest.take("lm_head.weight"), fill=0.0)
    elif "lm_head.weight" in rest:
        rest.take_equal("lm_head.weight", table, "lm_head")
    # Symbols of fairseq's dictionary that the model lacks get probability 0, and are not learned.
    weights["decoder.adaptive_softmax.bias"] = vocabulary.place(table.new_zeros(len(table)), fill=-torch.inf)
    rest.rename({})  # refuses what is left
    return Conversion("fwp_lm", flags_of(config), weights, vocabulary.words, vocabulary.notes)


def write(conversion: Conversion, out: Path) -> None:
    """Write config.json and model.safetensors, which flash-linear-attention and transformers read, or nothing.

    Raises ValueError if the folder exists and is not empty, for a model with other parts than theirs, and for a
    dictionary that does not hold numbers of tokens.
    """
    if conversion.arch != "fwp_lm":
        raise ValueError(f"the model must be fwp_lm to be written for {NAME}, got {conversion.arch}")
    masked = conversion.weights.get("decoder.adaptive_softmax.bias", torch.zeros(len(Dictionary()))).isneginf()
    rows, eos = rows_of_tokens(conversion.words, bool(masked[Dictionary().eos()]))
    config = complete(config_of(conversion.flags, len(rows), eos))
    check(conversion)
    tensors: dict[str, Tensor] = {}
    for ours, theirs in names_of(config):
        joined = conversion.weights[ours]
        if ".convolution." in ours:
            joined = joined.unsqueeze(1)
        elif ".gate_activations." in ours:
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


def config_of(flags: Mapping[str, Any], words: int, eos: int | None) -> dict[str, Any]:
    """Return the configuration of a model with these options. Raises ValueError for options that they do not have."""
    given = FwpLanguageModel.complete(dict(flags))
    rules = {rule: kind for kind, (_, rule, _) in MODELS.items()}
    if (rule := given["decoder_update_rule"]) not in rules:
        raise ValueError(f"--decoder-update-rule must be one of {', '.join(rules)} for {NAME}, got {rule}")
    dim, heads = given["decoder_embed_dim"], given["decoder_attention_heads"]
    for name in ("decoder_key_dim", "decoder_value_dim"):
        given[name] = given[name] or dim // heads
    given["decoder_value_heads"] = given["decoder_value_heads"] or heads
    kind, key, value = rules[rule], given["decoder_key_dim"], given["decoder_value_dim"]
    config = {
        "model_type": kind,
        "hidden_size": dim,
        "num_hidden_layers": given["decoder_layers"],
        "num_heads": heads,
        "intermediate_size": given["decoder_ffn_embed_dim"],
        "hidden_act": "swish",
        "norm_eps": given["norm_epsilon"],
        "use_short_conv": True,
        "conv_size": given["decoder_conv_size"],
        "allow_neg_eigval": given["negative_eigenvalues"],
        "tie_word_embeddings": given["output_layer"] == "tied",
        "max_position_embeddings": flags.get("tokens_per_sample") or DEFAULTS["max_position_embeddings"],
        "vocab_size": words,
        "eos_token_id": eos,
        "bos_token_id": None,
    }
    if kind == "delta_net":
        config |= {"expand_k": heads * key / dim, "expand_v": heads * value / dim}
    else:
        config |= {"head_dim": key, "expand_v": value / key, "num_v_heads": given["decoder_value_heads"]}
    if kind == "kda":
        bound = given["decay_lower_bound"]
        config |= {"safe_gate": bound is not None, "lower_bound": bound}
    else:
        config["use_gate"] = given["output_gate"] != "none"
    # The options that these settings give must be those of the model.
    lost = FwpLanguageModel.differences(given, flags_of(complete(config)))
    if lost:
        had = ", ".join(f"{flag(name)} {ours} (there {theirs})" for name, (ours, theirs) in lost.items())
        raise ValueError(f"the model must have the parts of {kind} to be written for {NAME}, got {had}")
    return config


SOURCE = Source({}, read, convert, partial(folder.numbers_of_tokens, NAME, REQUIRED, DEFAULTS))
