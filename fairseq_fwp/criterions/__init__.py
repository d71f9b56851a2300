"""Registered criterions; importing this registers them with fairseq."""

from fairseq_fwp.criterions import fwp_distillation, fwp_squared_error

__all__ = ["fwp_distillation", "fwp_squared_error"]
