"""Checkpoints from elsewhere as fairseq's: one line of `SOURCES` each, and of `TARGETS` for the way back.

See cli/convert.py.
"""

import os
from collections.abc import Callable
from pathlib import Path

from fairseq_fwp.checkpoints.convert import (
    checkpoint,
    conversion,
    fairseq,
    fla,
    folder,
    gpt2,
    llama,
    schlag,
    transformer_xl,
)
from fairseq_fwp.checkpoints.pretrained.model import PretrainedModel
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings

SOURCES = {
    "schlag-lm": schlag.SOURCE,
    "transformer-xl": transformer_xl.SOURCE,
    "fairseq-lm": fairseq.LM,
    "fairseq-mt": fairseq.TRANSLATION,
    "gpt2": gpt2.SOURCE,
    "llama": llama.SOURCE,
    "fla": fla.SOURCE,
    "fwp-lm": fairseq.FWP_LM,
}

TARGETS: dict[str, Callable[[conversion.Conversion, Path], None]] = {
    "fairseq": checkpoint.write,
    "safetensors": folder.write_model,
    "fla": fla.write,
}


def load(
    path: str | os.PathLike[str], dictionary: str | os.PathLike[str] | None, source: str, options: Settings
) -> PretrainedModel:
    """Load a language model that other code has trained, converted in memory: see `fairseq_fwp.load`."""
    check(source in SOURCES, f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    kind = SOURCES[source]
    given = {name: kind.option(name, value) for name, value in options.items() if value is not None}
    tensors, settings = kind.read(Path(path))
    words = kind.words(Path(path), None if dictionary is None else Path(dictionary))
    converted = kind.convert(tensors, words, conversion.Options({**settings, **given}))
    check(isinstance(converted.words, list), f"{path} must be a language model, got {converted.arch}: translation")
    model = checkpoint.build_converted(converted).float()
    return PretrainedModel(model, converted.line_start, converted.flags.get("add_bos_token"))


__all__ = ["SOURCES", "TARGETS", "load"]
