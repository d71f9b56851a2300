"""The public language-model code of Schlag et al. 2021 (IDSIA/lmtool-fwp): its models as `fwp_lm` and `fwp_xl_lm`.

It is based on Transformer-XL's code; shared parts are in transformer_xl.py. An attention type is a feature map, an
update rule and an implementation. Each implementation divides and scales in its own way. d: size of a head.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_fwp.checkpoints.convert import transformer_xl as xl
from fairseq_fwp.checkpoints.convert.conversion import Conversion, Option, Options, Source, Tensors
from fairseq_fwp.checkpoints.convert.vocabulary import arrange, given_words
from fairseq_fwp.checkpoints.pretrained.checkpoint import SEED
from fairseq_fwp.modules.feature_maps import SEED_RANGE
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings

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

# FAVOR+'s matrix of random vectors, which a state dict may lack.
MATRIX = "layers.{}.dec_attn.proj_matrix"


def convert(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    number = options.need("attn_type")
    for name in ("remove_ff", "remove_lnorm", "remove_res", "remove_out_proj"):
        check(not options.get(name), f"--{name} must be off, got on: blocks without this part cannot be converted")
    if number in (0, 1, 2):
        return xl.convert(tensors, words, options)
    check(number in TYPES, f"--attn_type must be one of 0, 1, 2, {', '.join(map(str, TYPES))}, got {number}")
    return convert_fast_weights(Tensors(tensors), words, options, TYPES[number])


def convert_fast_weights(tensors: Tensors, words: list[str], options: Options, attn_type: AttentionType) -> Conversion:
    """Convert a model with an attention type of `TYPES`. Raises ValueError for options that change what it computes."""
    if options.get("pre_lnorm"):
        does = {True: "adds the normalised input to the block's output", False: "normalises keys, but not queries"}
        raise ValueError(f"--pre_lnorm cannot be converted with this --attn_type: it {does[attn_type.packed]}")
    dropatt, without = options.get("dropatt", 0), "give --dropatt 0 (dropout does not change evaluation)"
    check(attn_type.packed or not dropatt, f"--dropatt must be 0 with this --attn_type, got {dropatt}: {without}")
    vocabulary, heads = arrange(words), options.need("n_head")
    flags = xl.common_flags(tensors, heads, vocabulary, options)
    layers, head_dim = flags["decoder_layers"], flags["decoder_embed_dim"] // heads
    flags |= {
        **xl.absolute_positions(options),
        "decoder_update_rule": attn_type.update_rule,
        "decoder_feature_map": attn_type.feature_map,
        "final_dropout": options.get("dropout", 0.0),
        **attention_flags(options, attn_type, head_dim),
    }
    if attn_type.packed:
        weights = dict(unpack(tensors, layers, attn_type, heads, head_dim))
    else:
        weights = dict(xl.separate_queries(tensors, layers))
    notes = vocabulary.notes
    if attn_type.feature_map == "favor":
        drawn, seeds = MATRIX.format(0) not in tensors, torch.Generator().manual_seed(SEED)
        for index in range(layers):
            feature_map = f"{xl.ATTENTION.format(index)}feature_map."
            weights[f"{feature_map}seed"] = torch.randint(SEED_RANGE, (), generator=seeds)
            weights[f"{feature_map}draws"] = torch.ones((), dtype=torch.int64)
            if not drawn:  # (d, m) there
                weights[f"{feature_map}projection"] = tensors.take(MATRIX.format(index)).t()
        if drawn:
            note = "the state dict lacks dec_attn.proj_matrix: random features are drawn again, so losses differ"
            notes = [note, *notes]
    if options.get("carry_over_fast_weight"):
        segments = f"segments of {options['tgt_len']} tokens"
        notes = [f"trained with carried fast weights: evaluate with fwp-eval-lm --carry-state on {segments}", *notes]
    xl.check_frequencies(tensors)
    weights |= {**xl.take_words(tensors, vocabulary), **tensors.rename(xl.NAMES)}
    return Conversion("fwp_lm", flags, weights, vocabulary.words, notes)


def attention_flags(options: Options, attn_type: AttentionType, head_dim: int) -> Settings:
    """The flags of the feature map, of both normalisations with their epsilons, and of the scale of the output.

    Packed types multiply the output by d^(-1/2). Other types multiply the scores, before an epsilon is added to their
    sum. Without that factor here, the epsilon is d^(1/2) times as large.
    """
    flags: Settings = {"scale_read_out": attn_type.packed}
    if attn_type.feature_map == "favor":
        features = options.need("performer_proj_dim")
        flags |= {"favor_features": features, "favor_draw": "authors", "favor_offset": KERNEL_EPSILON}
    elif attn_type.feature_map == "dpfp":
        flags["dpfp_nu"] = options.need("dpfp_n_roll")
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
        weight, rows = tensors.take(f"layers.{index}.dec_attn.{net}.weight"), heads * sum(sizes)
        of_heads = f"{rows} rows for {heads} heads of {head_dim}"
        check(len(weight) == rows, f"dec_attn.{net} must have {of_heads}, got {len(weight)}: check --n_head")
        parts = weight.unflatten(0, (heads, sum(sizes))).split(sizes, dim=1)
        yield f"{xl.ATTENTION.format(index)}in_proj.weight", torch.cat([part.flatten(0, 1) for part in parts])


SOURCE = Source(OPTIONS, xl.read_state_dict, convert, given_words)
