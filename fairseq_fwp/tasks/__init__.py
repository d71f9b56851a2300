"""Registered tasks; importing this registers them with fairseq."""

from fairseq_fwp.tasks import fwp_associative_retrieval, fwp_language_modeling, fwp_sequence_problems

__all__ = ["fwp_associative_retrieval", "fwp_language_modeling", "fwp_sequence_problems"]
