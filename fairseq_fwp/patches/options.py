"""Options of models and tasks in fairseq's dataclasses, and their settings as text."""

from argparse import Namespace
from dataclasses import field, fields
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from omegaconf import DictConfig, OmegaConf

Settings: TypeAlias = dict[str, Any]  # of a model, a task or a file, by their names
Value = TypeVar("Value")


class Dataclass(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[Settings]


Options = TypeVar("Options", bound=Dataclass)


def option(default: Any, text: str, **metadata: object) -> Any:
    """Return a field with a default and its help text.

    same_function: whether trained weights compute the same function with every value.
    """
    return field(default=default, metadata={"help": text, **metadata})


def read_options(kind: type[Options], settings: object) -> Options:
    """Return a dataclass of options from settings that may have others too; options that they lack have defaults."""
    names = [each.name for each in fields(kind)]
    if isinstance(settings, DictConfig):  # which may have None for all names; fairseq's others find parts by name
        given = [name for name in names if name in settings]
    else:
        given = [name for name in names if hasattr(settings, name)]
    return kind(**{name: getattr(settings, name) for name in given})


def setting(settings: object, name: str, default: Value) -> Value:
    """Return a setting that only some models, tasks or versions of them have; the default where it is missing."""
    return getattr(settings, name, default)


def word(value: object) -> object:
    """Return the word of an enumeration, and any other value as it is."""
    return value.value if isinstance(value, Enum) else value


def plain(settings: Any) -> Settings:
    """Return the settings of a model by name, enumerations as their words."""
    if isinstance(settings, Namespace):
        return dict(vars(settings))
    return dict(OmegaConf.to_container(settings, resolve=True, enum_to_str=True))


def flag(name: str) -> str:
    """Return the flag of an option."""
    return f"--{name.replace('_', '-')}"


def as_given(name: str, value: Any) -> str:
    """Return an option as on the command line."""
    if value is None or value is False:
        return f"no {flag(name)}"
    return flag(name) if value is True else f"{flag(name)} {value}"
