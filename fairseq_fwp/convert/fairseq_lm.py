"""fairseq's `transformer_lm`: its checkpoints as `fwp_lm` with softmax attention, which has the same logits.

Among them the WikiText-103 model of Baevski & Auli 2019 (arXiv 1809.10853), with adaptive input and softmax, and
fairseq's GPT-2 and GPT-3 sizes. Checkpoints of earlier versions, with `args` and queries, keys and values in one
tensor, are read too. Settings that a checkpoint lacks have the defaults of fairseq's configuration.
"""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from torch import Tensor

from fairseq_fwp.convert.checkpoint import load
from fairseq_fwp.convert.source import (
    Conversion,
    Entry,
    Options,
    Source,
    check_equal,
    convert_tensors,
    whole_numbers,
)
from fairseq_fwp.convert.vocabulary import dictionary_words
from fairseq_fwp.modules.attention import SOFTMAX

EXPORT = (
    "export what is needed with: python -c \"import torch; s = torch.load('model.pt', 'cpu', weights_only=False); "
    "torch.save({name: s.get(name) for name in ('args', 'cfg', 'model')}, 'exported.pt')\""
)

# Settings of fairseq that have no counterpart here.
REFUSED = {
    "character_embeddings": "its embeddings are made from characters",
    "layernorm_embedding": "it normalises its embeddings",
    "decoder_layers_to_keep": "its layers were pruned when it was loaded",
    "base_layers": "it has BASE layers",
    "scale_fc": "it normalises within the feed-forward block",
    "scale_attn": "it normalises after attention",
    "scale_heads": "its heads have scales",
    "scale_resids": "its residual connections have scales",
    "decoder_xformers_att_config": "its attention is of xFormers",
}

# fairseq saves these next to the weights: version numbers, and empty tensors that carry a dtype.
MARKS = r"decoder\.(version|adaptive_softmax\.version|.*\b_float_tensor)"


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights of a checkpoint, by today's names, and its settings. Raises ValueError for any other file."""
    found, settings, name = read_checkpoint(path)
    check_model(path, name, ["transformer_lm"])
    tensors, settings = upgrade(found), fill_in(settings, TransformerLanguageModelConfig())
    shared = "decoder.embed_tokens.weight"
    if settings.get("share_decoder_input_output_embed") and shared in tensors:  # earlier versions saved it once
        tensors.setdefault("decoder.output_projection.weight", tensors[shared])
    return tensors, settings


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """The weights of a fairseq checkpoint, the saved settings of its model and task, and its architecture."""
    state = load(path, EXPORT)
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise ValueError(f"{path} must be a checkpoint of fairseq, got a file without a model")
    args, cfg = state.get("args"), state.get("cfg")
    settings: dict[str, Any]
    if not all(isinstance(weight, Tensor) for weight in state["model"].values()):
        raise ValueError(f"{path} must be a checkpoint of fairseq, got a model with objects that are not tensors")
    if isinstance(args, Namespace):
        settings, name = dict(vars(args)), getattr(args, "arch", None)
    elif isinstance(cfg, dict) and isinstance(of_model := cfg.get("model"), dict | Namespace):
        of_model = dict(vars(of_model)) if isinstance(of_model, Namespace) else of_model
        settings, name = {**(cfg.get("task") or {}), **of_model}, of_model.get("arch") or of_model.get("_name")
    else:
        raise ValueError(f"{path} must be a checkpoint of fairseq, got a file without the settings of its model")
    return state["model"], {key: value for key, value in settings.items() if value is not None}, str(name)


def check_model(path: Path, name: str, models: Sequence[str]) -> None:
    """Check that the architecture belongs to one of these models; raise ValueError otherwise."""
    if ARCH_MODEL_NAME_REGISTRY.get(name, name) not in models:
        raise ValueError(
            f"the architecture in {path} must be {' or '.join(models)}, got {name!r}: choose another --source"
        )


def fill_in(settings: dict[str, Any], defaults: FairseqDataclass) -> dict[str, Any]:
    """The settings, with defaults for missing ones."""
    known = {key: value for key, value in vars(defaults).items() if not str(value).startswith("${")}
    return {**known, **settings}


def upgrade(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names that fairseq has used since 2019."""
    upgraded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.*self_attn\.)in_proj_(weight|bias)", name):
            parts = zip("qkv", tensor.chunk(3), strict=True)
            upgraded |= {f"{found[1]}{letter}_proj.{found[2]}": part for letter, part in parts}
            continue
        name = re.sub(r"\.layer_norms\.0\.", ".self_attn_layer_norm.", name)
        name = re.sub(r"\.layer_norms\.[12]\.", ".final_layer_norm.", name)
        upgraded["decoder.output_projection.weight" if name == "decoder.embed_out" else name] = tensor
    return upgraded


def convert(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    """The converted model, see `Source`. Raises ValueError that names what cannot be represented."""
    for name, reason in REFUSED.items():
        if options.get(name):
            raise ValueError(f"--{name.replace('_', '-')} cannot be converted: {reason}")
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if options.get(name) != options.get("decoder_embed_dim"):
            raise ValueError(
                f"--{name.replace('_', '-')} must be {options.get('decoder_embed_dim')}, as --decoder-embed-dim, got "
                f"{options.get(name)}: embeddings with a projection cannot be converted"
            )
    check_vocabulary(tensors, len(words))
    adaptive = options.get("adaptive_softmax_cutoff") is not None
    flags, output = adaptive_output(options, len(words)) if adaptive else plain_output(options)
    final_norm = has_final_norm(tensors, options)
    table = [
        *layers(options.get("decoder_layers")),
        *both("decoder.layer_norm", "decoder.layer_norm" if final_norm else None),
        *positions(options),
        *output,
        *(Entry(None, (name,)) for name in tensors if re.fullmatch(MARKS, name)),
    ]
    weights = convert_tensors(table, tensors)
    return Conversion("fwp_lm", {**common_flags(options, final_norm), **flags}, weights, words, notes(options))


def has_final_norm(tensors: Mapping[str, Tensor], options: Options) -> bool:
    """Return whether fairseq normalises after the last layer; with checkpoints of its first versions it does not."""
    version = tensors.get("decoder.version", torch.ones(1))
    before = options.get("decoder_normalize_before") and not options.get("no_decoder_final_norm")
    return bool(before) and float(version[0]) > 2


def common_flags(options: Options, final_norm: bool) -> dict[str, Any]:
    """Sizes, dropouts, positions and length of a sample."""
    before = bool(options.get("decoder_normalize_before"))
    same = ("decoder_layers", "decoder_embed_dim", "decoder_ffn_embed_dim", "decoder_attention_heads", "dropout")
    switches = ("no_token_positional_embeddings", "decoder_learned_pos", "no_scale_embedding", "add_bos_token")
    return {
        **{name: options.get(name) for name in (*same, "attention_dropout", "max_target_positions")},
        **{name: bool(options.get(name)) for name in switches},
        "activation_dropout": options.get("activation_dropout") or options.get("relu_dropout", 0.0),
        "activation_fn": str(getattr(options.get("activation_fn"), "value", options.get("activation_fn"))),
        "decoder_update_rule": SOFTMAX,
        "attention_bias": True,
        "decoder_normalize_before": before,
        "no_decoder_final_norm": before and not final_norm,
        "tokens_per_sample": options.get("tokens_per_sample", 1024),
    }


def plain_output(options: Options) -> tuple[dict[str, Any], list[Entry]]:
    """The flags and entries of word embeddings and a softmax over all words."""
    if options.get("adaptive_input"):
        raise ValueError(
            "--adaptive-input without --adaptive-softmax-cutoff cannot be converted: fwp_lm has an adaptive input only "
            "with an adaptive softmax"
        )
    embedding, output = "decoder.embed_tokens.weight", "decoder.output_projection.weight"
    if options.get("share_decoder_input_output_embed"):
        own = "a checkpoint with --share-decoder-input-output-embed but an output of its own"
        tied = Entry(None, (embedding, output), check_equal(own))
        return {"output_layer": "tied"}, [Entry(embedding, (embedding,)), tied]
    words = Entry("decoder.adaptive_softmax.words.weight", (output,))
    return {"output_layer": "untied"}, [Entry(embedding, (embedding,)), words]


def adaptive_output(options: Options, words: int) -> tuple[dict[str, Any], list[Entry]]:
    """The flags and entries of an adaptive input and the softmax tied to it. Raises ValueError for any other."""
    for name in ("adaptive_input", "tie_adaptive_weights", "tie_adaptive_proj"):
        if not options.get(name):
            raise ValueError(
                f"--{name.replace('_', '-')} must be on to convert an adaptive softmax, got off: in fwp_lm the output "
                "uses the word vectors and projections of the input"
            )
    factor = float(options.get("adaptive_input_factor"))
    if factor != int(factor) or factor < 2:
        raise ValueError(f"--adaptive-input-factor must be a whole number of at least 2, got {factor:g}")
    # The last cutoff may be the number of all words.
    given = whole_numbers("--adaptive-softmax-cutoff", options.get("adaptive_softmax_cutoff"))
    cutoffs = [cutoff for cutoff in given if cutoff < words + len(Dictionary())]
    flags = {
        "output_layer": "tied",
        "adaptive_softmax_cutoff": ",".join(map(str, cutoffs)),
        "div_val": int(factor),
        "adaptive_softmax_dropout": options.get("adaptive_softmax_dropout", 0.0),
    }
    return flags, [entry for index in range(len(cutoffs) + 1) for entry in cluster(index)]


def cluster(index: int) -> list[Entry]:
    """The entries of a cluster of words, 0 = the most frequent."""
    words, projection = (f"decoder.embed_tokens.embeddings.{index}.{part}.weight" for part in (0, 1))
    softmax, tied = "decoder.adaptive_softmax", partial(check_equal, "an adaptive softmax of its own")
    entries = [
        Entry(f"decoder.embed_tokens.tables.{index}.weight", (words,)),
        Entry(f"decoder.embed_tokens.projections.{index}.weight", (projection,)),
    ]
    if index == 0:
        clusters = Entry(f"{softmax}.clusters.weight", (f"{softmax}.head.class_proj.weight",))
        return [*entries, clusters, Entry(None, (words, f"{softmax}.head.word_proj.weight"), tied())]
    tail = f"{softmax}.tail.{index - 1}"
    return [
        *entries,
        Entry(None, (projection, f"{tail}.0.weight"), tied()),
        Entry(None, (words, f"{tail}.2.weight"), tied()),
    ]


def layers(count: int) -> list[Entry]:
    """The entries of all layers."""
    found = []
    for layer in (f"decoder.layers.{index}" for index in range(count)):
        for part in ("weight", "bias"):
            of_one = tuple(f"{layer}.self_attn.{letter}_proj.{part}" for letter in "qkv")
            found.append(Entry(f"{layer}.self_attn.in_proj.{part}", of_one, lambda *parts: torch.cat(parts)))
        for name in ("self_attn.out_proj", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"):
            found += both(f"{layer}.{name}", f"{layer}.{name}")
    return found


def both(target: str, source: str | None) -> list[Entry]:
    """The entries of a weight and its bias; none without a source."""
    if source is None:
        return []
    return [Entry(f"{target}.{part}", (f"{source}.{part}",)) for part in ("weight", "bias")]


def positions(options: Options) -> list[Entry]:
    """The entry of learned positions. fairseq's table begins with unused rows, up to the row of padding."""
    if options.get("no_token_positional_embeddings") or not options.get("decoder_learned_pos"):
        return []
    unused = Dictionary().pad() + 1
    name = "decoder.embed_positions"
    return [Entry(f"{name}.table.weight", (f"{name}.weight",), lambda table: table[unused:])]


def check_vocabulary(
    tensors: Mapping[str, Tensor],
    words: int,
    side: str = "decoder",
    said: str = "the dictionary",
    asked: str = "the dict.txt of its training",
) -> None:
    """Check that the embeddings, if any, have a row for each word and each of fairseq's special symbols.

    side: encoder or decoder; said, asked: words for the dictionary, and for what to give instead. Raises ValueError
    otherwise.
    """
    pattern = rf"{side}\.embed_tokens\.(embeddings\.\d+\.0\.)?weight"
    tables = [name for name in tensors if re.fullmatch(pattern, name)]
    found, expected = sum(len(tensors[name]) for name in tables), words + len(Dictionary())
    if tables and found != expected:
        raise ValueError(
            f"{said} must have the {found} words of the checkpoint, got {expected} (with fairseq's special symbols): "
            f"give {asked} with --vocabulary"
        )


def notes(options: Options) -> list[str]:
    """Return the differences of further training, one sentence each."""
    left_out = [name for name in ("decoder_layerdrop", "quant_noise_pq", "quant_noise_scalar") if options.get(name)]
    return [f"--{name.replace('_', '-')}, which the model was trained with, is left out" for name in left_out]


SOURCE = Source({}, read, convert, dictionary_words)
