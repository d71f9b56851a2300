"""A text, its documents, and the windows that read it.

Shapes: N tokens of the text, B windows of a batch.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby, islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Text(NamedTuple):
    """A text to score.

    inputs (N,), tokens (N,): the model predicts tokens[i] after inputs[: i + 1];
    starts: the first token of each document, in order; by default the text is one document.
    """

    inputs: Tensor
    tokens: Tensor
    starts: tuple[int, ...] = (0,)

    @classmethod
    def after(cls, first: int, tokens: Tensor, starts: Iterable[int] = (0,)) -> "Text":
        """Return the text of tokens (N,), read after the token `first`, such as the end of a line."""
        return cls(torch.cat([tokens.new_tensor([first]), tokens[:-1]]), tokens, tuple(starts))

    def to(self, device: torch.device) -> "Text":
        """Return the text on a device."""
        return Text(self.inputs.to(device), self.tokens.to(device), self.starts)


class Window(NamedTuple):
    """A window: reads inputs[start:end] and scores tokens[first:end]."""

    start: int
    first: int
    end: int


def windows(length: int, size: int, context: int) -> Iterator[Window]:
    """Yield windows of `size` tokens that score all but their first `context` tokens: each of `length` tokens once.

    Blocks of size - context tokens are scored after `context` tokens, or after all earlier tokens if there are fewer,
    as by `fairseq-eval-lm --tokens-per-sample size --context-window context`. The blocks within the first `size` tokens
    are one window here, since later tokens change nothing. (With positions counted from the end of a sample they do.
    There Schlag's public code reads one window too.) context = size - 1 is the sliding window of Schlag et al. 2021,
    Sec. 6.3. context = 0 gives blocks without context. Windows do not share vectors: from the second layer on, vectors
    depend on where the window begins.
    """
    step = size - context
    window = Window(0, 0, min(size // step * step, length))
    while window.first < length:
        yield window
        window = Window(window.end - context, window.end, min(window.end + step, length))


def document_windows(text: Text, size: int, context: int) -> Iterator[Window]:
    """Yield the windows of each document of a text."""
    for start, end in pairwise([*text.starts, len(text.tokens)]):
        for window in windows(end - start, size, context):
            yield Window(*(start + place for place in window))


def batches(windows: Iterable[Window], size: int) -> Iterator[list[Window]]:
    """Yield up to `size` consecutive windows that read and score the same numbers of tokens."""
    for _, alike in groupby(windows, lambda window: (window.end - window.start, window.end - window.first)):
        while batch := list(islice(alike, size)):
            yield batch
