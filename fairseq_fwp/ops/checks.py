"""Checks of arguments, whose errors say in one sentence what is wrong."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar


def check(condition: object, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


@contextmanager
def renaming(words: Mapping[str, str]) -> Iterator[None]:
    """Replace the `arguments` that a ValueError names by a user's words, such as the flags that set them."""
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"`(\w+)`", lambda name: words.get(name[1], name[0]), str(error))) from None


Entry = TypeVar("Entry")


def look_up(kind: str, name: str, table: Mapping[str, Entry], besides: str = "") -> Entry:
    """Return the entry of that name. Raises ValueError for an unknown name, with the kind of entry and all names.

    besides: words for further choices in the error.
    """
    if name not in table:
        known = f"{besides}one of {', '.join(table)}"
        raise ValueError(f"the {kind} must be {known}, got {name!r}: if a plug-in has it, give that plug-in")
    return table[name]
