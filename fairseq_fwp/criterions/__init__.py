"""Registered criterions; importing this registers them with fairseq."""

from fairseq_fwp.criterions import fwp_squared_error

__all__ = ["fwp_squared_error"]
