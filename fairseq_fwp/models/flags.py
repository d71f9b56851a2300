"""The page of all flags, from the fields of the options: `python -m fairseq_fwp.models.flags > docs/flags.md`."""

from collections.abc import Iterator
from dataclasses import Field, fields
from enum import Enum
from typing import Any

from fairseq_fwp.models.attention_options import AttentionOptions, MemoryOptions, flag, parts
from fairseq_fwp.models.decoder import DecoderConfig
from fairseq_fwp.models.fwp_associative_retrieval import FwpAssociativeRetrievalConfig
from fairseq_fwp.models.fwp_fwl_lm import FwpFwlLanguageModelConfig
from fairseq_fwp.models.fwp_lm import FwpLanguageModelConfig
from fairseq_fwp.models.fwp_transformer import FastWeightOptions
from fairseq_fwp.models.fwp_xl_lm import FwpXlLanguageModelConfig

HEAD = """# Flags of the models

Made from the options' fields by `python -m fairseq_fwp.models.flags`. *Of*: what looks at the flag; elsewhere a
training warns that it has no effect. *Same function*: trained weights compute the same whatever its value; where
another flag differs from that of a checkpoint, a warning says so. Flags of tasks: `fairseq-train --task
fwp_language_modeling --help`.
"""
GROUPS: dict[str, type[Any]] = {
    "Maps, normalisations, backend (fwp_lm, fwp_fwl_lm, fwp_transformer, fwp_associative_retrieval)": MemoryOptions,
    "Attention (fwp_lm, fwp_fwl_lm, fwp_transformer)": AttentionOptions,
    "Every language model (fwp_lm, fwp_xl_lm, fwp_fwl_lm)": DecoderConfig,
    "fwp_lm and fwp_fwl_lm": FwpLanguageModelConfig,
    "fwp_xl_lm and fwp_fwl_lm": FwpXlLanguageModelConfig,
    "fwp_fwl_lm": FwpFwlLanguageModelConfig,
    "fwp_transformer, besides fairseq's own": FastWeightOptions,
    "fwp_associative_retrieval": FwpAssociativeRetrievalConfig,
}


def page() -> str:
    """Return docs/flags.md."""
    return "\n".join([HEAD, *(line for title, options in GROUPS.items() for line in section(title, options))])


def section(title: str, options: type[Any]) -> Iterator[str]:
    """Yield the lines of the options that a class adds to those of its bases."""
    yield from (f"## {title}", "", "| flag | default | what it is | of | same function |")
    yield "| --- | --- | --- | --- | --- |"
    own = (field for field in fields(options) if field.name in options.__annotations__)
    yield from (row(field) for field in own if "help" in field.metadata)
    yield ""


def row(field: Field) -> str:
    """Return the line of one option."""
    default = field.default.value if isinstance(field.default, Enum) else field.default
    shown = "on" if default is True else "" if default is None or default is False else f"`{default}`"
    of = ", ".join(part for part in parts(field) if part != "all")
    same = "yes" if field.metadata.get("same_function") else ""
    return f"| `{flag(field.name)}` | {shown} | {field.metadata['help']} | {of} | {same} |"


if __name__ == "__main__":
    print(page(), end="")
