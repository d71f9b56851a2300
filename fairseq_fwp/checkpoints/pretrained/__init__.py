"""Checkpoints of this package: `read` reads them for every command, `load` gives a language model as a module.

A folder with config.json, model.safetensors and dict.txt stands for a checkpoint. No data set and no command is needed.
"""

import os
from argparse import Namespace
from pathlib import Path

from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from fairseq_fwp.checkpoints.pretrained import folder
from fairseq_fwp.checkpoints.pretrained.checkpoint import build_filled, read
from fairseq_fwp.checkpoints.pretrained.dictionary import check_words, dictionary_words, make_dictionary
from fairseq_fwp.checkpoints.pretrained.model import PretrainedModel
from fairseq_fwp.models.language_model import LanguageModel
from fairseq_fwp.modules.decoding import STARTS
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.hooks import KEY, take_fingerprints
from fairseq_fwp.patches.options import Settings, word
from fairseq_fwp.patches.words import find_codes

# The language models of this package.
OURS = ("fwp_lm", "fwp_xl_lm", "fwp_fwl_lm")
# Settings of the task that a language model reads, with fairseq's defaults.
OF_TASK = {"tokens_per_sample": 1024, "max_target_positions": None, "add_bos_token": False}


def load(path: str | os.PathLike[str], dictionary: str | os.PathLike[str] | None = None) -> PretrainedModel:
    """Load a language model of this package, in evaluation mode, float32, on the CPU: see `fairseq_fwp.load`."""
    weights, settings = read_ours(Path(path))
    words = dictionary_words(Path(path), None if dictionary is None else Path(dictionary))
    model = build_model(weights, settings, words).float()
    codes = find_codes(Path(path if dictionary is None else dictionary))
    return PretrainedModel(model, read_line_start(settings), settings.get("add_bos_token"), codes)


def read_ours(path: Path) -> tuple[dict[str, Tensor], Settings]:
    """Return the weights and settings of a language model of this package, from a checkpoint or a folder.

    Raises ValueError for anything else.
    """
    if not path.is_dir():
        checkpoint = read(path)
        checkpoint.check_model(OURS)
        return checkpoint.weights, checkpoint.options
    weights, config = folder.read(path, "this package", ["vocab_size"], by_index=True)
    if (arch := config.get("model_type")) not in OURS:
        raise ValueError(f"model_type in {path / folder.CONFIG} must be {' or '.join(OURS)}, got {arch!r}")
    return weights, {**config, "arch": arch, KEY: take_fingerprints(config)}


def read_line_start(settings: Settings) -> str | None:
    """Return what the model reads first in each line, one of STARTS; None if its text was a stream."""
    start = word(settings.get("line_start"))
    check(start in (None, *STARTS), f"line_start in the settings must be {' or '.join(STARTS)}, got {start!r}")
    return None if start is None else str(start)


def build_model(weights: dict[str, Tensor], settings: Settings, words: list[str]) -> LanguageModel:
    """Return the language model of settings with these weights. Raises ValueError if they do not fit each other."""
    dictionary = make_dictionary(words)
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    check_words(task, settings[KEY])
    kind = ARCH_MODEL_REGISTRY[settings["arch"]]
    options = OmegaConf.structured(kind.config)
    saved = {name: settings[name] for name in options if settings.get(name) is not None}
    try:
        cfg = OmegaConf.merge(options, {**OF_TASK, **saved})
    except (OmegaConfBaseException, RecursionError) as error:
        raise ValueError(f"the settings of the model cannot be read: {str(error).splitlines()[0]}") from error
    model: LanguageModel = build_filled(lambda: kind.build_model(cfg, task), weights, saved)
    return model


__all__ = ["PretrainedModel", "load", "read"]
