"""Preprocessed texts: a damaged text, or an index that does not fit it, is an error before training starts."""

import contextlib
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

PREPROCESS = "run fairseq-preprocess again, or copy its folder again"
PART = 2**24  # words that are compared at once: a comparison needs a byte for each
Original = Callable[..., Any]


def refuse_damaged_data(make: Original) -> Any:
    """fairseq trains, without a message, on a text that is cut short, has a false index or another dictionary."""
    from fairseq.data import indexed_dataset

    def make_or_explain(path: str, *args: Any, dictionary: Any = None, **kwargs: Any) -> Any:
        text, index = indexed_dataset.data_file_path(path), indexed_dataset.index_file_path(path)
        if os.path.exists(index) and os.path.exists(text) and not os.path.getsize(text):
            raise ValueError(f"the text {text} must have at least one token, got none: preprocess another file")
        try:
            dataset = make(path, *args, dictionary=dictionary, **kwargs)
        except (AssertionError, KeyError, MemoryError, OverflowError, ValueError, struct.error) as error:
            if not os.path.exists(index):  # a text that is not binarised
                raise
            raise ValueError(
                f"{index} must be a complete index of a text, got a damaged or different file: {PREPROCESS}"
            ) from error
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

    return make_or_explain


def close_what_is_open(close: Original) -> Any:
    """A data set that could not be opened fails again when it is deleted, after the error that says why."""

    def close_if_open(self: Any) -> None:
        with contextlib.suppress(AttributeError):
            close(self)

    return close_if_open


def refuse_padding_in_text(encode_line: Original) -> Any:
    """fairseq reads a literal <pad> in a text as padding: it is not scored, and shifts the scores after it."""

    def encode_words(self: Any, line: str, *args: Any, **kwargs: Any) -> Any:
        numbers = encode_line(self, line, *args, **kwargs)
        if numbers.eq(getattr(self, "pad_index", -1)).any():
            raise ValueError(
                f"words of a text must not be {self.pad_word}, which fairseq reads as padding, got it in {line[:60]!r}"
            )
        return numbers

    return encode_words


def _check_index(path: str, size: int, dtype: Any, lengths: Any, places: Any, unit: int) -> None:
    """Raise ValueError for an index that cannot be true: its size, lengths, or places in multiples of a unit."""
    if (found := os.path.getsize(path)) != size:
        raise _false(path, f"{found:,} bytes where its sentences need {size:,}")
    if dtype.kind not in "iu":
        raise _false(path, f"words of the type {dtype}")
    if lengths.min(initial=0) < 0:
        raise _false(path, f"the length {lengths.min()}")
    if places[:1].any() or not np.array_equal(np.diff(places), lengths[: max(len(places) - 1, 0)] * np.int64(unit)):
        raise _false(path, "a place that is not the sum of the lengths before it")


def _false(path: str, found: str) -> ValueError:
    return ValueError(f"{path} must have the true length and place of each sentence, got {found}: {PREPROCESS}")


def _check_text(path: str, dtype: Any, lengths: Any, dictionary: Any, first: int = 0) -> None:
    """Raise ValueError for another size, for words outside the dictionary, which begins at `first`, and for padding."""
    found, expected = os.path.getsize(path), int(lengths.sum(dtype=np.int64)) * dtype.itemsize
    if found != expected:
        raise ValueError(
            f"{path} must have the {expected:,} bytes that its index counts, got {found:,}: it is truncated, or "
            f"belongs to another index; {PREPROCESS}"
        )
    words = np.memmap(path, dtype, mode="r")
    low, high = int(words.min()) - first, int(words.max()) - first
    if low < 0 or (dictionary is not None and high >= len(dictionary)):
        limit = "" if dictionary is None else f" below {len(dictionary):,}, the size of the dictionary next to it"
        raise ValueError(
            f"words in {path} must have numbers from 0{limit}, got {high if low >= 0 else low:,}: the text was "
            f"preprocessed with another dictionary; {PREPROCESS}"
        )
    pad, parts = first + getattr(dictionary, "pad_index", -1), range(0, len(words), PART)
    if dictionary is not None and (pads := sum(np.count_nonzero(words[i : i + PART] == pad) for i in parts)):
        raise ValueError(
            f"words in {path} must not be {dictionary.pad_word}, which fairseq reads as padding, got {pads:,} of them: "
            "remove them from the text, and run fairseq-preprocess again"
        )
