"""The public language-model code of Schlag et al. 2021 (IDSIA/lmtool-fwp): its models as `fwp_lm` and `fwp_xl_lm`.

It is based on Transformer-XL's code; shared parts are in transformer_xl.py. An attention type is a feature map, an
update rule and an implementation. Each implementation divides and scales in its own way. d: size of a head.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_fwp.convert import transformer_xl as xl
from fairseq_fwp.convert.files import Conversion, Option, Options, Source, Tensors, arrange, given_words

OPTIONS = {
    **xl.OPTIONS,
    "no_pos": Option(bool, "no positions"),
    "skip_attn_normalization": Option(bool, "no attention normalisation; types 2 to 6 do not have this option"),
    "performer_proj_dim": Option(int, "random vectors of types 5, 25, 35 and 45"),
    "dpfp_n_roll": Option(int, "nu of types 6, 26 and 46"),
    "carry_over_fast_weight": Option(bool, "trained with fast weights carried to the next segment"),
}

# What they add to divisors of attention normalisation, to exponentials of FAVOR+, and to sums (nothing).
EPSILON = 1e-5
KERNEL_EPSILON = 1e-4
SUM_EPSILON = 1e-24


class AttentionType(NamedTuple):
    """An attention type of the public code, by our names.

    packed: queries, keys, values (and beta) of each head are together; normalized: for delta, the retrieved value too.
    """

    update_rule: str
    feature_map: str
    packed: bool = True
    normalized: bool = False


TYPES = {
    4: AttentionType("sum", "elu", packed=False),
    5: AttentionType("sum", "favor", packed=False),
    6: AttentionType("sum", "dpfp", packed=False),
    24: AttentionType("delta", "elu"),
    25: AttentionType("delta", "favor"),
    26: AttentionType("delta", "dpfp"),
    34: AttentionType("sum", "elu"),
    35: AttentionType("sum", "favor"),
    44: AttentionType("delta", "elu", normalized=True),
    45: AttentionType("delta", "favor", normalized=True),
    46: AttentionType("delta", "dpfp", normalized=True),
}

REFUSED_TYPES = {
    10: "a debugging form of type 4",
    14: "a step-wise form of linear attention",
    16: "a step-wise form of linear attention with DPFP",
    54: "a Delta MLP",
    64: "a Delta Delta Net",
    80: "a recurrent network",
    90: "an LSTM",
    **dict.fromkeys((124, 134), "a Delta RNN"),
    **dict.fromkeys((224, 234, 244, 254), "a Delta LSTM"),
    324: "a fast weight programmer with a recurrent slow network",
    934: "a Recurrent Delta Net",
}

# FAVOR+'s matrix of random vectors, which a state dict may lack.
MATRIX = "layers.{}.dec_attn.proj_matrix"

REFUSED_OPTIONS = ("remove_ff", "remove_lnorm", "remove_res", "remove_out_proj")


def convert(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    """The converted model, see `Source`. Raises ValueError that names what cannot be represented."""
    attn_type = options.need("attn_type")
    for name in REFUSED_OPTIONS:
        if options.get(name):
            raise ValueError(f"--{name} must be off, got on: blocks without this part cannot be converted")
    if attn_type in (0, 1, 2, 3):
        return xl.convert(tensors, words, options)
    if attn_type in REFUSED_TYPES:
        raise ValueError(f"--attn_type {attn_type} cannot be converted: it is {REFUSED_TYPES[attn_type]}")
    if attn_type not in TYPES:
        known = ", ".join(map(str, [0, 1, 2, 3, *TYPES]))
        raise ValueError(
            f"--attn_type must be one of {known}, got {attn_type}, which is not a model of the public code"
        )
    return convert_fast_weights(Tensors(tensors), words, options, TYPES[attn_type])


def convert_fast_weights(tensors: Tensors, words: list[str], options: Options, attn_type: AttentionType) -> Conversion:
    """Convert a model whose attention type is in `TYPES`."""
    check_options(options, attn_type)
    vocabulary, heads = arrange(words), options.need("n_head")
    flags = xl.common_flags(tensors, heads, vocabulary, options)
    layers, head_dim = flags["decoder_layers"], flags["decoder_embed_dim"] // heads
    flags |= {
        **xl.absolute_positions(options),
        "decoder_update_rule": attn_type.update_rule,
        "decoder_feature_map": attn_type.feature_map,
        "final_dropout": options.get("dropout", 0.0),
        **map_flags(options, attn_type),
        **normalization_flags(options, attn_type, head_dim),
    }
    if attn_type.packed:
        weights = dict(unpack(tensors, layers, attn_type, heads, head_dim))
    else:
        weights = dict(xl.separate_queries(tensors, layers))
    notes = notes_of(tensors, options, attn_type)
    if attn_type.feature_map == "favor":
        for index, name in enumerate(tensors.numbered(MATRIX)):  # (d, m) there
            weights[f"{xl.ATTENTION.format(index)}feature_map.projection"] = tensors.take(name).t()
    xl.check_frequencies(tensors)
    weights |= {**xl.take_words(tensors, vocabulary), **tensors.rename(xl.NAMES)}
    return Conversion("fwp_lm", flags, weights, vocabulary.words, notes + vocabulary.notes)


def check_options(options: Options, attn_type: AttentionType) -> None:
    """Check that no option changes what these types compute; raise ValueError otherwise."""
    if options.get("pre_lnorm"):
        does = (
            "adds the normalised input to the block's output"
            if attn_type.packed
            else "normalises keys, but not queries"
        )
        raise ValueError(f"--pre_lnorm cannot be converted with this --attn_type: it {does}")
    if options.get("dropatt") and not attn_type.packed:
        raise ValueError(
            f"--dropatt must be 0 with this --attn_type, got {options.get('dropatt')}: give --dropatt 0 (dropout does "
            "not change evaluation)"
        )


def map_flags(options: Options, attn_type: AttentionType) -> dict[str, Any]:
    """The flags of the feature map."""
    if attn_type.feature_map == "favor":
        features = options.need("performer_proj_dim")
        return {"favor_features": features, "favor_draw": "authors", "favor_offset": KERNEL_EPSILON}
    return {"dpfp_nu": options.need("dpfp_n_roll")} if attn_type.feature_map == "dpfp" else {}


def normalization_flags(options: Options, attn_type: AttentionType, head_dim: int) -> dict[str, Any]:
    """The flags of both normalisations, their epsilons and the scale of the output.

    Packed types multiply the output by d^(-1/2). Other types multiply the scores, before an epsilon is added to their
    sum. Without that factor here, the epsilon is d^(1/2) times as large.
    """
    flags: dict[str, Any] = {"scale_read_out": attn_type.packed}
    if attn_type.update_rule == "delta":
        flags |= {"sum_normalization": True, "sum_normalization_epsilon": SUM_EPSILON}
    if attn_type.packed and options.get("skip_attn_normalization"):
        return flags
    return flags | {
        "attention_normalization": True,
        "attention_normalization_read_out_only": attn_type.update_rule == "delta" and not attn_type.normalized,
        "normalization_epsilon": EPSILON if attn_type.packed else EPSILON * head_dim**0.5,
        "add_normalization_epsilon": True,
    }


def unpack(
    tensors: Tensors, layers: int, attn_type: AttentionType, heads: int, head_dim: int
) -> Iterator[tuple[str, Tensor]]:
    """Take queries, keys, values and beta of each layer: head by head there, all heads of each here."""
    net, betas = ("qkvb_net", [1]) if attn_type.update_rule == "delta" else ("qkv_net", [])
    sizes = [head_dim] * 3 + betas
    for index in range(layers):
        weight = tensors.take(f"layers.{index}.dec_attn.{net}.weight")
        if len(weight) != heads * sum(sizes):
            raise ValueError(
                f"dec_attn.{net} must have {heads * sum(sizes)} rows for {heads} heads of {head_dim}, got "
                f"{len(weight)}: check --n_head"
            )
        parts = weight.unflatten(0, (heads, sum(sizes))).split(sizes, dim=1)
        yield f"{xl.ATTENTION.format(index)}in_proj.weight", torch.cat([part.flatten(0, 1) for part in parts])


def notes_of(tensors: Tensors, options: Options, attn_type: AttentionType) -> list[str]:
    """Return notes for users of the converted model, one sentence each."""
    found = []
    if attn_type.feature_map == "favor" and MATRIX.format(0) not in tensors:
        found.append(
            "the state dict lacks dec_attn.proj_matrix, which the public code does not save: random features are drawn "
            "again, so losses differ as between two draws"
        )
    if options.get("carry_over_fast_weight"):
        found.append(
            f"trained with carried fast weights: evaluate with fwp-eval-lm --carry-state on segments of "
            f"{options.need('tgt_len')} tokens"
        )
    return found


SOURCE = Source(OPTIONS, xl.read_state_dict, convert, given_words)
