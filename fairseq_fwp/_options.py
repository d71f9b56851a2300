"""An option of a model or a task, as fairseq's dataclasses have them."""

from dataclasses import field
from typing import Any


def option(default: Any, text: str, **metadata: Any) -> Any:
    """A field with a default and its help text; metadata of attention: see models/attention_options.py.

    same_function: whether trained weights compute the same whatever its value.
    """
    return field(default=default, metadata={"help": text, **metadata})
