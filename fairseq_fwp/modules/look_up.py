"""Look up a name in a table such as UPDATE_RULES or FEATURE_MAPS."""

from collections.abc import Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


def look_up(kind: str, name: str, table: Mapping[str, Entry], besides: str = "") -> Entry:
    """The entry of that name. Raises ValueError for another name, with the kind of what is looked for and all names.

    besides: words for what can be chosen besides the table's.
    """
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}: choose {besides}one of {', '.join(table)}")
    return table[name]
