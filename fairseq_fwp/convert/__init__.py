"""Checkpoints from elsewhere as fairseq's: one file for each source, and one line in `SOURCES`. See cli/convert.py.

swap.py replaces softmax attention by another attention, and swap_translation.py does so in translation models.
"""

from fairseq_fwp.convert import fairseq_lm, fairseq_mt, fwp_lm, gpt2, schlag_lm, transformer_xl

SOURCES = {
    "schlag-lm": schlag_lm.SOURCE,
    "transformer-xl": transformer_xl.SOURCE,
    "fairseq-lm": fairseq_lm.SOURCE,
    "fairseq-mt": fairseq_mt.SOURCE,
    "gpt2": gpt2.SOURCE,
    "fwp-lm": fwp_lm.SOURCE,
}

__all__ = ["SOURCES"]
