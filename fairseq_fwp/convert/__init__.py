"""Checkpoints from elsewhere as fairseq's: one file for each source, and one line in `SOURCES`. See cli/convert.py."""

from fairseq_fwp.convert import schlag_lm, transformer_xl

SOURCES = {"schlag-lm": schlag_lm.SOURCE, "transformer-xl": transformer_xl.SOURCE}

__all__ = ["SOURCES"]
