"""What a conversion reads and gives: sources, their options and tensors, and the converted model."""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_fwp.checkpoints.pretrained.checkpoint import is_finite
from fairseq_fwp.checkpoints.pretrained.folder import CONFIG
from fairseq_fwp.ops.arguments import DTYPES
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings, flag

# Words of a language model, or of each language in translation.
Words = list[str] | dict[str, list[str]]


class Option(NamedTuple):
    """An option of the command, such as one of the source's training script. type: bool for a flag."""

    type: Callable[[str], object]
    help: str
    metavar: str = "X"


class Conversion(NamedTuple):
    """A converted checkpoint.

    flags: of `fairseq-train`, by field of the configuration; weights: by the names of our model;
    words: of the dictionary, after fairseq's special symbols; of translation by language, the source language first;
    notes: sentences for users of the model;
    line_start: what a model of separate lines reads first, as in decoding.py; None: the text is a stream.
    """

    arch: str
    flags: Settings
    weights: dict[str, Tensor]
    words: Words
    notes: list[str]
    line_start: str | None = None


class Source(NamedTuple):
    """One kind of checkpoint.

    options: by their names on the command line, or in the training script.
    read: path -> tensors, and the options saved with them.
    convert: (tensors, words, options) -> `Conversion`; it raises ValueError that names what cannot be represented.
    words: (path, vocabulary) -> the words, from the file `vocabulary` or else from files next to the checkpoint.
    arch: the model whose attention can be converted.
    """

    options: dict[str, Option]
    read: Callable[[Path], tuple[Mapping[str, Tensor], Settings]]
    convert: Callable[[Mapping[str, Tensor], Any, "Options"], Conversion]
    words: Callable[[Path, Path | None], Words]
    arch: str = "fwp_lm"

    def option(self, name: str, value: object) -> object:
        """Return an option's value, as the command line gives it. Raises ValueError for one that it cannot have."""
        known = {option.replace("-", "_"): kind for option, kind in self.options.items()}
        among = f"among {', '.join(known)}" if known else "left out with this source"
        check(name in known, f"options must be {among}, got {name}")
        kind = known[name].type
        try:
            check(kind is not bool or isinstance(value, bool), "it is true or false")
            return value if kind is bool or isinstance(value, int) else kind(str(value))
        except (ArgumentTypeError, ValueError) as error:
            raise ValueError(f"{name} must be a value of this option, got {value!r}: {error}") from error


class Options(Settings):
    """The known options of a conversion: given on the command line, or else saved with the checkpoint."""

    def __init__(self, values: Settings) -> None:
        super().__init__({name: value for name, value in values.items() if value is not None})

    def need(self, name: str) -> Any:
        """The option's value. Raises ValueError if it is neither given nor saved."""
        if name not in self:
            raise ValueError(f"--{name} must be given, as in training: neither the state dict nor its log.txt has it")
        return self[name]

    def numbers(self, name: str) -> list[int]:
        """The comma-separated numbers of an option. Raises ValueError for other text."""
        try:
            return [int(number) for number in str(self[name]).split(",")]
        except ValueError:
            raise ValueError(f"{flag(name)} must be whole numbers such as 20000,40000, got {self[name]!r}") from None


class Tensors(dict[str, Tensor]):
    """The tensors of a source without a place in our model yet: each is taken once. ValueErrors name the wrong ones."""

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(f"the state dict does not fit a model with these options: it lacks {name}; check the options")

    def take(self, name: str) -> Tensor:
        """Remove a tensor and return it."""
        tensor, quantised = self[name], "quantised weights, as those of 8 bits, cannot be converted"
        check(tensor.dtype in DTYPES, f"{name} must be floating-point, got {tensor.dtype}: {quantised}")
        check(is_finite(tensor), f"{name} must have finite numbers, got NaN or infinity: its training has failed")
        del self[name]
        return tensor

    def take_rows(self, name: str, rows: int) -> Tensor:
        """Take a tensor. Raises ValueError if it has another number of rows, or nothing in them."""
        tensor = self.take(name)
        fits = tensor.shape[:1] == (rows,) and tensor.numel()
        check(fits, f"{name} must have {rows} rows as {CONFIG} says, got {tuple(tensor.shape)}")
        return tensor

    def join(self, ours: str, theirs: Mapping[str, int]) -> Tensor:
        """Take the tensors that ours joins, with their numbers of rows. Raises ValueError if they do not fit."""
        parts = [self.take_rows(name, rows) for name, rows in theirs.items()]
        got = ", ".join(f"{name} {tuple(part.shape)}" for name, part in zip(theirs, parts, strict=True))
        of_one_shape = len({part.shape[1:] for part in parts}) == 1
        check(of_one_shape, f"the parts of {ours} must have rows of one shape, got {got}")
        return torch.cat(parts) if len(parts) > 1 else parts[0]  # without a second copy of a large model

    def numbered(self, name: str) -> list[str]:
        """Return the names that have numbers from 0 on in the braces of `name`, such as tables.{}.weight."""
        return list(takewhile(self.__contains__, map(name.format, count())))

    def take_numbered(self, name: str) -> list[Tensor]:
        """Take all tensors of a name with numbers, see `numbered`; at least the first must be there."""
        return [self.take(numbered) for numbered in self.numbered(name) or [name.format(0)]]

    def take_equal(self, name: str, expected: Tensor, option: str) -> None:
        """Take a tensor that is one parameter here with another. Raises ValueError about `option` if they differ."""
        shared = "after conversion input and output share one tensor, but the checkpoint has two that differ"
        check(torch.equal(self.take(name), expected), f"{option} cannot be converted: {shared}")

    def rename(self, table: Mapping[str, str]) -> dict[str, Tensor]:
        """Take all tensors, each by our name. table: patterns of how their names begin -> how ours begin."""
        renamed = {}
        for name in list(self):
            for theirs, ours in table.items():
                if re.match(theirs, name):
                    renamed[re.sub(f"^{theirs}", ours, name)] = self.take(name)
                    break
        more = ", ".join(sorted(self))
        check(not self, f"the state dict does not fit these options: it has also {more}; check the options")
        return renamed
