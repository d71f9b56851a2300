"""Checks of arguments, whose errors say in one sentence what is wrong."""

from collections.abc import Mapping
from typing import TypeVar


def check(condition: object, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


Entry = TypeVar("Entry")


def look_up(kind: str, name: str, table: Mapping[str, Entry], besides: str = "") -> Entry:
    """Return the entry of that name. Raises ValueError for an unknown name, with the kind of entry and all names.

    besides: words for further choices in the error.
    """
    if name not in table:
        known = f"{besides}one of {', '.join(table)}"
        raise ValueError(f"the {kind} must be {known}, got {name!r}: if a plug-in has it, give that plug-in")
    return table[name]
