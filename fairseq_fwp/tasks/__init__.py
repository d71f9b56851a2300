"""Registered tasks; importing this registers them with fairseq."""

from fairseq_fwp.tasks import fwp_language_modeling, lines

__all__ = ["fwp_language_modeling", "lines"]
