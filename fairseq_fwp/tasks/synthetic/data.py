"""Generated sequences: pairs of keys and values with queries, and problems of state tracking and recall.

`Associations` are those of Schlag, Irie & Schmidhuber 2021, arXiv 2102.11174, Sec. 6.1. The other problems distinguish
update rules: sequences of symbols, with the right answer for some of their tokens. `parity` (Grazzi et al. 2025, arXiv
2411.12537) and products in a group (Siems et al. 2025, arXiv 2502.10297, Sec. 5) ask for a state at every token.
`mqar`, multi-query associative recall (Arora et al. 2024, arXiv 2312.04927), asks for values written before.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import FairseqDataset
from numpy.random import Generator
from torch.utils.data import default_collate

from fairseq_fwp.modules.decoding import Sample

NOT_ASKED = -1
Sequence = tuple[np.ndarray, np.ndarray]  # symbols (L,), and answers (L,) or NOT_ASKED


class GeneratedSequences(FairseqDataset):
    """Sequences that depend only on seed, epoch and index, so that they never repeat and a resumed run continues.

    seed: several numbers; count: sequences of an epoch, None: infinitely many; length: the greatest.
    """

    def __init__(self, seed: tuple[int, ...], count: int | None, length: int) -> None:
        self.seed, self.count, self.length = seed, count, length
        self.epoch = 1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; each epoch has different sequences, but the same batches of indices."""
        self.epoch = epoch

    def generator(self, index: int) -> Generator:
        """Return the random numbers of a sequence."""
        return np.random.default_rng((*self.seed, self.epoch, int(index)))

    def __len__(self) -> int:
        assert self.count is not None
        return self.count

    def num_tokens(self, index: int) -> int:
        """Tokens, or pairs, of a sequence."""
        return self.length

    size = num_tokens

    def collater(self, samples: list[Sample]) -> Sample:
        """Return a batch for model and criterion; {} for no samples, as in a process without samples."""
        return {**self.batch(default_collate(samples)), "nsentences": len(samples)} if samples else {}

    def batch(self, stacked: Sample) -> Sample:
        """Return the batch of samples whose parts are stacked, without their number."""
        raise NotImplementedError


class Associations(GeneratedSequences):
    """Pairs of num_keys keys and as many values.

    with_replacement: draw both for each pair, where the value to retrieve is the last one written. Otherwise keys and
    values occur only once; all_queries: ask for every key, instead of one key of the pairs.
    """

    def __init__(self, num_keys: int, with_replacement: bool, all_queries: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.num_keys, self.with_replacement, self.all_queries = num_keys, with_replacement, all_queries

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return keys, values (L,) and queries, target (Q,); a target is NOT_ASKED if its key does not occur."""
        generator = self.generator(index)
        keys, values = self._draw(generator), self._draw(generator)
        latest = np.full(self.num_keys, NOT_ASKED)
        latest[keys] = values  # for equal indices the last one counts
        place = generator.integers(len(keys), size=1)
        queries = np.arange(self.num_keys) if self.all_queries else keys[place]
        return {"keys": keys, "values": values, "queries": queries, "target": latest[queries]}

    def _draw(self, generator: Generator) -> np.ndarray:
        if self.with_replacement:
            return generator.integers(self.num_keys, size=self.length)
        return generator.permutation(self.num_keys)[: self.length]

    def batch(self, stacked: Sample) -> Sample:
        target = stacked.pop("target")
        return {"net_input": stacked, "target": target, "ntokens": target.numel()}


class Setting(NamedTuple):
    """The settings of a sequence: its length, and for mqar its pairs and its numbers of keys and of values."""

    length: int
    pairs: int
    symbols: int


Problem = Callable[[Generator, Setting], Sequence]


def parity(generator: Generator, setting: Setting) -> Sequence:
    """Draw bits; an answer says whether the number of ones so far is odd."""
    bits = generator.integers(2, size=setting.length)
    return bits, bits.cumsum() % 2


def _symmetric(n: int) -> list[tuple[int, ...]]:
    return list(permutations(range(n)))


def _alternating(n: int) -> list[tuple[int, ...]]:
    """The permutations with an even number of pairs in the wrong order."""
    return [p for p in _symmetric(n) if sum(a > b for i, b in enumerate(p) for a in p[:i]) % 2 == 0]


# Groups of permutations by name; the first one of each is the identity. Only those of a5 and s5 are not solvable.
GROUPS = {
    "s3": lambda: _symmetric(3),
    "a4": lambda: _alternating(4),
    "a5": lambda: _alternating(5),
    "s5": lambda: _symmetric(5),
    "z60": lambda: [tuple((i + shift) % 60 for i in range(60)) for shift in range(60)],
}


@cache
def product_table(name: str) -> np.ndarray:
    """Return product[a, b] of the permutations of a group; a is applied first."""
    place = {permutation: index for index, permutation in enumerate(GROUPS[name]())}
    return np.array([[place[tuple(b[i] for i in a)] for b in place] for a in place])


def products(name: str, generator: Generator, setting: Setting) -> Sequence:
    """Draw elements of a group; an answer is their product so far."""
    table = product_table(name)
    symbols = generator.integers(len(table), size=setting.length)
    answers, product = np.empty_like(symbols), 0
    for t, symbol in enumerate(symbols):
        answers[t] = product = table[product, symbol]
    return symbols, answers


def mqar(generator: Generator, setting: Setting) -> Sequence:
    """Draw pairs of a key and a value with different keys, then random keys of them, which ask for their values.

    Keys are symbols 0 ... n - 1, values n ... 2 n - 1.
    """
    length, pairs, symbols = setting
    keys = generator.permutation(symbols)[:pairs]
    values = symbols + generator.integers(symbols, size=pairs)
    queries = generator.integers(pairs, size=length - 2 * pairs)
    sequence = np.concatenate([np.stack([keys, values], axis=1).ravel(), keys[queries]])
    return sequence, np.concatenate([np.full(2 * pairs, NOT_ASKED), values[queries]])


PROBLEMS: dict[str, Problem] = {"parity": parity, **{name: partial(products, name) for name in GROUPS}, "mqar": mqar}


def count_symbols(problem: str, symbols: int) -> int:
    """Return the number of symbols of a problem; symbols: the keys of mqar."""
    return len(product_table(problem)) if problem in GROUPS else 2 * symbols if problem == "mqar" else 2


class ProblemSequences(GeneratedSequences):
    """Sequences of a problem.

    first, padding: index of the first symbol and of padding in the dictionary; doubling: epochs after which the number
    of pairs, 2 at first, doubles, up to that of the setting; None: never.
    """

    def __init__(
        self, problem: Problem, setting: Setting, first: int, padding: int, doubling: int | None, **settings: Any
    ) -> None:
        super().__init__(length=setting.length, **settings)
        self.problem, self.setting, self.first, self.padding, self.doubling = problem, setting, first, padding, doubling

    def _setting(self) -> Setting:
        """Return the setting of this epoch; sequences with fewer pairs are shorter."""
        length, pairs, symbols = self.setting
        if self.doubling:
            pairs = min(pairs, 2 ** (1 + (self.epoch - 1) // self.doubling))
        return Setting(max(2 * pairs + 1, length * pairs // self.setting.pairs), pairs, symbols)

    def __getitem__(self, index: int) -> Sample:
        """Return an id, and symbols and answers (L,) of the dictionary."""
        symbols, answers = self.problem(self.generator(index), self._setting())
        target = np.where(answers == NOT_ASKED, self.padding, answers + self.first)
        return {"id": int(index), "symbols": symbols + self.first, "target": target}

    def batch(self, stacked: Sample) -> Sample:
        symbols = stacked.pop("symbols")
        lengths = torch.full((len(symbols),), symbols.shape[1])
        answers = int((stacked["target"] != self.padding).sum())
        return {**stacked, "net_input": {"src_tokens": symbols, "src_lengths": lengths}, "ntokens": answers}

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each sequence."""
        return np.full(len(self), self.length)
