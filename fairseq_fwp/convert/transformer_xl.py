"""Transformer-XL's public code (kimiyoung/transformer-xl): its models as `fwp_xl_lm` and `fwp_lm`.

The source is a state dict of its PyTorch code, or an .npz of the variables of its TensorFlow code (tensorflow_xl.py).

Attention types: 0, its own; 1, the vectors of Shaw et al. 2018 with biases; 2, absolute positions; 3, vectors learned
for each layer and position (Al-Rfou et al. 2019). The code of Schlag et al. 2021 is based on this one, so schlag_lm.py
uses most of this file.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_fwp.convert import tensorflow_xl
from fairseq_fwp.convert.checkpoint import load_tensors
from fairseq_fwp.convert.source import (
    Conversion,
    Entry,
    Option,
    Options,
    Source,
    check_equal,
    convert_tensors,
    whole_numbers,
)
from fairseq_fwp.convert.vocabulary import Vocabulary, arrange, given_words
from fairseq_fwp.modules.attention import SOFTMAX

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

# For every layer: our name -> their name.
BLOCKS = {
    "self_attn.out_proj.weight": "dec_attn.o_net.weight",
    "self_attn_layer_norm.weight": "dec_attn.layer_norm.weight",
    "self_attn_layer_norm.bias": "dec_attn.layer_norm.bias",
    "fc1.weight": "pos_ff.CoreNet.0.weight",
    "fc1.bias": "pos_ff.CoreNet.0.bias",
    "fc2.weight": "pos_ff.CoreNet.3.weight",
    "fc2.bias": "pos_ff.CoreNet.3.bias",
    "final_layer_norm.weight": "pos_ff.layer_norm.weight",
    "final_layer_norm.bias": "pos_ff.layer_norm.bias",
}

# Our order: keys, then values, and the heads within each of the two.
SEPARATE_QUERIES = [
    Entry(
        "self_attn.in_proj.weight",
        ("dec_attn.q_net.weight", "dec_attn.kv_net.weight"),
        lambda queries, others: torch.cat([queries, others]),
    )
]


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state dict or an .npz, marked by the option `tensorflow`, and the options of its training."""
    if path.suffix != ".npz":
        return read_state_dict(path)
    return tensorflow_xl.read(path), {**read_saved(path.parent), "tensorflow": True}


def read_state_dict(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A state dict, and the options of its training."""
    return load_tensors(path, EXPORT), read_saved(path.parent)


def read_saved(folder: Path) -> dict[str, Any]:
    """The options that the training wrote into log.txt, one line ` - name : value` each; none without that file."""
    path = folder / "log.txt"
    if not path.exists():
        return {}
    lines = re.findall(r"^ {4}- (\w+) : (.*)$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return {name: _literal(value) for name, value in lines}


def convert(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    """The converted model, see `Source`. Raises ValueError that names what cannot be represented."""
    attn_type = options.get("attn_type", 0)
    if attn_type not in (0, 1, 2, 3):
        raise ValueError(f"--attn_type must be 0, 1, 2 or 3 for Transformer-XL, got {attn_type}")
    if options.get("tensorflow") and (attn_type or options.get("pre_lnorm")):
        raise ValueError("--attn_type and --pre_lnorm must be left out: the TensorFlow code does not have them")
    return (convert_relative if attn_type in (0, 1) else convert_absolute)(tensors, words, options)


def convert_relative(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    """Convert attention types 0 and 1: relative positions and a memory."""
    sizes = read_sizes(tensors)
    heads = _tensor(tensors, "r_w_bias").shape[-2]
    if options.get("n_head", heads) != heads:
        raise ValueError(f"--n_head must be {heads}, as in the checkpoint, got {options.get('n_head')}")
    read_head_dim(tensors, sizes, heads, options)
    vocabulary = arrange(words)
    read_positions = learned_distances if options.get("attn_type", 0) == 1 else sinusoidal_distances
    position_flags, position_entries = read_positions(tensors, sizes, options)
    flags = {
        **common_flags(tensors, sizes, heads, vocabulary, options),
        **position_flags,
        "attention_dropout": options.get("dropatt", 0.0),
        "mem_len": read_memory(options),
        "same_length": options.get("same_length", False),
        # The public code does not normalise after the last layer.
        "decoder_normalize_before": options.get("pre_lnorm", False),
        "no_decoder_final_norm": options.get("pre_lnorm", False),
    }
    table = [
        *layers(sizes["n_layer"], [Entry("self_attn.in_proj.weight", ("dec_attn.qkv_net.weight",))]),
        *position_entries,
        *embeddings(tensors, vocabulary),
    ]
    notes = vocabulary.notes + (tensorflow_xl.notes(flags) if options.get("tensorflow") else [])
    return Conversion("fwp_xl_lm", flags, convert_tensors(table, tensors), vocabulary.words, notes)


def convert_absolute(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    """Convert attention types 2 and 3: softmax attention with absolute positions, added once or before every layer."""
    sizes = read_sizes(tensors)
    heads = options.need("n_head")
    read_head_dim(tensors, sizes, heads, options)
    if options.get("pre_lnorm"):
        raise ValueError("--pre_lnorm cannot be converted with this --attn_type: it normalises keys, but not queries")
    vocabulary = arrange(words)
    flags = {
        **common_flags(tensors, sizes, heads, vocabulary, options),
        "attention_dropout": options.get("dropatt", 0.0),
    }
    table = [*layers(sizes["n_layer"], SEPARATE_QUERIES), *embeddings(tensors, vocabulary)]
    if options.get("attn_type") == 3:
        check_no_memory(options)
        flags |= {"decoder_positions": "layerwise", "mem_len": 0}
        table += layerwise_positions(tensors, sizes["n_layer"], flags["tokens_per_sample"])
        notes = [
            f"a segment of fewer than {flags['tokens_per_sample']} tokens has the last positions there, the first here"
        ]
        weights = convert_tensors(table, tensors)
        return Conversion("fwp_xl_lm", flags, weights, vocabulary.words, vocabulary.notes + notes)
    flags |= {
        **absolute_positions(options),
        "decoder_update_rule": SOFTMAX,
        "final_dropout": options.get("dropout", 0.0),
    }
    table += positions(sizes["d_model"])
    return Conversion("fwp_lm", flags, convert_tensors(table, tensors), vocabulary.words, vocabulary.notes)


def read_sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The sizes found in the state dict, by their names in the training script."""
    if not any(".pos_ff." in name for name in tensors):
        raise ValueError(
            "every layer of the state dict must have a feed-forward block, got none: --remove_ff cannot be converted"
        )
    numbers = [int(found[1]) for name in tensors if (found := re.match(r"layers\.(\d+)\.", name))]
    d_inner, d_model = _tensor(tensors, "layers.0.pos_ff.CoreNet.0.weight").shape
    return {"n_layer": max(numbers) + 1, "d_model": d_model, "d_inner": d_inner}


def read_head_dim(tensors: Mapping[str, Tensor], sizes: Mapping[str, int], heads: int, options: Options) -> int:
    """The size of a head. Raises ValueError unless the heads share the embedding dimension."""
    together = _tensor(tensors, "layers.0.dec_attn.o_net.weight").shape[1]
    if heads < 1 or together % heads:
        raise ValueError(f"--n_head must divide {together}, the dimensions of all heads, got {heads}")
    head_dim = together // heads
    if options.get("d_head", head_dim) != head_dim:
        raise ValueError(
            f"--d_head must be {head_dim} = {together} dimensions / --n_head {heads}, got {options.get('d_head')}: "
            "check --n_head and --d_head"
        )
    if together != sizes["d_model"]:
        raise ValueError(
            f"--n_head {heads} x --d_head {head_dim} must be --d_model {sizes['d_model']}: heads of another "
            "size cannot be converted"
        )
    return head_dim


def common_flags(
    tensors: Mapping[str, Tensor], sizes: Mapping[str, int], heads: int, vocabulary: Vocabulary, options: Options
) -> dict[str, Any]:
    """Return the flags of every type: sizes, dropout, clusters of the vocabulary and length of a sample."""
    cutoffs, div_val = read_clusters(tensors, sizes["d_model"], options)
    words = sum(
        len(tensor) for name, tensor in tensors.items() if re.fullmatch(r"word_emb.emb_layers.\d+.weight", name)
    )
    expected = len(vocabulary.rows) - vocabulary.added
    if words != expected:
        raise ValueError(
            f"the vocabulary must have the {words} words of the checkpoint, got {expected}: give the vocabulary of its "
            "training"
        )
    return {
        "decoder_layers": sizes["n_layer"],
        "decoder_embed_dim": sizes["d_model"],
        "decoder_ffn_embed_dim": sizes["d_inner"],
        "decoder_attention_heads": heads,
        "dropout": options.get("dropout", 0.0),
        "activation_dropout": options.get("dropout", 0.0),
        "adaptive_softmax_cutoff": ",".join(map(str, vocabulary.cutoffs(cutoffs))) or None,
        "div_val": div_val,
        "tokens_per_sample": read_sample_length(options),
    }


def read_sample_length(options: Options) -> int:
    """The tokens of a sample. Raises ValueError for fewer than 1."""
    length: int = options.need("tgt_len")
    if length < 1:
        raise ValueError(f"--tgt_len must be at least 1, got {length}: give the value of the training")
    return length


def read_memory(options: Options) -> int:
    """Return the length of the memory in tokens, as this package counts it."""
    length: int = options.need("mem_len")
    # With --same_length a token sees mem_len tokens: here and in the PyTorch code including itself, in the TensorFlow
    # code without itself.
    return length + 1 if options.get("tensorflow") and options.get("same_length") else length


def read_clusters(tensors: Mapping[str, Tensor], d_model: int, options: Options) -> tuple[list[int], int]:
    """The cutoffs and div_val. Raises ValueError if embeddings and model have different sizes."""
    tables = [tensor for name, tensor in tensors.items() if re.fullmatch(r"word_emb.emb_layers.\d+.weight", name)]
    if not tables or tables[0].shape[1] != d_model:
        raise ValueError(
            f"--d_embed must be {d_model}, as --d_model, to be converted, got {tables[0].shape[1]}: with another size "
            "input and output have a projection each"
            if tables
            else "the state dict must have word_emb.emb_layers, got none: choose another --source"
        )
    clusters = len(tensors.get("crit.cluster_bias", ()))
    if "word_emb.emb_projs.0" in tensors:
        cutoffs = torch.tensor([0] + [len(table) for table in tables[:-1]]).cumsum(0)[1:].tolist()
        # With one cluster embeddings do not shrink, but they have projections.
        return cutoffs, d_model // tables[1].shape[1] if len(tables) > 1 else 2
    if not clusters:
        return [], 1
    if "crit.out_layers.1.bias" in tensors:  # TensorFlow's: biases are split by cluster, and words are one table
        sizes = [len(tensors[f"crit.out_layers.{index}.bias"]) for index in range(count_biases(tensors))]
        return list(accumulate(sizes[:-1])), 1
    text = options.get("cutoffs")
    if text is None and options.need("dataset") not in CUTOFFS:
        raise ValueError(f"--cutoffs must be given for --dataset {options.need('dataset')}, whose cutoffs are unknown")
    cutoffs = CUTOFFS[options.need("dataset")] if text is None else whole_numbers("--cutoffs", text)
    if len(cutoffs) != clusters:
        raise ValueError(f"--cutoffs must be {clusters} numbers, as in the checkpoint, got {len(cutoffs)}")
    return cutoffs, 1


def absolute_positions(options: Options) -> dict[str, Any]:
    """Return the flags of absolute positions, or of none. Raises ValueError for options of relative positions."""
    check_no_memory(options)
    clamp_len, tgt_len = options.get("clamp_len", -1), options.need("tgt_len")
    if 0 < clamp_len < tgt_len - 1:
        raise ValueError(
            f"--clamp_len must be at least {tgt_len - 1} with absolute positions, or -1 for no limit, got {clamp_len}: "
            "a smaller limit cannot be converted"
        )
    return {"no_token_positional_embeddings" if options.get("no_pos") else "positions_from_end": True}


def check_no_memory(options: Options) -> None:
    """Check that no option of a memory is given; raise ValueError otherwise."""
    for name in ("mem_len", "same_length"):
        if options.get(name):
            raise ValueError(f"--{name} must be left out with absolute positions, which have no memory")


def sinusoidal_distances(
    tensors: Mapping[str, Tensor], sizes: Mapping[str, int], options: Options
) -> tuple[dict[str, Any], list[Entry]]:
    """The flags and entries of attention type 0: sinusoids R_n, W_kR of each layer, u and v (shared or per layer)."""
    clamp_len, count = options.get("clamp_len", -1), sizes["n_layer"]
    untied = _tensor(tensors, "r_w_bias").dim() == 3
    entries = [
        Entry(f"decoder.layers.{index}.self_attn.positions.proj.weight", (f"layers.{index}.dec_attn.r_net.weight",))
        for index in range(count)
    ]
    for ours, theirs in (("content_bias", "r_w_bias"), ("position_bias", "r_r_bias")):
        shape = _tensor(tensors, theirs).shape
        if untied and (len(shape), *shape[:1]) != (3, count):
            raise ValueError(
                f"{theirs} must have the biases of {count} layers, got the shape {tuple(shape)}: the "
                "checkpoint is damaged"
            )
        for index in range(count if untied else 1):
            build = itemgetter(index if untied else slice(None))
            entries.append(Entry(f"decoder.layers.{index}.self_attn.positions.{ours}", (theirs,), build))
    flags = {"clamp_len": clamp_len if clamp_len > 0 else -1, "untie_biases": untied}
    return flags, [*entries, *positions(sizes["d_model"])]


def learned_distances(
    tensors: Mapping[str, Tensor], sizes: Mapping[str, int], options: Options
) -> tuple[dict[str, Any], list[Entry]]:
    """The flags and entries of attention type 1: vectors, biases and u of each layer. Their last row is distance 0."""
    clamp_len, count = options.get("clamp_len", -1), _tensor(tensors, "r_emb").shape[1]
    if clamp_len > 0:
        count = min(clamp_len, count)

    def table(index: int, vectors: Tensor, biases: Tensor) -> Tensor:
        return torch.cat([vectors[index], biases[index].unsqueeze(-1)], dim=-1)[-count:].flip(0).transpose(0, 1)

    entries = []
    for index in range(sizes["n_layer"]):
        ours = f"decoder.layers.{index}.self_attn.positions"
        entries.append(Entry(f"{ours}.table", ("r_emb", "r_bias"), partial(table, index)))
        entries.append(Entry(f"{ours}.content_bias", ("r_w_bias",), itemgetter(index)))
    return {"decoder_positions": "shaw_biased", "clamp_len": count - 1}, entries


def layerwise_positions(tensors: Mapping[str, Tensor], count: int, length: int) -> list[Entry]:
    """The vectors of positions that attention type 3 adds before each of `count` layers."""
    known = _tensor(tensors, "r_emb").shape[1]
    if known < length:
        raise ValueError(f"--tgt_len must be {known}, the number of positions in the checkpoint, got {length}")

    def table(index: int, vectors: Tensor) -> Tensor:
        return vectors[index, -length:].flatten(1)

    return [Entry(f"decoder.layer_positions.{i}.table.weight", ("r_emb",), partial(table, i)) for i in range(count)]


def layers(count: int, attention: Iterable[Entry]) -> list[Entry]:
    """The entries of all layers."""
    of_one = [*(Entry(ours, (theirs,)) for ours, theirs in BLOCKS.items()), *attention]
    return [
        Entry(
            entry.target and f"decoder.layers.{index}.{entry.target}",
            tuple(f"layers.{index}.{source}" for source in entry.sources),
            entry.build,
        )
        for index in range(count)
        for entry in of_one
    ]


def positions(d_model: int) -> list[Entry]:
    """Check the frequencies of the sinusoids, which are not weights: ours must be the same."""

    def check(frequencies: Tensor) -> None:
        ours = 10000 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
        # 1e-3: they may have been saved in half precision
        if frequencies.shape != ours.shape or ((frequencies.double() - ours).abs() > 1e-3 * ours + 1e-6).any():
            raise ValueError(
                "pos_emb.inv_freq must hold the frequencies 10000^(-2i/D), got others: they cannot be converted"
            )

    return [Entry(None, ("pos_emb.inv_freq",), check)]


def embeddings(tensors: Mapping[str, Tensor], vocabulary: Vocabulary) -> list[Entry]:
    """Word embeddings and the softmax tied to them."""
    words, biases = partial(vocabulary.place, fill=0.0), partial(vocabulary.place, fill=-torch.inf)
    clusters = [
        # Their last column belongs to the first cluster.
        Entry("decoder.adaptive_softmax.clusters.weight", ("crit.cluster_weight",), lambda tensor: tensor.flip(0)),
        Entry("decoder.adaptive_softmax.clusters.bias", ("crit.cluster_bias",), lambda tensor: tensor.flip(0)),
    ]
    count = sum(re.fullmatch(r"word_emb.emb_layers.\d+.weight", name) is not None for name in tensors)
    tables, outputs = (
        [f"{module}.{index}.weight" for index in range(count)] for module in ("word_emb.emb_layers", "crit.out_layers")
    )
    tied = [Entry(None, pair, check_equal("--not_tied")) for pair in zip(tables, outputs, strict=True)]
    bias = Entry(
        "decoder.adaptive_softmax.bias",
        tuple(f"crit.out_layers.{index}.bias" for index in range(max(count, count_biases(tensors)))),
        lambda *parts: biases(torch.cat(parts)),
    )
    entries = [*tied, bias, *(clusters if "crit.cluster_bias" in tensors else [])]
    if "word_emb.emb_projs.0" not in tensors:
        return [Entry("decoder.embed_tokens.weight", (tables[0],), words), *entries]
    projections = [(f"word_emb.emb_projs.{index}", f"crit.out_projs.{index}") for index in range(count)]
    return [
        *entries,
        Entry("decoder.embed_tokens.tables.0.weight", (tables[0],), words),
        *(Entry(f"decoder.embed_tokens.tables.{index}.weight", (tables[index],)) for index in range(1, count)),
        *(
            Entry(f"decoder.embed_tokens.projections.{index}.weight", (name,))
            for index, (name, _) in enumerate(projections)
        ),
        Entry("decoder.adaptive_softmax.projections.0.weight", ("crit.out_projs.0",)),
        *(Entry(None, pair, check_equal("untied projections, as of --dataset lm1b,")) for pair in projections[1:]),
    ]


def count_biases(tensors: Mapping[str, Tensor]) -> int:
    """The number of tensors that hold the biases of words."""
    return sum(re.fullmatch(r"crit.out_layers.\d+.bias", name) is not None for name in tensors)


def _tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"the state dict does not fit a model with these options: it lacks {name}; check the options")
    return tensors[name]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


SOURCE = Source(OPTIONS, read, convert, given_words)
