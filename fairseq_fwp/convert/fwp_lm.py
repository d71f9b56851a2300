"""Checkpoints of `fwp_lm` itself, to convert their softmax attention."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_fwp.convert.fairseq_lm import check_model, fill_in, read_checkpoint
from fairseq_fwp.convert.source import Conversion, Options, Source
from fairseq_fwp.convert.vocabulary import dictionary_words
from fairseq_fwp.models.fwp_lm import FwpLanguageModelConfig

# Settings of the task that the model reads.
OF_TASK = ("tokens_per_sample", "max_target_positions", "add_bos_token")


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and the settings of a checkpoint. Raises ValueError for any other file."""
    tensors, settings, name = read_checkpoint(path)
    check_model(path, name, ["fwp_lm"])
    return tensors, fill_in(settings, FwpLanguageModelConfig())


def convert(tensors: Mapping[str, Tensor], words: list[str], options: Options) -> Conversion:
    """The same model, see `Source`."""
    known = {name: value for name, value in asdict(FwpLanguageModelConfig()).items() if name not in OF_TASK}
    settings = {name: getattr(value, "value", value) for name in known if (value := options.get(name)) is not None}
    flags = {name: value for name, value in settings.items() if value != known[name] and not name.startswith("_")}
    flags |= {name: options.get(name) for name in OF_TASK}
    return Conversion("fwp_lm", flags, dict(tensors), words, [])


SOURCE = Source({}, read, convert, dictionary_words)
