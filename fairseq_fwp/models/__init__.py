"""Registered models and architectures; importing this registers them with fairseq."""

from fairseq_fwp.models import fwp_lm, presets

__all__ = ["fwp_lm", "presets"]
