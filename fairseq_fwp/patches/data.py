"""Data folders, settings, names and archives from others: read as data, never run as code, and refused if damaged."""

import ast
import contextlib
import os
import struct
import sys
import tarfile
from types import SimpleNamespace
from typing import Any

import numpy as np

from fairseq_fwp.patches.patch import patch

PREPROCESS = "run fairseq-preprocess again, or copy its folder again"
MOST = 2**20  # numbers, letters and bits of the value of an option
PART = 2**24  # words that are compared at once: a comparison needs a byte for each
INDEXED = "fairseq.data.indexed_dataset.MMapIndexedDataset"
OPTION = "the value of an option must be a number, a string, a list or a dictionary of them, got"
OVERWRITE = "#fairseq:overwrite"  # fairseq's mark of a word that replaces an earlier one
REMEDY = "write the value itself into the configuration"


@patch("fairseq.data.indexed_dataset.make_dataset")
def refuse_damaged_data(make, path, *args, dictionary=None, **kwargs):
    """Refuse a text that is cut short, or has a false index or another dictionary: fairseq trains on it silently."""
    from fairseq.data import indexed_dataset

    text, index = indexed_dataset.data_file_path(path), indexed_dataset.index_file_path(path)
    if os.path.exists(index) and os.path.exists(text) and not os.path.getsize(text):
        raise ValueError(f"the text {text} must have at least one token, got none: preprocess another file")
    try:
        dataset = make(path, *args, dictionary=dictionary, **kwargs)
    except (AssertionError, KeyError, MemoryError, OverflowError, ValueError, struct.error) as error:
        if not os.path.exists(index):  # a text that is not binarised
            raise
        got = f"a damaged or different file: {PREPROCESS}"
        raise ValueError(f"{index} must be a complete index of a text, got {got}") from error
    if isinstance(dataset, indexed_dataset.IndexedDataset):
        count, places, dtype = dataset._len, dataset.data_offsets, np.dtype(dataset.dtype)
        _check_index(index, 48 + 8 * (2 * count + 2 + dataset.s), dtype, dataset.sizes, places, 1)
        if dataset.element_size != dtype.itemsize or not np.array_equal(dataset.dim_offsets, np.arange(count + 1)):
            raise _false(index, "the form of other data than text")
        _check_text(text, dtype, dataset.sizes, dictionary, int(dataset.fix_lua_indexing))
        if dataset.supports_prefetch:
            dataset.prefetch(range(count))  # not every task does, and without it no sentence can be read
    elif isinstance(dataset, indexed_dataset.MMapIndexedDataset):
        dtype, places = np.dtype(dataset._index.dtype), dataset._index._pointers
        _check_index(index, 26 + 12 * len(places), dtype, dataset.sizes, places, dtype.itemsize)
        _check_text(text, dtype, dataset.sizes, dictionary)
    return dataset


def _check_index(path: str, size: int, dtype: Any, lengths: Any, places: Any, unit: int) -> None:
    """Raise ValueError for an index that cannot be true: its size, lengths, or places in multiples of a unit."""
    if (got := os.path.getsize(path)) != size:
        raise _false(path, f"{got:,} bytes where its sentences need {size:,}")
    if dtype.kind not in "iu":
        raise _false(path, f"words of the type {dtype}")
    if lengths.min(initial=0) < 0:
        raise _false(path, f"the length {lengths.min()}")
    if places[:1].any() or not np.array_equal(np.diff(places), lengths[: max(len(places) - 1, 0)] * np.int64(unit)):
        raise _false(path, "a place that is not the sum of the lengths before it")


def _false(path: str, got: str) -> ValueError:
    return ValueError(f"{path} must have the true length and place of each sentence, got {got}: {PREPROCESS}")


def _check_text(path: str, dtype: Any, lengths: Any, dictionary: Any, first: int = 0) -> None:
    """Raise ValueError for another size, for words outside the dictionary, which begins at `first`, and for padding."""
    size, expected = os.path.getsize(path), int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    if size != expected:
        got = f"{size:,}: it is truncated, or belongs to another index; {PREPROCESS}"
        raise ValueError(f"{path} must have the {expected:,} bytes that its index counts, got {got}")
    words = np.memmap(path, dtype, mode="r")
    low, high = int(words.min()) - first, int(words.max()) - first
    if low < 0 or (dictionary is not None and high >= len(dictionary)):
        limit = "" if dictionary is None else f" below {len(dictionary):,}, the size of the dictionary next to it"
        got = f"{high if low >= 0 else low:,}: the text was preprocessed with another dictionary; {PREPROCESS}"
        raise ValueError(f"words in {path} must have numbers from 0{limit}, got {got}")
    pad, parts = first + getattr(dictionary, "pad_index", -1), range(0, len(words), PART)
    if dictionary is not None and (pads := sum(np.count_nonzero(words[i : i + PART] == pad) for i in parts)):
        got = f"{pads:,} of them: remove them from the text, and run fairseq-preprocess again"
        raise ValueError(f"words in {path} must not be {dictionary.pad_word}, which is fairseq's padding, got {got}")


@patch("fairseq.data.Dictionary.encode_line")
def refuse_padding_in_text(encode_line, self, line, *args, **kwargs):
    """Refuse a literal `<pad>` in a text: fairseq takes it for padding, which shifts the scores after it."""
    numbers = encode_line(self, line, *args, **kwargs)
    if numbers.eq(getattr(self, "pad_index", -1)).any():
        got = f"it in {line[:60]!r}"
        raise ValueError(f"words of a text must not be {self.pad_word}, which fairseq reads as padding, got {got}")
    return numbers


@patch("fairseq.data.Dictionary._save")
def save_repeated_words(save, self, f, entries):
    """Save words that come again, such as RoBERTa's second `<s>`, as it reads them: fairseq refuses its own file."""
    seen = set(self.symbols[: self.nspecial])

    def marked():
        for word, number in entries:
            yield word, f"{number} {OVERWRITE}" if word in seen else number
            seen.add(word)

    return save(self, f, marked())


def check_file(path: str | os.PathLike[str], most: int | None = None) -> None:
    """Raise ValueError for a device or a pipe, which may never end, and for a file of more than `most` bytes.

    A path that leads nowhere or to a folder is left to the caller, who opens it.
    """
    if not os.path.exists(path) or os.path.isdir(path):
        return
    if not os.path.isfile(path):
        raise ValueError(f"{path} must be a regular file, got a device or a pipe: copy its content into a file")
    if most is not None and (size := os.path.getsize(path)) > most:
        raise ValueError(f"{path} must have at most {most:,} bytes, got {size:,}: it is another file")


@patch(f"{INDEXED}.Index.__del__")
@patch(f"{INDEXED}.__del__")
def close_what_is_open(close, self):
    """Close what is open: a data set that could not be opened fails again, after the error that says why."""
    with contextlib.suppress(AttributeError):
        close(self)


@patch("fairseq.data.fasta_dataset.FastaDataset._build_index")
def index_without_a_shell(build, self, path):
    """Index a FASTA file here: for a shell its name can be a command, and without a command `tqdm` there is no text."""
    from fairseq.data.fasta_dataset import fasta_file_path

    starts, sizes, place = list[int](), list[int](), 0
    with open(fasta_file_path(path), "rb") as file:
        for line in file:
            if line.startswith(b">"):
                starts.append(place)
                sizes.append(0)
            elif sizes:
                sizes[-1] += len(line.strip())
            place += len(line)
    return np.array(starts, np.int64), np.array(sizes, np.int64)


@patch("torch.hub.load", since="torch 2.4")
def ask_before_code_of_hub(load, *args, **kwargs):
    """Ask before code is run of a GitHub repository that a data folder names: torch 2.4 does not."""
    return load(*args, **{"trust_repo": "check", **kwargs})


@patch("fairseq.file_utils.tarfile")
def unpack_inside() -> None:
    """Unpack an archive into its folder only: fairseq unpacks wherever its names lead, such as `../.bashrc`."""
    import fairseq.file_utils

    fairseq.file_utils.tarfile = INSIDE


def open_inside(path: str, mode: str) -> tarfile.TarFile:
    """Open an archive. Raises ValueError if it has links, devices, or names of places outside its folder."""
    archive = tarfile.open(path, mode)  # type: ignore[call-overload]  # noqa: SIM115  (the caller closes it)
    for member in archive.getmembers():
        inside = not os.path.isabs(member.name) and ".." not in member.name.split("/")
        if not inside or not (member.isfile() or member.isdir()):
            got = f"{member.name!r}: it was not unpacked; unpack it yourself if you trust its source"
            raise ValueError(f"the archive {path} must have only files and folders below its own, got {got}")
    return archive


INSIDE = SimpleNamespace(open=open_inside)


@patch("fairseq.*.eval")
def evaluate_data_alone() -> None:
    """Evaluate lists, numbers and dictionaries only: fairseq runs some strings of checkpoints and data as code."""
    import fairseq.tasks  # noqa: F401  (and with it all models, criterions, optimizers and data sets)

    evaluating = ("fairseq.utils", "fairseq.models.", "fairseq.optim.", "fairseq.criterions.", "fairseq.data.")
    for name, module in list(sys.modules.items()):
        if name.startswith(evaluating):
            module.eval = evaluate  # type: ignore[attr-defined]  # a module's own name comes before Python's


def evaluate(text: str) -> Any:
    """Return the value of numbers, strings, lists, tuples and dictionaries, their sums and multiples: "[(512, 3)] * 4".

    Raises ValueError for anything else, and, as `eval`, TypeError for an argument that is not a string. fairseq uses
    the TypeError to find out whether an option has been evaluated.
    """
    if not isinstance(text, str):
        raise TypeError(f"the argument of evaluate must be a string, got {type(text).__name__}")
    try:
        if len(text) > MOST:
            raise _too_long(text)
        return Evaluation().value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise ValueError(f"{OPTION} {text[:80]!r}: {REMEDY}") from error


class Evaluation:
    """One evaluation of a text: sums and products have room for `MOST` numbers, letters and bits, all together."""

    room = MOST

    def value(self, node: ast.AST) -> Any:
        """Return the value of a part of the text. Raises ValueError for code, and without room."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Tuple() | ast.List():
                return (tuple if isinstance(node, ast.Tuple) else list)(map(self.value, node.elts))
            case ast.Dict() if None not in node.keys:
                return dict(zip(map(self.value, filter(None, node.keys)), map(self.value, node.values), strict=True))
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(node.operand)
            case ast.BinOp(op=ast.Add() | ast.Mult() as operation):
                left, right = self.value(node.left), self.value(node.right)
                times = next((x for x in (left, right) if type(x) is int), 0)
                repeats = isinstance(operation, ast.Mult) and not all(isinstance(x, int | float) for x in (left, right))
                self.room -= (_size(left) + _size(right)) * (max(times, 1) if repeats else 1)
                if self.room < 0:
                    raise _too_long(ast.unparse(node))
                return left * right if isinstance(operation, ast.Mult) else left + right
        raise ValueError(f"{OPTION} the code {ast.unparse(node)!r}, which is not run: {REMEDY}")


def _too_long(text: str) -> ValueError:
    return ValueError(
        f"the value of an option must have at most {MOST:,} numbers and letters, got {text[:80]!r}: {REMEDY}"
    )


def _size(value: Any) -> int:
    """Return how many numbers, letters and bits a value has."""
    match value:
        case dict():
            return 1 + sum(map(_size, [*value, *value.values()]))
        case list() | tuple():
            return 1 + sum(map(_size, value))
        case str() | bytes():
            return 1 + len(value)
    return 1 + value.bit_length() if isinstance(value, int) else 1
