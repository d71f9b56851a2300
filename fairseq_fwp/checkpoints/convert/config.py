"""The settings in config.json of transformers' folders: checks before a conversion, and a note about the others."""

from collections.abc import Callable, Collection, Mapping
from sys import float_info
from typing import TypeAlias, TypeGuard

from fairseq_fwp.checkpoints.pretrained.folder import CONFIG
from fairseq_fwp.patches.options import Settings

# Of a setting the only value that can be converted, and what the model does with another value.
Expected: TypeAlias = Mapping[str, tuple[object, str]]
# What settings must be unless they are left out: words for errors, whether a value is that, and their names.
Kinds: TypeAlias = Mapping[str, tuple[Callable[[object], bool], tuple[str, ...]]]


# Of every model.
GENERAL: Expected = {
    "is_causal": (True, "its tokens see later ones"),
    "quantization_config": (None, "its weights are quantised"),
    "text_config": (None, "its language model is a part of another model"),
}


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number; true is none."""
    return type(value) in (int, float)


WHOLE = "a whole number of at least 1"
POSITIVE = "a number above 0"
SWITCH = "true or false"
FITS: dict[str, Callable[[object], bool]] = {
    WHOLE: lambda value: type(value) is int and value >= 1,
    POSITIVE: lambda value: is_number(value) and 0 < value <= float_info.max,
    SWITCH: lambda value: type(value) is bool,
}


def check_expected(config: Settings, expected: Expected) -> None:
    """Raise ValueError for a setting with another value than the one that can be converted."""
    for name, (value, reason) in {**GENERAL, **expected}.items():
        if config.get(name, value) != value:
            raise ValueError(f"{CONFIG} has {name} = {config[name]!r}, which cannot be converted: {reason}")


def check_kinds(config: Settings, kinds: Kinds) -> None:
    """Raise ValueError for a setting of another kind."""
    for kind, (fits, names) in kinds.items():
        for name in names:
            value = config.get(name)
            if value is not None and not fits(value):
                raise ValueError(f"{name} in {CONFIG} must be {kind}, got {value!r}")


def names_in(kinds: Kinds) -> set[str]:
    """Return the names of the settings of all kinds."""
    return {name for _, names in kinds.values() for name in names}


def unread_note(config: Settings, known: Collection[str]) -> list[str]:
    """Return a sentence about the settings that are not known, if there are any."""
    others = ", ".join(sorted(config.keys() - known - GENERAL.keys()))
    return [f"{CONFIG} has settings that are not read: {others}; the model must not depend on them"] * bool(others)
