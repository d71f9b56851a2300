"""Checkpoints from elsewhere as fairseq's: one line of `SOURCES` each, and of `TARGETS` for the way back.

See cli/convert.py.

linearize.py replaces softmax attention by another attention.
"""

from collections.abc import Callable
from pathlib import Path

from fairseq_fwp.convert import checkpoint, conversion, fairseq, fla, folder, gpt2, schlag, transformer_xl

SOURCES = {
    "schlag-lm": schlag.SOURCE,
    "transformer-xl": transformer_xl.SOURCE,
    "fairseq-lm": fairseq.LM,
    "fairseq-mt": fairseq.TRANSLATION,
    "gpt2": gpt2.SOURCE,
    "fla": fla.SOURCE,
    "fwp-lm": fairseq.FWP_LM,
}

TARGETS: dict[str, Callable[[conversion.Conversion, Path], None]] = {
    "fairseq": checkpoint.write,
    "safetensors": folder.write_model,
    "fla": fla.write,
}

__all__ = ["SOURCES", "TARGETS"]
