"""fairseq's `transformer` for translation, and `fwp_transformer` with softmax attention: as `fwp_transformer`.

The parameters have the same names in all of them. dict.LANGUAGE.txt of both languages lies next to the checkpoint, or
in a given folder such as the training data.
"""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_fwp.convert.fairseq_lm import check_model, check_vocabulary, read_checkpoint
from fairseq_fwp.convert.source import Conversion, Option, Options, Source
from fairseq_fwp.convert.vocabulary import read_dictionary
from fairseq_fwp.models.fwp_transformer import FwpTransformerModel, linear_attentions

MODELS = ("transformer", "fwp_transformer")
LANGUAGES = ("source_lang", "target_lang")

# fairseq saves these next to the weights: version numbers, and empty tensors that carry a dtype.
MARKS = r"(en|de)coder\.(version|.*\b_float_tensor)"


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and the settings of a checkpoint. Raises ValueError for any other file."""
    tensors, settings, name = read_checkpoint(path)
    check_model(path, name, MODELS)
    return tensors, {**settings, "arch": name}


def words(checkpoint: Path, given: Path | None) -> dict[str, list[str]]:
    """The words of every language that has a dictionary."""
    folder = given or checkpoint.parent
    found = {path.name.split(".")[1]: read_dictionary(path) for path in sorted(folder.glob("dict.*.txt"))}
    if not found:
        raise ValueError(
            f"{folder} must hold dict.LANGUAGE.txt: give the folder of the training data with --vocabulary"
        )
    return found


def convert(tensors: Mapping[str, Tensor], words: dict[str, list[str]], options: Options) -> Conversion:
    """The same model, see `Source`. Raises ValueError for a model that has linear attention already."""
    languages = [options.get(name) for name in LANGUAGES]
    for name, language in zip(LANGUAGES, languages, strict=True):
        if language is None:
            raise ValueError(f"the checkpoint does not name its languages: give --{name}, one of {', '.join(words)}")
        if language not in words:
            raise ValueError(f"dict.{language}.txt is missing: give the folder that holds it with --vocabulary")
    for side, language in zip(("encoder", "decoder"), languages, strict=True):
        of_training = "the folder of its training's data"
        check_vocabulary(tensors, len(words[language]), side, f"dict.{language}.txt", of_training)
    given = FwpTransformerModel.adopt(options.values)
    settings = FwpTransformerModel.complete(given)
    if linear_attentions(Namespace(**settings)):
        raise ValueError(
            "all attentions of the model must be softmax to be converted, got linear attention in some places"
        )
    flags = {name: plain(value) for name, value in needed_flags(settings).items()}
    kept = {name: tensor for name, tensor in tensors.items() if not re.fullmatch(MARKS, name)}
    return Conversion("fwp_transformer", flags, kept, {language: words[language] for language in languages}, [])


def needed_flags(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options that give these settings. Raises ValueError for a setting that has no flag of fairseq-train."""
    parser = ArgumentParser()
    FwpTransformerModel.add_args(parser)
    known = vars(parser.parse_args([]))
    flags: dict[str, Any] = {}
    for _ in range(2):  # options set others: the decoder's sizes default to the encoder's
        built = FwpTransformerModel.complete(flags)
        flags |= {name: value for name, value in settings.items() if value != built[name] and name in known}
    built = FwpTransformerModel.complete(flags)
    if lost := [name for name, value in settings.items() if value != built[name]]:
        raise ValueError(f"the checkpoint's {', '.join(lost)} cannot be converted: fairseq-train has no flag for it")
    return flags


def plain(value: Any) -> Any:
    """An option as on the command line: an enumeration as its word, a list with commas."""
    value = getattr(value, "value", value)
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


OPTIONS = {name: Option(str, "of fairseq-mt, where the checkpoint does not say it") for name in LANGUAGES}
SOURCE = Source(OPTIONS, read, convert, words)
