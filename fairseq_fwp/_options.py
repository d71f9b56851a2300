"""An option of a model or a task, as fairseq's dataclasses have them."""

from dataclasses import field
from typing import Any


def option(default: Any, text: str) -> Any:
    """A field with a default and its help text."""
    return field(default=default, metadata={"help": text})
