"""Small problems that distinguish update rules: sequences of symbols, with the right answer for some of their tokens.

`parity` and `s3` ask for a state at every token: the parity of the ones so far, or the product of the permutations so
far. Sources: Grazzi et al. 2025, arXiv 2411.12537; Siems et al. 2025, arXiv 2502.10297, Sec. 5. `mqar`, multi-query
associative recall (Arora et al. 2024, arXiv 2312.04927), writes pairs of a key and a value and later asks for them.
"""

from collections.abc import Callable
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import FairseqDataset

NOT_ASKED = -1
Sequence = tuple[np.ndarray, np.ndarray]  # symbols (L,), and answers (L,) or NOT_ASKED


class Setting(NamedTuple):
    """The settings of a sequence: its length, and for mqar its pairs and its numbers of keys and of values."""

    length: int
    pairs: int
    symbols: int


def parity(generator: np.random.Generator, setting: Setting) -> Sequence:
    """Draw bits; an answer says whether the number of ones so far is odd."""
    bits = generator.integers(2, size=setting.length)
    return bits, bits.cumsum() % 2


def _permutation_table() -> np.ndarray:
    """Return the table product[a, b] of the six permutations of three elements; a is applied first."""
    group = list(permutations(range(3)))
    return np.array([[group.index(tuple(b[i] for i in a)) for b in group] for a in group])


S3 = _permutation_table()


def s3(generator: np.random.Generator, setting: Setting) -> Sequence:
    """Draw permutations of three elements; an answer is their product so far."""
    symbols = generator.integers(6, size=setting.length)
    answers, product = np.empty_like(symbols), 0  # permutation 0 is the identity
    for t, symbol in enumerate(symbols):
        answers[t] = product = S3[product, symbol]
    return symbols, answers


def mqar(generator: np.random.Generator, setting: Setting) -> Sequence:
    """Draw pairs of a key and a value with different keys, then random keys of them, which ask for their values.

    Keys are symbols 0 ... n - 1, values n ... 2 n - 1.
    """
    length, pairs, symbols = setting
    keys = generator.permutation(symbols)[:pairs]
    values = symbols + generator.integers(symbols, size=pairs)
    asked = generator.integers(pairs, size=length - 2 * pairs)
    sequence = np.concatenate([np.stack([keys, values], axis=1).ravel(), keys[asked]])
    return sequence, np.concatenate([np.full(2 * pairs, NOT_ASKED), values[asked]])


class Problem(NamedTuple):
    """A problem. draw: (generator, setting) -> a sequence; symbols: their number, including answers."""

    draw: Callable[[np.random.Generator, Setting], Sequence]
    symbols: Callable[[Setting], int]


PROBLEMS = {
    "parity": Problem(parity, lambda setting: 2),
    "s3": Problem(s3, lambda setting: 6),
    "mqar": Problem(mqar, lambda setting: 2 * setting.symbols),
}


class ProblemSequences(FairseqDataset):
    """Sequences that depend only on seed, epoch and index, so that they never repeat and a resumed run continues.

    first, padding: index of the first symbol and of padding in the dictionary; count: sequences of an epoch;
    doubling: epochs after which the number of pairs, 2 at first, doubles, up to that of the setting; None: never.
    """

    def __init__(
        self,
        problem: Problem,
        setting: Setting,
        seed: tuple[int, ...],
        count: int,
        first: int,
        padding: int,
        doubling: int | None = None,
    ) -> None:
        self.problem, self.setting, self.seed, self.count = problem, setting, seed, count
        self.first, self.padding, self.doubling = first, padding, doubling
        self.epoch = 1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; each epoch has different sequences."""
        self.epoch = epoch

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Return True: batches are lists of indices, which are the same in every epoch."""
        return True

    def _setting(self) -> Setting:
        """Return the setting of this epoch; sequences with fewer pairs are shorter."""
        length, pairs, symbols = self.setting
        if self.doubling:
            pairs = min(pairs, 2 ** (1 + (self.epoch - 1) // self.doubling))
        return Setting(max(2 * pairs + 1, length * pairs // self.setting.pairs), pairs, symbols)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an id, and symbols and answers (L,) of the dictionary."""
        generator = np.random.default_rng((*self.seed, self.epoch, int(index)))
        symbols, answers = self.problem.draw(generator, self._setting())
        target = np.where(answers == NOT_ASKED, self.padding, answers + self.first)
        return {"id": int(index), "symbols": symbols + self.first, "target": target}

    def __len__(self) -> int:
        return self.count

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch for language models and their criteria; {} for no samples, as in a process without samples."""
        if not samples:
            return {}
        symbols, target = (
            torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in ("symbols", "target")
        )
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "net_input": {"src_tokens": symbols, "src_lengths": torch.full((len(samples),), symbols.shape[1])},
            "target": target,
            "ntokens": int((target != self.padding).sum()),
            "nsentences": len(samples),
        }

    def num_tokens(self, index: int) -> int:
        """Tokens of a sequence."""
        return self.setting.length

    def size(self, index: int) -> int:
        """Tokens of a sequence."""
        return self.setting.length

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each sequence."""
        return np.full(self.count, self.setting.length)
