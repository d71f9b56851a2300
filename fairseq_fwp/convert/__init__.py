"""Checkpoints from elsewhere as fairseq's: one line of `SOURCES` each. See cli/convert.py.

linearize.py replaces softmax attention by another attention.
"""

from fairseq_fwp.convert import fairseq, gpt2, schlag, transformer_xl

SOURCES = {
    "schlag-lm": schlag.SOURCE,
    "transformer-xl": transformer_xl.SOURCE,
    "fairseq-lm": fairseq.LM,
    "fairseq-mt": fairseq.TRANSLATION,
    "gpt2": gpt2.SOURCE,
    "fwp-lm": fairseq.FWP_LM,
}

__all__ = ["SOURCES"]
