"""A source of checkpoints: its options, and how its tensors become those of a model here."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Of a language model, or by language.
Words = list[str] | dict[str, list[str]]


class Option(NamedTuple):
    """An option of the source's training script: its type (bool: a flag), and what it says."""

    type: Callable[[str], Any]
    help: str


class Conversion(NamedTuple):
    """flags: of `fairseq-train`, by field of the configuration; weights: by the names of our model; words: of the
    dictionary, after fairseq's specials, and of translation by language, the source's first; notes: what whoever goes
    on with the model should know."""

    arch: str
    flags: dict[str, Any]
    weights: dict[str, Tensor]
    words: Words
    notes: list[str]


class Source(NamedTuple):
    """One kind of checkpoint.

    options: by name, as the training script has them; read(path) -> its tensors, and the options saved with it;
    convert(tensors, words, options) -> `Conversion`, where options are those given, else saved;
    words(path, given) -> the vocabulary, from the file given or else from what lies with the checkpoint.
    """

    options: dict[str, Option]
    read: Callable[[Path], tuple[Mapping[str, Tensor], dict[str, Any]]]
    convert: Callable[[Mapping[str, Tensor], Any, "Options"], Conversion]
    words: Callable[[Path, Path | None], Words]


class Options:
    """The options given and saved; what neither tells has the default of the call."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def get(self, name: str, default: Any = None) -> Any:
        """The option's value, or the default."""
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """The option's value. Raises ValueError where nobody tells it."""
        if self.values.get(name) is None:
            raise ValueError(
                f"the state dict does not tell --{name}: give it as in training, or lay the training's log.txt beside "
                "the checkpoint"
            )
        return self.values[name]


class Entry(NamedTuple):
    """target, a parameter of ours, is build(*the tensors named in sources); without a target, build only checks."""

    target: str | None
    sources: tuple[str, ...]
    build: Callable[..., Any] = lambda tensor: tensor


def convert_tensors(table: Iterable[Entry], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every target of the table.

    Raises ValueError naming tensors that are missing, those that no entry reads, and those that hold whole numbers.
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
            f"the state dict is not that of a model with these options: it {' and '.join(faults)}; check the options"
        )
    for name in (name for entry in table if entry.target is not None for name in entry.sources):
        if not tensors[name].is_floating_point():
            raise ValueError(f"{name} is of {tensors[name].dtype}: weights that were quantised cannot be converted")
    built = {entry.target: entry.build(*(tensors[name] for name in entry.sources)) for entry in table}
    return {target: tensor for target, tensor in built.items() if target is not None}


def whole_numbers(option: str, text: Any) -> list[int]:
    """The numbers of an option, which commas part. Raises ValueError for other text."""
    try:
        return [int(number) for number in str(text).split(",")]
    except ValueError:
        raise ValueError(f"{option} must be whole numbers such as 20000,40000, got {text!r}") from None


def check_equal(option: str) -> Callable[[Tensor, Tensor], None]:
    """A check that two tensors, one here, are alike; what is said if not begins with the option."""

    def check(first: Tensor, second: Tensor) -> None:
        if not torch.equal(first, second):
            raise ValueError(f"{option} cannot be converted: input and output are one here, and they differ there")

    return check
