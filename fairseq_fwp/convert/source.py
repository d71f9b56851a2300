"""A source of checkpoints: its options, and the conversion of its tensors."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Words of a language model, or of each language in translation.
Words = list[str] | dict[str, list[str]]


class Option(NamedTuple):
    """An option of the source's training script: its type (bool: a flag) and its help text."""

    type: Callable[[str], Any]
    help: str


class Conversion(NamedTuple):
    """A converted checkpoint.

    flags: of `fairseq-train`, by field of the configuration; weights: by the names of our model;
    words: of the dictionary, after fairseq's special symbols; of translation by language, the source language first;
    notes: sentences for users of the model.
    """

    arch: str
    flags: dict[str, Any]
    weights: dict[str, Tensor]
    words: Words
    notes: list[str]


class Source(NamedTuple):
    """One kind of checkpoint.

    options: by their names in the training script.
    read: path -> tensors, and the options saved with them.
    convert: (tensors, words, options) -> `Conversion`; given options override saved ones.
    words: (path, given) -> the vocabulary, from the given file or else from files next to the checkpoint.
    """

    options: dict[str, Option]
    read: Callable[[Path], tuple[Mapping[str, Tensor], dict[str, Any]]]
    convert: Callable[[Mapping[str, Tensor], Any, "Options"], Conversion]
    words: Callable[[Path, Path | None], Words]


class Options:
    """The options of a conversion: given on the command line, or else saved with the checkpoint."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def get(self, name: str, default: Any = None) -> Any:
        """The option's value, or the default."""
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """The option's value. Raises ValueError if it is neither given nor saved."""
        if self.values.get(name) is None:
            raise ValueError(
                f"--{name} must be given, as in training: neither the state dict nor a log.txt next to it has it"
            )
        return self.values[name]


class Entry(NamedTuple):
    """A line of a conversion table: the parameter `target` is build(*sources); without a target, build only checks."""

    target: str | None
    sources: tuple[str, ...]
    build: Callable[..., Any] = lambda tensor: tensor


def convert_tensors(table: Iterable[Entry], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return every target of the table.

    Raises ValueError that names missing tensors, tensors that no entry reads, and tensors of integers.
    """
    table = list(table)
    known = {name for entry in table for name in entry.sources}
    faults = [
        f"{what} {', '.join(sorted(names))}"
        for what, names in (("lacks", known - tensors.keys()), ("has also", tensors.keys() - known))
        if names
    ]
    if faults:
        raise ValueError(
            f"the state dict does not fit a model with these options: it {' and '.join(faults)}; check the options"
        )
    for name in (name for entry in table if entry.target is not None for name in entry.sources):
        if not tensors[name].is_floating_point():
            raise ValueError(
                f"{name} must be floating-point, got {tensors[name].dtype}: quantised weights cannot be converted"
            )
    built = {entry.target: entry.build(*(tensors[name] for name in entry.sources)) for entry in table}
    return {target: tensor for target, tensor in built.items() if target is not None}


def whole_numbers(option: str, text: Any) -> list[int]:
    """The comma-separated numbers of an option. Raises ValueError for other text."""
    try:
        return [int(number) for number in str(text).split(",")]
    except ValueError:
        raise ValueError(f"{option} must be whole numbers such as 20000,40000, got {text!r}") from None


def check_equal(option: str) -> Callable[[Tensor, Tensor], None]:
    """A check that two tensors, which are one parameter here, are equal; its error begins with `option`."""

    def check(first: Tensor, second: Tensor) -> None:
        if not torch.equal(first, second):
            raise ValueError(
                f"{option} cannot be converted: after conversion input and output share one tensor, but the checkpoint "
                "has two that differ"
            )

    return check
