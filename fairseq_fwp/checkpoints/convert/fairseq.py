"""Checkpoints of fairseq's `transformer_lm` and `transformer`, and of this package; those of translation with softmax.

Among fairseq's models are the WikiText-103 model of Baevski & Auli 2019 (arXiv 1809.10853), with adaptive input and
softmax, and its GPT-2 and GPT-3 sizes. Checkpoints of earlier versions are read too. Settings that a checkpoint lacks
have the defaults of fairseq's configuration. Logits stay the same.
"""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from torch import Tensor

from fairseq_fwp.checkpoints.convert.checkpoint import make_task
from fairseq_fwp.checkpoints.convert.conversion import Conversion, Option, Options, Source, Tensors
from fairseq_fwp.checkpoints.pretrained import OF_TASK, read_line_start, read_ours
from fairseq_fwp.checkpoints.pretrained.checkpoint import MARKS
from fairseq_fwp.checkpoints.pretrained.checkpoint import read as read_checkpoint
from fairseq_fwp.checkpoints.pretrained.dictionary import check_words, dictionary_words, read_words
from fairseq_fwp.models.fwp_transformer import FwpTransformerModel, linear_attentions
from fairseq_fwp.modules.attention import SOFTMAX
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.hooks import KEY
from fairseq_fwp.patches.options import Settings, flag, word

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

# The weights of a language model; queries, keys and values are one tensor in the first versions, as here.
NAMES = {
    r"(decoder\.layers\.\d+\.self_attn\.in_proj)_": r"\1.",
    r"(decoder\.layers\.\d+)\.layer_norms\.0\.": r"\1.self_attn_layer_norm.",
    r"(decoder\.layers\.\d+)\.layer_norms\.[12]\.": r"\1.final_layer_norm.",
    r"(decoder\.layers\.\d+\.(self_attn\.out_proj|self_attn_layer_norm|fc1|fc2|final_layer_norm)\.)": r"\1",
    r"(decoder\.(layer_norm|embed_tokens)\.(weight|bias))": r"\1",
    r"decoder\.embed_tokens\.embeddings\.(\d+)\.0\.": r"decoder.embed_tokens.tables.\1.",
    r"decoder\.embed_tokens\.embeddings\.(\d+)\.1\.": r"decoder.embed_tokens.projections.\1.",
    r"decoder\.adaptive_softmax\.head\.class_proj\.": "decoder.adaptive_softmax.clusters.",
    r"decoder\.(output_projection\.weight|embed_out)$": "decoder.adaptive_softmax.words.weight",
}

TRANSLATION_MODELS = ("transformer", "fwp_transformer")
# The languages of translation.
LANGUAGES = ("source_lang", "target_lang")


def read(
    path: Path, models: Sequence[str], defaults: FairseqDataclass | None = None
) -> tuple[dict[str, Tensor], Settings]:
    """Return the weights of one of these models, and its settings with defaults. Raises ValueError for other files."""
    checkpoint = read_checkpoint(path)
    checkpoint.check_model(models)
    usual = {key: value for key, value in vars(defaults).items() if not str(value).startswith("${")} if defaults else {}
    return checkpoint.weights, {**usual, **checkpoint.options}


def without_marks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights without what fairseq saves next to them."""
    return {name: tensor for name, tensor in tensors.items() if not MARKS.fullmatch(name)}


def check_vocabulary(tensors: Mapping[str, Tensor], words: int, side: str, name: str, source: str) -> None:
    """Check that the embeddings, if any, have a row for each word and each of fairseq's special symbols.

    side: encoder or decoder; name, source: words for the dictionary, and for what to give instead. Raises ValueError
    otherwise.
    """
    pattern, rows = rf"{side}\.embed_tokens\.(embeddings\.\d+\.0\.)?weight", words + len(Dictionary())
    sizes = [len(tensor) for weight, tensor in tensors.items() if re.fullmatch(pattern, weight)]
    got = f"{rows} (with fairseq's special symbols): give {source} of its training with --vocabulary"
    check(sum(sizes) in (0, rows), f"{name} must have the {sum(sizes)} words of the checkpoint, got {got}")


def with_same_words(conversion: Conversion, options: Options) -> Conversion:
    """Return the conversion. Raises ValueError if the training had other words, where the checkpoint tells them."""
    check_words(make_task(conversion), options.get(KEY, {}))
    return conversion


def convert_lm(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    for name, reason in REFUSED.items():
        check(not options.get(name), f"{flag(name)} cannot be converted: {reason}")
    dim = options.get("decoder_embed_dim")
    for name in ("decoder_input_dim", "decoder_output_dim"):
        size, reason = options.get(name), "embeddings with a projection cannot be converted"
        check(size == dim, f"{flag(name)} must be {dim}, as --decoder-embed-dim, got {size}: {reason}")
    check_vocabulary(tensors, len(words), "decoder", "the dictionary", "the dict.txt")
    remaining, version = Tensors(without_marks(tensors)), tensors.get("decoder.version", torch.ones(1))
    output = adaptive_flags if options.get("adaptive_softmax_cutoff") is not None else plain_flags
    flags = {**common_flags(options, float(version[0])), **output(remaining, options, len(words))}
    weights = {"decoder.adaptive_softmax.bias": torch.zeros(len(words) + len(Dictionary()))}
    for layer in (f"decoder.layers.{index}.self_attn" for index in range(options["decoder_layers"])):
        for part in ("weight", "bias"):
            if f"{layer}.in_proj_{part}" not in remaining:
                of_each = [remaining.take(f"{layer}.{letter}_proj.{part}") for letter in "qkv"]
                weights[f"{layer}.in_proj.{part}"] = torch.cat(of_each)
    if "decoder.embed_positions.weight" in remaining:  # the table begins with unused rows, up to the row of padding
        table = remaining.take("decoder.embed_positions.weight")
        weights["decoder.embed_positions.table.weight"] = table[Dictionary().pad() + 1 :]
    left_out = [name for name in ("decoder_layerdrop", "quant_noise_pq", "quant_noise_scalar") if options.get(name)]
    notes = [f"{flag(name)}, which the model was trained with, is left out" for name in left_out]
    return with_same_words(Conversion("fwp_lm", flags, {**weights, **remaining.rename(NAMES)}, words, notes), options)


def common_flags(options: Options, version: float) -> Settings:
    """Return sizes, dropouts, positions and length of a sample. version: of the decoder."""
    same = ("decoder_layers", "decoder_embed_dim", "decoder_ffn_embed_dim", "decoder_attention_heads", "dropout")
    switches = ("no_token_positional_embeddings", "decoder_learned_pos", "no_scale_embedding", "add_bos_token")
    before = bool(options.get("decoder_normalize_before"))
    # With checkpoints of its first versions, fairseq does not normalise after the last layer.
    no_final_norm = bool(options.get("no_decoder_final_norm")) or version <= 2
    return {
        **{name: options.get(name) for name in (*same, "attention_dropout", "max_target_positions")},
        **{name: bool(options.get(name)) for name in switches},
        "activation_dropout": options.get("activation_dropout") or options.get("relu_dropout", 0.0),
        "activation_fn": str(on_command_line(options.get("activation_fn"))),
        "decoder_update_rule": SOFTMAX,
        "attention_bias": True,
        "decoder_normalize_before": before,
        "no_decoder_final_norm": before and no_final_norm,
        "tokens_per_sample": options.get("tokens_per_sample", 1024),
    }


def plain_flags(tensors: Tensors, options: Options, words: int) -> Settings:
    """Return the flags of word embeddings and a softmax over all words. Takes the output if it is the embeddings."""
    if options.get("adaptive_input"):
        raise ValueError("--adaptive-input without --adaptive-softmax-cutoff cannot be converted: fwp_lm has only both")
    if not options.get("share_decoder_input_output_embed"):
        return {"output_layer": "untied"}
    for name in {"decoder.output_projection.weight", "decoder.embed_out"} & tensors.keys():
        own = "a checkpoint with --share-decoder-input-output-embed but an output of its own"
        tensors.take_equal(name, tensors["decoder.embed_tokens.weight"], own)
    return {"output_layer": "tied"}


def adaptive_flags(tensors: Tensors, options: Options, words: int) -> Settings:
    """Return the flags of an adaptive input with a softmax tied to it. Raises ValueError for any other adaptive one."""
    for name in ("adaptive_input", "tie_adaptive_weights", "tie_adaptive_proj"):
        reason = "in fwp_lm the output uses the word vectors and projections of the input"
        check(options.get(name), f"{flag(name)} must be on to convert an adaptive softmax, got off: {reason}")
    factor = float(options["adaptive_input_factor"])
    if factor != int(factor) or factor < 2:
        raise ValueError(f"--adaptive-input-factor must be a whole number of at least 2, got {factor:g}")
    # The last cutoff may be the number of all words.
    cutoffs = [cutoff for cutoff in options.numbers("adaptive_softmax_cutoff") if cutoff < words + len(Dictionary())]
    own, table = "an adaptive softmax of its own", "decoder.embed_tokens.embeddings.{}.{}.weight"
    tensors.take_equal("decoder.adaptive_softmax.head.word_proj.weight", tensors[table.format(0, 0)], own)
    for index in range(len(cutoffs)):
        for part, tied in ((0, 1), (2, 0)):
            name = f"decoder.adaptive_softmax.tail.{index}.{part}.weight"
            tensors.take_equal(name, tensors[table.format(index + 1, tied)], own)
    return {
        "output_layer": "tied",
        "adaptive_softmax_cutoff": ",".join(map(str, cutoffs)),
        "div_val": int(factor),
        "adaptive_softmax_dropout": options.get("adaptive_softmax_dropout", 0.0),
    }


def keep(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    arch = ARCH_MODEL_NAME_REGISTRY.get(options["arch"], options["arch"])
    defaults = {
        name: value for name, value in asdict(ARCH_MODEL_REGISTRY[arch].config()).items() if name not in OF_TASK
    }
    settings = {name: on_command_line(value) for name in defaults if (value := options.get(name)) is not None}
    flags = {name: value for name, value in settings.items() if value != defaults[name] and not name.startswith("_")}
    flags |= {name: options.get(name) for name in OF_TASK}
    conversion = Conversion(arch, flags, dict(tensors), words, [], read_line_start(options))
    return with_same_words(conversion, options)


def words_of_languages(checkpoint: Path, vocabulary: Path | None) -> dict[str, list[str]]:
    """The words of every language that has a dict.LANGUAGE.txt in a folder, None = that of the checkpoint."""
    folder = vocabulary or checkpoint.parent
    words = {path.name.split(".")[1]: read_words(path) for path in sorted(folder.glob("dict.*.txt"))}
    check(words, f"{folder} must hold dict.LANGUAGE.txt: give the folder of the training with --vocabulary")
    return words


def keep_translation(tensors: Mapping[str, Tensor], words: dict[str, list[str]], options: Options) -> Conversion:
    """Return the same model as `fwp_transformer`: the parameters have the same names."""
    for name, side in zip(LANGUAGES, ("encoder", "decoder"), strict=True):
        if (language := options.get(name)) is None:
            raise ValueError(f"the checkpoint names no languages: give {flag(name)}, one of {', '.join(words)}")
        if language not in words:
            raise ValueError(f"dict.{language}.txt is missing: give the folder that holds it with --vocabulary")
        check_vocabulary(tensors, len(words[language]), side, f"dict.{language}.txt", "the folder of the data")
    settings = FwpTransformerModel.complete(FwpTransformerModel.adopt(options))
    if linear_attentions(Namespace(**settings)):
        raise ValueError("all attentions to convert must be softmax, got linear attention in some places")
    flags = {name: on_command_line(value) for name, value in needed_flags(settings).items()}
    of_languages = {options[name]: words[options[name]] for name in LANGUAGES}
    return with_same_words(Conversion("fwp_transformer", flags, without_marks(tensors), of_languages, []), options)


def needed_flags(settings: Settings) -> Settings:
    """Return the options that give these settings. Raises ValueError for one that has no flag of fairseq-train."""
    parser = ArgumentParser()
    FwpTransformerModel.add_args(parser)
    flagged = vars(parser.parse_args([]))
    flags: Settings = {}
    for _ in range(2):  # options set others: the decoder's sizes default to the encoder's
        built = FwpTransformerModel.complete(flags)
        flags |= {name: value for name, value in settings.items() if value != built[name] and name in flagged}
    built = FwpTransformerModel.complete(flags)
    if lost := [name for name, value in settings.items() if value != built[name]]:
        raise ValueError(f"the checkpoint's {', '.join(lost)} cannot be converted: fairseq-train has no flag for it")
    return flags


def on_command_line(value: object) -> object:
    """Return an option as on the command line: an enumeration as its word, a list with commas."""
    value = word(value)
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


LM = Source(
    {},
    partial(read, models=["transformer_lm"], defaults=TransformerLanguageModelConfig()),
    convert_lm,
    dictionary_words,
)
FWP_LM = Source({}, read_ours, keep, dictionary_words)
TRANSLATION = Source(
    {name.replace("_", "-"): Option(str, "of fairseq-mt, where the checkpoint does not say it") for name in LANGUAGES},
    partial(read, models=TRANSLATION_MODELS),
    keep_translation,
    words_of_languages,
    "fwp_transformer",
)
