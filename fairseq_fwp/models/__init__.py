"""Registered models and architectures; importing this registers them with fairseq."""

import fairseq  # noqa: F401  (first: its import registers everything, which must not begin within a file of a model)

from fairseq_fwp.models import fwp_lm, fwp_transformer, fwp_xl_lm, presets

__all__ = ["fwp_lm", "fwp_transformer", "fwp_xl_lm", "presets"]
