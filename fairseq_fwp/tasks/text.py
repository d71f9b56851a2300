"""A text cut into blocks: each token is the target of exactly one block."""

import os
from argparse import Namespace
from typing import Any

import numpy as np
import torch
from fairseq import utils
from fairseq.data import Dictionary, FairseqDataset, MonolingualDataset, data_utils
from torch import Tensor

from fairseq_fwp.modules.decoding import Sample

# Documents end with an empty line, as in fairseq's `--sample-break-mode complete_doc`.
BLANK_LINE = "blank-line"


def read_split(
    args: Namespace, dictionary: Dictionary, split: str, epoch: int, combine: bool
) -> tuple[str, FairseqDataset]:
    """Return the path, without its ending, and the lines of a split in an epoch; args: settings of the task.

    Raises FileNotFoundError where there is none.
    """
    paths = utils.split_paths(args.data)
    path = os.path.join(paths[(epoch - 1) % len(paths)], split)
    lines = data_utils.load_indexed_dataset(path, dictionary, args.dataset_impl, combine=combine)
    if lines is None:
        raise FileNotFoundError(
            f"{path}.bin, the text {split!r}, must exist: write it with fairseq-preprocess --only-source"
        )
    return path, lines


class JoinedLines:
    """The lines of an indexed data set as one sequence of tokens."""

    def __init__(self, lines: Any) -> None:
        self.lines = lines
        self.ends = np.cumsum(lines.sizes, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def tokens(self, start: int, stop: int) -> Tensor:
        """Return tokens start to stop - 1, int64."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.ends, stop, side="left"))
        before = int(self.ends[first - 1]) if first else 0
        return torch.cat([self.lines[line] for line in range(first, last + 1)])[start - before : stop - before]


class TextBlocks(MonolingualDataset):
    """A data set of the blocks of a text, each of at most block_size tokens; with document_starts, of one document.

    packed: blocks may still hold several documents; "first" marks their starts. The input of a token is the token
    before it; the input of the text's first token is start_token.
    """

    def __init__(
        self,
        text: JoinedLines,
        dictionary: Dictionary,
        block_size: int,
        start_token: int,
        document_starts: np.ndarray | None = None,
        packed: bool = False,
    ) -> None:
        documents = np.zeros(1, dtype=np.int64) if document_starts is None else document_starts
        self.documents = documents if packed else None
        cuts = documents[:1] if packed else documents
        ends = np.append(cuts[1:], len(text))
        starts = [np.arange(*cut, block_size) for cut in zip(cuts, ends, strict=True)]
        self.text = text
        self.start_token = start_token
        self.bounds = np.append(np.concatenate(starts), len(text))
        self.starts_document = np.isin(self.bounds[:-1], documents)
        super().__init__(text, np.diff(self.bounds), dictionary)

    def __getitem__(self, index: int) -> Sample:
        """Return {"id", "source" (L,), "target" (L,)}, and if packed "first" (L,) bool."""
        start, stop = int(self.bounds[index]), int(self.bounds[index + 1])
        tokens = self.text.tokens(max(start - 1, 0), stop)
        if start == 0:
            tokens = torch.cat([tokens.new_tensor([self.start_token]), tokens])
        item = {"id": int(index), "source": tokens[:-1], "target": tokens[1:]}
        if self.documents is None:
            return item
        first = torch.zeros(stop - start, dtype=torch.bool)
        begin, end = np.searchsorted(self.documents, [start, stop])
        first[self.documents[begin:end] - start] = True
        return {**item, "first": first}

    def __len__(self) -> int:
        return len(self.sizes)

    def ordered_indices(self) -> np.ndarray:
        """Return the blocks in the order of the text."""
        return np.arange(len(self))


def document_starts(text: JoinedLines, dictionary: Dictionary, separator: str) -> np.ndarray:
    """Return the starts of documents that end with the symbol `separator` or an empty line (`BLANK_LINE`)."""
    if separator == BLANK_LINE:
        short = np.flatnonzero(np.asarray(text.lines.sizes) == 1)
        ends = [int(text.ends[line]) for line in short if int(text.lines[line][0]) == dictionary.eos()]
    else:
        symbol = dictionary.index(separator)
        before = np.append(0, text.ends)
        ends = [
            int(before[line] + place) + 1
            for line in range(len(text.ends))
            for place in torch.nonzero(text.lines[line] == symbol).flatten().tolist()
        ]
    return np.array([0, *(end for end in ends if end < len(text))], dtype=np.int64)
