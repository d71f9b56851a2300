"""Preprocessed texts: a damaged text is an error before training starts."""

import contextlib
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

PREPROCESS = "run fairseq-preprocess again, or copy its folder again"
Original = Callable[..., Any]


def refuse_damaged_data(make: Original) -> Any:
    """fairseq starts to train, without a message, on a text cut short or preprocessed with another dictionary."""
    from fairseq.data import indexed_dataset

    def make_or_explain(path: str, *args: Any, dictionary: Any = None, **kwargs: Any) -> Any:
        text, index = indexed_dataset.data_file_path(path), indexed_dataset.index_file_path(path)
        if os.path.exists(index) and os.path.exists(text) and not os.path.getsize(text):
            raise ValueError(f"the text {text} must have at least one token, got none: preprocess another file")
        try:
            dataset = make(path, *args, dictionary=dictionary, **kwargs)
        except (AssertionError, KeyError, ValueError, struct.error) as error:
            raise ValueError(
                f"{index} must be a complete index of a text, got a damaged or different file: {PREPROCESS}"
            ) from error
        if isinstance(dataset, indexed_dataset.MMapIndexedDataset):
            _check_text(text, dataset, dictionary)
        return dataset

    return make_or_explain


def close_what_is_open(close: Original) -> Any:
    """A data set that could not be opened fails again when it is deleted, after the error that says why."""

    def close_if_open(self: Any) -> None:
        with contextlib.suppress(AttributeError):
            close(self)

    return close_if_open


def _check_text(path: str, dataset: Any, dictionary: Any) -> None:
    dtype = np.dtype(dataset._index.dtype)
    found, expected = os.path.getsize(path), int(dataset.sizes.sum(dtype=np.int64)) * dtype.itemsize
    if found != expected:
        raise ValueError(
            f"{path} must have the {expected:,} bytes that its index counts, got {found:,}: it is truncated, or "
            f"belongs to another index; {PREPROCESS}"
        )
    largest = int(np.frombuffer(dataset._bin_buffer, dtype).max(initial=0))
    if dictionary is not None and largest >= len(dictionary):
        raise ValueError(
            f"words in {path} must have numbers below {len(dictionary):,}, the size of the dictionary next to it, got "
            f"{largest:,}: the text was preprocessed with another dictionary; {PREPROCESS}"
        )
