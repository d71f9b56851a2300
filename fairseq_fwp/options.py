"""Options of models and tasks in fairseq's dataclasses, and their settings as text."""

from argparse import Namespace
from dataclasses import field
from typing import Any

from omegaconf import OmegaConf


def option(default: Any, text: str, **metadata: Any) -> Any:
    """Return a field with a default and its help text.

    same_function: whether trained weights compute the same function with every value.
    """
    return field(default=default, metadata={"help": text, **metadata})


def plain(settings: Any) -> dict[str, Any]:
    """Return the settings of a model by name, enumerations as their words."""
    if isinstance(settings, Namespace):
        return dict(vars(settings))
    return dict(OmegaConf.to_container(settings, resolve=True, enum_to_str=True))


def as_given(name: str, value: Any) -> str:
    """Return an option as on the command line."""
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return f"no {flag}"
    return flag if value is True else f"{flag} {value}"
