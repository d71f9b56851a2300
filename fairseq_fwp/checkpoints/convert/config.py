"""The settings in config.json of transformers' folders: checks before a conversion, and a note about the others."""

from collections.abc import Callable, Collection, Mapping
from sys import float_info
from typing import NamedTuple, TypeAlias, TypeGuard, TypeVar

from fairseq_fwp.checkpoints.pretrained.folder import CONFIG
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings

# Of a setting the only value that can be converted, and what the model does with another value.
Expected: TypeAlias = Mapping[str, tuple[object, str]]
Entry = TypeVar("Entry")

# Of every model.
GENERAL: Expected = {
    "is_causal": (True, "its tokens see later ones"),
    "quantization_config": (None, "its weights are quantised"),
    "text_config": (None, "its language model is a part of another model"),
}


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number; true is none."""
    return type(value) in (int, float)


class Kind(NamedTuple):
    """What settings must be unless they are left out: in words for errors, and whether a value is that."""

    words: str
    fits: Callable[[object], bool]


WHOLE = Kind("a whole number of at least 1", lambda value: type(value) is int and value >= 1)
POSITIVE = Kind("a number above 0", lambda value: is_number(value) and 0 < value <= float_info.max)
SWITCH = Kind("true or false", lambda value: type(value) is bool)


def look_up(config: Settings, name: str, table: Mapping[str, Entry]) -> Entry:
    """Return the entry that a setting names. Raises ValueError for another value."""
    value = config.get(name)
    known = isinstance(value, str) and value in table
    check(known, f"{name} in {CONFIG} must be one of {', '.join(table)}, got {value!r}: no other can be loaded")
    return table[str(value)]


def check_expected(config: Settings, expected: Expected) -> None:
    """Raise ValueError for a setting with another value than the one that can be converted."""
    for name, (value, reason) in {**GENERAL, **expected}.items():
        if config.get(name, value) != value:
            raise ValueError(f"{CONFIG} has {name} = {config[name]!r}, which cannot be converted: {reason}")


def check_kinds(config: Settings, kinds: Mapping[Kind, tuple[str, ...]]) -> None:
    """Raise ValueError for a setting, by the names of each kind, of another kind."""
    for kind, names in kinds.items():
        for name in names:
            value = config.get(name)
            check(value is None or kind.fits(value), f"{name} in {CONFIG} must be {kind.words}, got {value!r}")


def unread_note(config: Settings, known: Collection[str]) -> list[str]:
    """Return a sentence about the settings that are not known, if there are any."""
    others = ", ".join(sorted(config.keys() - known - GENERAL.keys()))
    return [f"{CONFIG} has settings that are not read: {others}; the model must not depend on them"] * bool(others)
