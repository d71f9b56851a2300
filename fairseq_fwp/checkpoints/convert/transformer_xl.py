"""Transformer-XL's public code (kimiyoung/transformer-xl): its models as `fwp_xl_lm` and `fwp_lm`.

The source is a state dict of its PyTorch code, or an .npz of the variables of its TensorFlow code (tensorflow_xl.py).
Attention types: 0, its own; 1, vectors of Shaw et al. 2018 with biases; 2, absolute positions; 3, vectors learned for
each layer and position (Al-Rfou et al. 2019). The code of Schlag et al. 2021 is based on this one: see schlag.py.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from fairseq_fwp.checkpoints.convert import tensorflow_xl, vocabulary
from fairseq_fwp.checkpoints.convert.conversion import Conversion, Option, Options, Source, Tensors
from fairseq_fwp.checkpoints.convert.vocabulary import Vocabulary
from fairseq_fwp.checkpoints.pretrained.checkpoint import WITH_CODE
from fairseq_fwp.checkpoints.pretrained.folder import is_stored, unpickle
from fairseq_fwp.modules.attention import SOFTMAX
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.data import check_file
from fairseq_fwp.patches.options import Settings

OPTIONS = {
    "attn_type": Option(int, "attention type"),
    "n_head": Option(int, "number of heads; not needed for attention types 0 and 1"),
    "tgt_len": Option(int, "tokens of a sample in training"),
    "mem_len": Option(int, "tokens of the memory; only attention types 0 and 1 have one"),
    "clamp_len": Option(int, "larger distances count as this one; -1, the script's default: no limit"),
    "same_length": Option(bool, "every token attends to the same number of others"),
    "pre_lnorm": Option(bool, "layer normalisation before each block"),
    "dropout": Option(float, "dropout; 0 is the script's default"),
    "dropatt": Option(float, "dropout of attention weights; 0 is the script's default"),
    "dataset": Option(str, "wt103 or lm1b: its cutoffs are used by the script with --adaptive"),
    "cutoffs": Option(str, "cutoffs of the adaptive softmax, comma-separated, if not those of --dataset"),
}

CUTOFFS = {"wt103": [20000, 40000, 200000], "lm1b": [60000, 100000, 640000]}

EXPORT = (
    "export one in the folder of the public code with: python -c \"import torch; m = torch.load('model.pt', 'cpu', "
    "weights_only=False); torch.save({**m.state_dict(), **{f'layers.{i}.dec_attn.proj_matrix': l.dec_attn.proj_matrix "
    "for i, l in enumerate(m.layers) if hasattr(l.dec_attn, 'proj_matrix')}}, 'state_dict.pt')\""
)

NAMES = {
    r"layers\.(\d+)\.dec_attn\.qkv_net\.": r"decoder.layers.\1.self_attn.in_proj.",
    r"layers\.(\d+)\.dec_attn\.r_net\.": r"decoder.layers.\1.self_attn.positions.proj.",
    r"layers\.(\d+)\.dec_attn\.o_net\.": r"decoder.layers.\1.self_attn.out_proj.",
    r"layers\.(\d+)\.dec_attn\.layer_norm\.": r"decoder.layers.\1.self_attn_layer_norm.",
    r"layers\.(\d+)\.pos_ff\.CoreNet\.0\.": r"decoder.layers.\1.fc1.",
    r"layers\.(\d+)\.pos_ff\.CoreNet\.3\.": r"decoder.layers.\1.fc2.",
    r"layers\.(\d+)\.pos_ff\.layer_norm\.": r"decoder.layers.\1.final_layer_norm.",
}
# Of each cluster of words, and of each layer.
TABLES, BIASES = "word_emb.emb_layers.{}.weight", "crit.out_layers.{}.bias"
ATTENTION = "decoder.layers.{}.self_attn."


def read(path: Path) -> tuple[dict[str, Tensor], Settings]:
    """A state dict or an .npz, marked by the option `tensorflow`, and the options of its training."""
    if path.suffix != ".npz":
        return read_state_dict(path)
    return tensorflow_xl.read(path), {**read_saved(path.parent), "tensorflow": True}


def read_state_dict(path: Path) -> tuple[dict[str, Tensor], Settings]:
    """A state dict, and the options of its training. Raises ValueError for any other file."""
    loaded = unpickle(path, "checkpoint", f"{WITH_CODE}: {EXPORT}")
    if not isinstance(loaded, dict) or not all(map(is_stored, loaded.values())):
        raise ValueError(f"{path} must be a state dict of named tensors, got other objects: {EXPORT}")
    return loaded, read_saved(path.parent)


def read_saved(folder: Path) -> Settings:
    """The options that the training wrote into log.txt, one line ` - name : value` each; none without that file."""
    path = folder / "log.txt"
    values: Settings = {}
    check_file(path)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for name, value in re.findall(r"^ {4}- (\w+) : (.*)$", text, re.MULTILINE):
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            values[name] = value
    return values


def convert(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    attn_type = options.get("attn_type", 0)
    if options.get("tensorflow") and (attn_type or options.get("pre_lnorm")):
        raise ValueError("--attn_type and --pre_lnorm must be left out: the TensorFlow code does not have them")
    check(attn_type in (0, 1, 2, 3), f"--attn_type must be 0, 1, 2 or 3 for Transformer-XL, got {attn_type}")
    convert_type = convert_relative if attn_type in (0, 1) else convert_absolute
    return convert_type(Tensors(tensors), vocabulary.arrange(words), options)


def convert_relative(tensors: Tensors, vocabulary: Vocabulary, options: Options) -> Conversion:
    """Convert attention types 0 and 1: relative positions and a memory."""
    heads = tensors["r_w_bias"].shape[-2]
    if options.get("n_head", heads) != heads:
        raise ValueError(f"--n_head must be {heads}, as in the checkpoint, got {options['n_head']}")
    flags = common_flags(tensors, heads, vocabulary, options)
    take_positions = learned_distances if options.get("attn_type") else sinusoidal_distances
    positions, weights = take_positions(tensors, flags["decoder_layers"], options)
    same_length, tensorflow = options.get("same_length", False), options.get("tensorflow", False)
    flags |= {
        **positions,
        "attention_dropout": options.get("dropatt", 0.0),
        # With --same_length a token sees mem_len tokens: itself included, but in the TensorFlow code besides itself.
        "mem_len": options.need("mem_len") + (tensorflow and same_length),
        "same_length": same_length,
        # The public code does not normalise after the last layer.
        "decoder_normalize_before": options.get("pre_lnorm", False),
        "no_decoder_final_norm": options.get("pre_lnorm", False),
    }
    weights |= {**take_words(tensors, vocabulary), **tensors.rename(NAMES)}
    notes = vocabulary.notes + (tensorflow_xl.notes(flags) if tensorflow else [])
    return Conversion("fwp_xl_lm", flags, weights, vocabulary.words, notes)


def convert_absolute(tensors: Tensors, vocabulary: Vocabulary, options: Options) -> Conversion:
    """Convert attention types 2 and 3: softmax attention with absolute positions, added once or before every layer."""
    if options.get("pre_lnorm"):
        raise ValueError("--pre_lnorm cannot be converted with this --attn_type: it normalises keys, but not queries")
    flags = {
        **common_flags(tensors, options.need("n_head"), vocabulary, options),
        "attention_dropout": options.get("dropatt", 0.0),
    }
    weights, notes = dict(separate_queries(tensors, flags["decoder_layers"])), vocabulary.notes
    if options.get("attn_type") == 3:
        check_no_memory(options)
        arch = "fwp_xl_lm"
        flags |= {"decoder_positions": "layerwise", "mem_len": 0}
        weights |= layerwise_positions(tensors, flags)
        shorter = f"a segment of fewer than {flags['tokens_per_sample']} tokens"
        notes = [*notes, f"{shorter} has the last positions there, the first here"]
    else:
        arch = "fwp_lm"
        flags |= {
            **absolute_positions(options),
            "decoder_update_rule": SOFTMAX,
            "final_dropout": options.get("dropout", 0.0),
        }
        check_frequencies(tensors)
    weights |= {**take_words(tensors, vocabulary), **tensors.rename(NAMES)}
    return Conversion(arch, flags, weights, vocabulary.words, notes)


def common_flags(tensors: Tensors, heads: int, vocabulary: Vocabulary, options: Options) -> Settings:
    """Return the flags of every type: sizes, dropout, clusters of the vocabulary and length of a sample."""
    numbers = [int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d+)\.", name))]
    inner, dim = tensors["layers.0.pos_ff.CoreNet.0.weight"].shape
    together = tensors["layers.0.dec_attn.o_net.weight"].shape[1]
    if heads < 1 or together % heads:
        raise ValueError(f"--n_head must divide {together}, the dimensions of all heads, got {heads}")
    size = options.get("d_head", together // heads)
    wanted = f"{together // heads} = {together} dimensions / --n_head {heads}"
    check(size == together // heads, f"--d_head must be {wanted}, got {size}: check --n_head and --d_head")
    cutoffs, div_val = read_clusters(tensors, dim, options)
    words, expected = sum(sizes_of(tensors, TABLES)), len(vocabulary.rows) - vocabulary.added
    if words != expected:
        raise ValueError(f"the vocabulary must have the {words} words of the checkpoint, got {expected}: give its own")
    length = options.need("tgt_len")
    check(length >= 1, f"--tgt_len must be at least 1, got {length}: give the value of the training")
    return {
        "decoder_layers": max(numbers) + 1,
        "decoder_embed_dim": dim,
        "decoder_ffn_embed_dim": inner,
        "decoder_attention_heads": heads,
        "dropout": options.get("dropout", 0.0),
        "activation_dropout": options.get("dropout", 0.0),
        "adaptive_softmax_cutoff": ",".join(map(str, vocabulary.cutoffs(cutoffs))) or None,
        "div_val": div_val,
        "tokens_per_sample": length,
    }


def sizes_of(tensors: Tensors, name: str) -> list[int]:
    """The lengths of tensors with numbers in their names, see `Tensors.numbered`."""
    return [len(tensors[place]) for place in tensors.numbered(name)]


def read_clusters(tensors: Tensors, dim: int, options: Options) -> tuple[list[int], int]:
    """The cutoffs and div_val. Raises ValueError if embeddings and model have different sizes."""
    tables = [tensors[name] for name in tensors.numbered(TABLES)]
    check(tables, "the state dict must have word_emb.emb_layers, got none: choose another --source")
    if (size := tables[0].shape[1]) != dim:
        raise ValueError(f"--d_embed must be {dim}, as --d_model, got {size}: a projection of both cannot be converted")
    clusters = len(tensors.get("crit.cluster_bias", ()))
    if "word_emb.emb_projs.0" in tensors:
        cutoffs = list(accumulate(sizes_of(tensors, TABLES)[:-1]))
        # With one cluster embeddings do not shrink, but they have projections.
        return cutoffs, dim // tables[1].shape[1] if len(tables) > 1 else 2
    if not clusters:
        return [], 1
    if "crit.out_layers.1.bias" in tensors:  # TensorFlow's: biases are split by cluster, and words are one table
        return list(accumulate(sizes_of(tensors, BIASES)[:-1])), 1
    if "cutoffs" not in options and options.need("dataset") not in CUTOFFS:
        raise ValueError(f"--cutoffs must be given for --dataset {options['dataset']}, whose cutoffs are unknown")
    cutoffs = options.numbers("cutoffs") if "cutoffs" in options else CUTOFFS[options["dataset"]]
    given = len(cutoffs)
    check(given == clusters, f"--cutoffs must be {clusters} numbers, as in the checkpoint, got {given}")
    return cutoffs, 1


def absolute_positions(options: Options) -> Settings:
    """Return the flags of absolute positions, or of none. Raises ValueError for options of relative positions."""
    check_no_memory(options)
    clamp_len, least = options.get("clamp_len", -1), options.need("tgt_len") - 1
    limits = f"at least {least} with absolute positions, or -1 for no limit, got {clamp_len}"
    check(not 0 < clamp_len < least, f"--clamp_len must be {limits}: a smaller limit cannot be converted")
    return {"no_token_positional_embeddings" if options.get("no_pos") else "positions_from_end": True}


def check_no_memory(options: Options) -> None:
    """Raise ValueError for options of a memory."""
    for name in ("mem_len", "same_length"):
        check(not options.get(name), f"--{name} must be left out with absolute positions, which have no memory")


def sinusoidal_distances(tensors: Tensors, layers: int, options: Options) -> tuple[Settings, dict[str, Tensor]]:
    """Take u and v, shared or of each layer, of attention type 0, which has sinusoids. Return flags and weights."""
    clamp_len, untied = options.get("clamp_len", -1), tensors["r_w_bias"].dim() == 3
    weights = {}
    for ours, theirs in (("content_bias", "r_w_bias"), ("position_bias", "r_r_bias")):
        biases = tensors.take(theirs)
        fits, got = not untied or (biases.dim(), len(biases)) == (3, layers), f"the shape {tuple(biases.shape)}"
        check(fits, f"{theirs} must have the biases of {layers} layers, got {got}: the checkpoint is damaged")
        for index, bias in enumerate(biases if untied else [biases]):
            weights[f"{ATTENTION.format(index)}positions.{ours}"] = bias
    check_frequencies(tensors)
    return {"clamp_len": clamp_len if clamp_len > 0 else -1, "untie_biases": untied}, weights


def learned_distances(tensors: Tensors, layers: int, options: Options) -> tuple[Settings, dict[str, Tensor]]:
    """Take u of each layer, and of each distance a vector and a bias, of attention type 1. Return flags and weights.

    The last row is distance 0. With --clamp_len N only the last N rows count. Longer distances have the first of them.
    """
    vectors, biases, content = (tensors.take(name) for name in ("r_emb", "r_bias", "r_w_bias"))
    heads, head_dim = content.shape[-2:]
    rows = vectors.shape[1:2]
    check_shape("r_w_bias", content, (layers, heads, head_dim))
    check_shape("r_emb", vectors, (layers, *rows, heads, head_dim))
    check_shape("r_bias", biases, (layers, *rows, heads))
    clamp_len = options.get("clamp_len", -1)
    count = min(clamp_len, *rows) if clamp_len > 0 else rows[0]
    tables = torch.cat([vectors, biases.unsqueeze(-1)], -1)[:, -count:].flip(1).transpose(1, 2)
    weights = {}
    for index in range(layers):
        weights[f"{ATTENTION.format(index)}positions.table"] = tables[index]
        weights[f"{ATTENTION.format(index)}positions.content_bias"] = content[index]
    return {"decoder_positions": "shaw_biased", "clamp_len": count - 1}, weights


def layerwise_positions(tensors: Tensors, flags: Settings) -> dict[str, Tensor]:
    """Take the vectors of positions that attention type 3 adds before each layer; the last row is the last position."""
    vectors, length, heads = tensors.take("r_emb"), flags["tokens_per_sample"], flags["decoder_attention_heads"]
    rows, head_dim = vectors.shape[1:2], flags["decoder_embed_dim"] // heads
    check_shape("r_emb", vectors, (flags["decoder_layers"], *rows, heads, head_dim))
    check(rows[0] >= length, f"--tgt_len must be at most {rows[0]}, the positions of the checkpoint, got {length}")
    tables = vectors[:, -length:].flatten(2)
    return {f"decoder.layer_positions.{index}.table.weight": table for index, table in enumerate(tables)}


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    shape = tuple(tensor.shape)
    check(shape == expected, f"{name} must be {expected}, got {shape}: the checkpoint is damaged")


def check_frequencies(tensors: Tensors) -> None:
    """Take the frequencies of the sinusoids, which are not weights. Raises ValueError if ours are others."""
    frequencies, dim = tensors.take("pos_emb.inv_freq"), len(tensors["layers.0.dec_attn.o_net.weight"])
    ours = 10000 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    # 1e-3: they may have been saved in half precision
    if frequencies.shape != ours.shape or ((frequencies.double() - ours).abs() > 1e-3 * ours + 1e-6).any():
        raise ValueError("pos_emb.inv_freq must hold the frequencies 10000^(-2i/D), got others, unknown here")


def separate_queries(tensors: Tensors, layers: int) -> Iterator[tuple[str, Tensor]]:
    """Take the projections of each layer. Our order: queries, keys, values, and the heads within each of them."""
    for index in range(layers):
        parts = [tensors.take(f"layers.{index}.dec_attn.{name}_net.weight") for name in ("q", "kv")]
        yield f"{ATTENTION.format(index)}in_proj.weight", torch.cat(parts)


def take_words(tensors: Tensors, vocabulary: Vocabulary) -> dict[str, Tensor]:
    """Take word embeddings and the softmax tied to them."""
    softmax, words = "decoder.adaptive_softmax", "decoder.embed_tokens"
    tables = tensors.take_numbered(TABLES)
    for index, table in enumerate(tables):
        tensors.take_equal(f"crit.out_layers.{index}.weight", table, "--not_tied")
    weights = {f"{softmax}.bias": vocabulary.place(torch.cat(tensors.take_numbered(BIASES)), fill=-torch.inf)}
    if "crit.cluster_bias" in tensors:
        for part in ("weight", "bias"):  # their last column belongs to the first cluster
            weights[f"{softmax}.clusters.{part}"] = tensors.take(f"crit.cluster_{part}").flip(0)
    tables[0] = vocabulary.place(tables[0], fill=0.0)
    if len(tables) == 1 and "word_emb.emb_projs.0" not in tensors:
        return weights | {f"{words}.weight": tables[0]}
    projections = tensors.take_numbered("word_emb.emb_projs.{}")
    weights[f"{softmax}.projections.0.weight"] = tensors.take("crit.out_projs.0")
    for index, projection in enumerate(projections[1:], 1):
        tensors.take_equal(f"crit.out_projs.{index}", projection, "untied projections, as of --dataset lm1b,")
    for name, parts in (("tables", tables), ("projections", projections)):
        weights |= {f"{words}.{name}.{index}.weight": part for index, part in enumerate(parts)}
    return weights


SOURCE = Source(OPTIONS, read, convert, vocabulary.given_words)
