"""Registered criterions; importing this registers them with fairseq."""

from fairseq_fwp.criterions import fwp_distillation

__all__ = ["fwp_distillation"]
