"""Registered models and architectures; importing this registers them with fairseq."""

from fairseq_fwp.models import (
    fwp_associative_retrieval,
    fwp_fwl_lm,
    fwp_lm,
    fwp_transformer,
    fwp_xl_lm,
    presets,
    retrieval_presets,
)

__all__ = [
    "fwp_associative_retrieval",
    "fwp_fwl_lm",
    "fwp_lm",
    "fwp_transformer",
    "fwp_xl_lm",
    "presets",
    "retrieval_presets",
]
