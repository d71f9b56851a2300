"""Llama, Mistral and Qwen (2 and 3) in the format of Hugging Face's transformers: as `fwp_lm`, with the same logits.

Touvron et al. 2023, arXiv 2302.13971: RMS normalisation, rotary positions and SwiGLU. Heads may share keys and values,
and all layers may attend within a window (Jiang et al. 2023, arXiv 2310.06825). Qwen3 normalises queries and keys (Yang
et al. 2025, arXiv 2505.09388).
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from fairseq_fwp.checkpoints.convert import folder
from fairseq_fwp.checkpoints.convert.config import (
    POSITIVE,
    SWITCH,
    WHOLE,
    Kind,
    check_expected,
    check_kinds,
    look_up,
    unread_note,
)
from fairseq_fwp.checkpoints.convert.conversion import Conversion, Options, Source, Tensors
from fairseq_fwp.checkpoints.convert.vocabulary import arrange, take_tables
from fairseq_fwp.checkpoints.pretrained.folder import CONFIG
from fairseq_fwp.models.presets import BLOCKS
from fairseq_fwp.modules.attention import SOFTMAX
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings

NAME = "Llama, Mistral or Qwen"
# Settings that config.json must have, and defaults of those that it may leave out, which are transformers'.
REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
DEFAULTS: Settings = {
    "attention_dropout": 0.0, "eos_token_id": 2, "head_dim": None, "hidden_act": "silu", "layer_types": None,
    "original_max_position_embeddings": None, "rms_norm_eps": 1e-6, "rope_parameters": None, "rope_scaling": None,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
QWEN: Settings = {
    "eos_token_id": None, "layer_types": None, "max_position_embeddings": 32768, "max_window_layers": 28,
    "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False,
}  # fmt: skip
# The same of a model. What another model does not read is not listed.
MODELS: dict[str, Settings] = {
    "llama": {
        "attention_bias": False, "max_position_embeddings": 2048, "mlp_bias": False, "num_key_value_heads": None,
    },
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": QWEN,
    "qwen3": {**QWEN, "attention_bias": False, "head_dim": 128},
}  # fmt: skip
# Rotary positions of Llama 3.1 and later: their type, and its settings in the order of our option.
LLAMA3, LENGTH = "llama3", "original_max_position_embeddings"
SCALING = ("factor", "low_freq_factor", "high_freq_factor", LENGTH)
EXPECTED = {"mlp_bias": (False, "its feed-forward blocks have biases")}
KINDS = {
    WHOLE: (
        "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
        "num_hidden_layers", "num_key_value_heads", "sliding_window", "vocab_size",
    ),
    POSITIVE: ("rms_norm_eps", "rope_theta", *SCALING),
    SWITCH: ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"),
    Kind("a whole number", lambda value: type(value) is int and value >= 0): ("max_window_layers",),
    Kind("silu or swish", lambda value: value in ("silu", "swish")): ("hidden_act",),
}  # fmt: skip
NOT_NULL = ("hidden_act", "max_position_embeddings", "max_window_layers", "rms_norm_eps")
# Settings of training, of the folder and of the command, which change nothing here.
NOT_READ = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "end", "initializer_range", "line_start", "model_type",
    "pad_token_id", "pretraining_tp", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
# Constants of earlier versions: the frequencies of rotary positions.
FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def read(path: Path) -> tuple[dict[str, Tensor], Settings]:
    """The weights in a folder, its config.json and defaults. Raises ValueError where one is missing or damaged."""
    tensors, config = folder.read(path, NAME, REQUIRED)
    return tensors, {**DEFAULTS, **look_up(config, "model_type", MODELS), **config}


def complete(config: Settings) -> Settings:
    """Return the configuration with None for null. Raises ValueError for a model that cannot be converted."""
    own = look_up(config, "model_type", MODELS)
    settings = {**dict.fromkeys([*DEFAULTS, *own]), **config}
    for name in NOT_NULL:
        check(name not in settings or settings[name] is not None, f"{name} in {CONFIG} must have a value, got null")
    given = {name: settings[name] for name in (*REQUIRED, *DEFAULTS, *own) if settings[name] is not None}
    check_expected(config, EXPECTED if "mlp_bias" in own else {})
    check_kinds(given, KINDS)
    size, heads = settings["hidden_size"], settings["num_attention_heads"]
    shared = settings["num_key_value_heads"] = settings["num_key_value_heads"] or heads
    if settings["head_dim"] is None:
        check(size % heads == 0, f"num_attention_heads in {CONFIG} must divide hidden_size = {size}, got {heads}")
        settings["head_dim"] = size // heads
    if heads % shared:
        raise ValueError(f"num_key_value_heads in {CONFIG} must divide num_attention_heads = {heads}, got {shared}")
    return settings


def window_of(config: Settings) -> int | None:
    """Return the window of all layers, None = none. Raises ValueError if layers have different ones."""
    window: int | None = config["sliding_window"] if "sliding_window" in MODELS[config["model_type"]] else None
    full, sliding, layers = "full_attention", "sliding_attention", config["num_hidden_layers"]
    types = config["layer_types"]
    if "layer_types" not in MODELS[config["model_type"]]:
        usual = [full if window is None else sliding] * layers
        wanted = f"{usual[0]} for all {layers} layers with sliding_window = {window}"
        check(types in (None, usual), f"layer_types in {CONFIG} must be {wanted}, got {types!r}")
        return window
    if not config["use_sliding_window"]:
        window = None
    if types is None:
        first = layers if window is None else config["max_window_layers"]
        types = [full if index < first else sliding for index in range(layers)]
    if types not in ([full] * layers, [sliding] * layers):
        wanted = f"{full} or {sliding} for all {layers} layers"
        reason = "a window of some layers, as from max_window_layers on, cannot be converted"
        raise ValueError(f"layer_types in {CONFIG} must be {wanted}, got {types!r}: {reason}")
    if types[0] == full:
        return None
    if window is None:
        raise ValueError(f"use_sliding_window and sliding_window in {CONFIG} must be given with {sliding}, got none")
    return window


def positions_of(config: Settings) -> Settings:
    """Return the options of rotary positions. Raises ValueError for a scaling that cannot be converted.

    transformers 5 has rope_parameters in place of rope_theta and rope_scaling.
    """
    name = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
    given = config[name] or {}
    check(isinstance(given, dict), f"{name} in {CONFIG} must be settings of rotary positions, got {given!r}")
    rope = Options({"rope_theta": config["rope_theta"]}) | Options(given)  # without null
    rope = {"rope_type": rope.get("type", "default"), **rope}
    if (kind := rope["rope_type"]) not in ("default", LLAMA3):
        raise ValueError(f"{CONFIG} has {name} of type {kind!r}, which cannot be converted: choose a model without it")
    numbers = ["rope_theta", *(SCALING if kind == LLAMA3 else ())]
    got, needed = sorted(rope.keys() - {"rope_type", "type"}), ", ".join(numbers)
    listed = ", ".join(got) or "none"
    check(got == sorted(numbers), f"{name} in {CONFIG} must have {needed} with type {kind}, got {listed}")
    check_kinds(rope, KINDS)
    if kind == LLAMA3 and config[LENGTH] not in (None, rope[LENGTH]):
        raise ValueError(f"{LENGTH} in {CONFIG} must be {rope[LENGTH]} as in its {name}, got {config[LENGTH]!r}")
    scaling = ",".join(str(rope[number]) for number in SCALING) if kind == LLAMA3 else None
    return {"attention_rope_theta": rope["rope_theta"], "attention_rope_scaling": scaling}


def flags_of(config: Settings) -> Settings:
    """Return the options of `fwp_lm` for a complete configuration."""
    kind, heads, length = config["model_type"], config["num_attention_heads"], config["max_position_embeddings"]
    shared, dim, size = config["num_key_value_heads"], config["hidden_size"], config["head_dim"]
    return {
        **BLOCKS,
        "decoder_layers": config["num_hidden_layers"],
        "decoder_embed_dim": dim,
        "decoder_ffn_embed_dim": config["intermediate_size"],
        "decoder_attention_heads": heads,
        "decoder_update_rule": SOFTMAX,
        "attention_kv_heads": None if shared == heads else shared,
        "attention_head_dim": None if size * heads == dim else size,
        "attention_qk_norm": kind == "qwen3",
        "attention_bias": has_bias(config),
        "attention_qkv_bias": kind == "qwen2",
        **positions_of(config),
        "attention_window": window_of(config),
        "attention_dropout": config["attention_dropout"],
        "rms_norm": True,
        "norm_epsilon": config["rms_norm_eps"],
        "swiglu": True,
        "output_layer": "tied" if config["tie_word_embeddings"] else "untied",
        "tokens_per_sample": length,
        "max_target_positions": length,
    }


def has_bias(config: Settings) -> bool:
    """Return whether all projections of attention have biases."""
    return "attention_bias" in MODELS[config["model_type"]] and bool(config["attention_bias"])


def names_of(config: Settings) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield each of our tensors but those of words, and theirs, which it joins, with numbers of rows."""
    dim, size, ffn = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, shared = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    of_attention = {"self_attn.q_proj": queries, "self_attn.k_proj": shared, "self_attn.v_proj": shared}
    layer = {
        "self_attn.in_proj.weight": {f"{name}.weight": rows for name, rows in of_attention.items()},
        "self_attn.out_proj.weight": {"self_attn.o_proj.weight": dim},
        "self_attn_layer_norm.weight": {"input_layernorm.weight": dim},
        "fc1.weight": {"mlp.gate_proj.weight": ffn, "mlp.up_proj.weight": ffn},
        "fc2.weight": {"mlp.down_proj.weight": dim},
        "final_layer_norm.weight": {"post_attention_layernorm.weight": dim},
    }
    if has_bias(config) or config["model_type"] == "qwen2":
        layer["self_attn.in_proj.bias"] = {f"{name}.bias": rows for name, rows in of_attention.items()}
    if has_bias(config):
        layer["self_attn.out_proj.bias"] = {"self_attn.o_proj.bias": dim}
    if config["model_type"] == "qwen3":
        layer["self_attn.query_norm.weight"] = {"self_attn.q_norm.weight": size}
        layer["self_attn.key_norm.weight"] = {"self_attn.k_norm.weight": size}
    for index in range(config["num_hidden_layers"]):
        for ours, theirs in layer.items():
            renamed = {f"model.layers.{index}.{name}": rows for name, rows in theirs.items()}
            yield f"decoder.layers.{index}.{ours}", renamed
    yield "decoder.layer_norm.weight", {"model.norm.weight": dim}


def convert(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    config, vocabulary = complete(options), arrange(folder.with_end(words, options))
    flags = flags_of(config)
    unread = Tensors((name, tensor) for name, tensor in tensors.items() if not FREQUENCIES.fullmatch(name))
    weights = {ours: unread.join(ours, theirs) for ours, theirs in names_of(config)}
    weights |= take_tables(unread, vocabulary, "model.embed_tokens.weight", config["tie_word_embeddings"])
    unread.rename({})  # refuses what is left
    known = {*REQUIRED, *DEFAULTS, *MODELS[config["model_type"]], *NOT_READ}
    notes = [*unread_note(options, known), *vocabulary.notes]
    return Conversion("fwp_lm", flags, weights, vocabulary.words, notes, options.get("line_start"))


SOURCE = Source(folder.OPTIONS, read, convert, partial(folder.words_of_tokens, NAME, REQUIRED))
