"""GPT-2 (Radford et al. 2019) in the format of Hugging Face's transformers: as `fwp_lm`, with the same logits.

folder.py tells of its words; `</s>` is <|endoftext|>.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from fairseq_fwp.checkpoints.convert import folder
from fairseq_fwp.checkpoints.convert.config import check_expected, look_up
from fairseq_fwp.checkpoints.convert.conversion import Conversion, Options, Source, Tensors
from fairseq_fwp.checkpoints.convert.vocabulary import arrange, take_tables
from fairseq_fwp.checkpoints.pretrained.folder import CONFIG
from fairseq_fwp.modules.attention import SOFTMAX
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings

NAME = "GPT-2"

# Defaults of settings that config.json may leave out.
DEFAULTS = {
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "eos_token_id": 50256,
    "resid_pdrop": 0.1,
}

# Settings that it must have.
SIZES = ("n_embd", "n_head", "n_layer", "vocab_size")

# Other names of settings, which transformers reads too.
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}

# fairseq's names of the same functions.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
    "relu": "relu",
    "tanh": "tanh",
}

# Settings with the only value that can be converted, and what the model does with another value.
EXPECTED = {
    "model_type": ("gpt2", "it is another model"),
    "layer_norm_epsilon": (1e-5, "its layer normalisations have another epsilon"),
    "scale_attn_weights": (True, "its attention is not scaled"),
    "scale_attn_by_inverse_layer_idx": (False, "its attention is scaled by the layer"),
    "add_cross_attention": (False, "it attends to an encoder"),
    "tie_word_embeddings": (True, "its output has embeddings of its own"),
}

NAMES = {
    r"h\.(\d+)\.attn\.c_attn\.": r"decoder.layers.\1.self_attn.in_proj.",
    r"h\.(\d+)\.attn\.c_proj\.": r"decoder.layers.\1.self_attn.out_proj.",
    r"h\.(\d+)\.ln_1\.": r"decoder.layers.\1.self_attn_layer_norm.",
    r"h\.(\d+)\.mlp\.c_fc\.": r"decoder.layers.\1.fc1.",
    r"h\.(\d+)\.mlp\.c_proj\.": r"decoder.layers.\1.fc2.",
    r"h\.(\d+)\.ln_2\.": r"decoder.layers.\1.final_layer_norm.",
    r"ln_f\.": "decoder.layer_norm.",
    r"wpe\.": "decoder.embed_positions.table.",
}
# Weights (in, out) there and (out, in) here.
TRANSPOSED = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")
TABLES = ("wte.weight", "wpe.weight")  # of words and of positions
# Constants: the causal mask, and the number at masked places.
MASKS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")


def read(path: Path) -> tuple[dict[str, Tensor], Settings]:
    """The weights in a folder and its config.json. Raises ValueError where either is missing or damaged."""
    tensors, config = folder.read(path, NAME, SIZES)
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for name in renamed:
        twice = {name, f"transformer.{name}"} <= tensors.keys()
        check(not twice, f"the weights must have each name once, got {name} and transformer.{name}")
    for name, tensor in renamed.items():
        if (TRANSPOSED.fullmatch(name) or name in TABLES) and (tensor.dim() != 2 or not tensor.numel()):
            raise ValueError(f"{name} must be a matrix, got the shape {tuple(tensor.shape)}")
    return renamed, {**DEFAULTS, **config}


def convert(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    check_expected(options, EXPECTED)
    for alias, setting in ALIASES.items():
        if alias in options and setting in options and options[alias] != options[setting]:
            got = f"{options[alias]!r} and {options[setting]!r}"
            raise ValueError(f"{alias} and {setting} in {CONFIG} must be equal, two names of one setting, got {got}")
    activation = look_up(options, "activation_function", ACTIVATIONS)
    rest = Tensors(
        (name, tensor.t().contiguous() if TRANSPOSED.fullmatch(name) else tensor)
        for name, tensor in tensors.items()
        if not MASKS.fullmatch(name)
    )
    positions, vocabulary = len(rest["wpe.weight"]), arrange(folder.with_end(words, options))
    length = options.get("n_positions", options.get("max_position_embeddings", positions))
    check(length == positions, f"wpe.weight must have {length} rows, n_positions of {CONFIG}, got {positions}")
    weights = take_tables(rest, vocabulary, "wte.weight", tied=True) | rest.rename(NAMES)
    flags = {
        "decoder_layers": options["n_layer"],
        "decoder_embed_dim": options["n_embd"],
        "decoder_ffn_embed_dim": options.get("n_inner", 4 * options["n_embd"]),
        "decoder_attention_heads": options["n_head"],
        "activation_fn": activation,
        "dropout": options.get("resid_pdrop"),
        "attention_dropout": options.get("attn_pdrop"),
        "decoder_update_rule": SOFTMAX,
        "attention_bias": True,
        "decoder_normalize_before": True,
        "decoder_learned_pos": True,
        "no_scale_embedding": True,
        "output_layer": "tied",
        "tokens_per_sample": positions,
        "max_target_positions": positions,
    }
    embedding, blocks = options.get("embd_pdrop", 0.1), options.get("resid_pdrop")
    note = f"dropout of embeddings is {blocks} here, as in blocks, and was {embedding} (embd_pdrop)"
    notes = [*([note] if embedding != blocks else []), *vocabulary.notes]
    return Conversion("fwp_lm", flags, weights, vocabulary.words, notes, options.get("line_start"))


SOURCE = Source(folder.OPTIONS, read, convert, partial(folder.words_of_tokens, NAME, SIZES))
