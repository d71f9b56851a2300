"""Data sets of generated sequences: pairs of keys and values with queries, and the `problems`.

`Associations` are those of Schlag, Irie & Schmidhuber 2021, arXiv 2102.11174, Sec. 6.1.
"""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset
from fairseq.data.monolingual_dataset import collate
from numpy.random import Generator
from torch.utils.data import default_collate

from fairseq_fwp.modules.decoding import Sample
from fairseq_fwp.tasks.synthetic.problems import NOT_ASKED, Problem, Setting


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

    def collater(self, samples: list[Sample]) -> Sample:
        """Return a batch for model and criterion; {} for no samples, as in a process without samples."""
        if not samples:
            return {}
        net_input = default_collate(samples)
        target = net_input.pop("target")
        return {"net_input": net_input, "target": target, "ntokens": target.numel(), "nsentences": len(samples)}


class ProblemSequences(GeneratedSequences):
    """Sequences of a problem.

    first, padding: index of the first symbol and of padding in the dictionary; longest: tokens of a sequence, at most:
    a longer one is drawn again; doubling: epochs after which the number of pairs, 2 at first, doubles, up to that of
    the setting; None: never; repeated: all epochs have the same sequences, kept, in batches of about equal lengths.
    """

    def __init__(
        self,
        problem: Problem,
        setting: Setting,
        first: int,
        padding: int,
        longest: int,
        doubling: int | None,
        repeated: bool,
        **settings: Any,
    ) -> None:
        super().__init__(length=min(setting.length * problem.tokens, longest), **settings)
        self.problem, self.setting, self.first, self.padding, self.doubling = problem, setting, first, padding, doubling
        self.longest, self.repeated = longest, repeated
        self.kept: dict[int, Sample] = {}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, unless all have the same sequences."""
        super().set_epoch(1 if self.repeated else epoch)

    def _setting(self) -> Setting:
        """Return the setting of this epoch; sequences with fewer pairs are shorter."""
        setting, most = self.setting, self.setting.pairs
        if not self.doubling:
            return setting
        pairs = min(most, 2 ** (1 + (self.epoch - 1) // self.doubling))
        return setting._replace(length=max(2 * pairs + 1, setting.length * pairs // most), pairs=pairs)

    def __getitem__(self, index: int) -> Sample:
        """Return {"id", "source" (L,), "target" (L,)}: symbols of the dictionary, and answers."""
        if index in self.kept:
            return self.kept[index]
        generator, symbols = self.generator(index), np.empty(0)
        while not 0 < len(symbols) <= self.longest:
            symbols, answers = self.problem.draw(generator, self._setting())
        target = torch.from_numpy(np.where(answers == NOT_ASKED, self.padding, answers + self.first))
        sample = {"id": int(index), "source": torch.from_numpy(symbols + self.first), "target": target}
        if self.repeated:
            self.kept[index] = sample
        return sample

    def collater(self, samples: list[Sample]) -> Sample:
        """Return a batch for a language model, {} for no samples. Padding follows the shorter ones."""
        batch: Sample = collate(samples, self.padding, self.padding)
        return batch and {**batch, "ntokens": int((batch["target"] != self.padding).sum())}

    @cached_property
    def sizes(self) -> np.ndarray:
        """Tokens of each sequence; of those that are not repeated the greatest number."""
        if not self.repeated:
            return np.full(len(self), self.length)
        return np.array([len(self[index]["source"]) for index in range(len(self))])

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    size = num_tokens

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Whether all epochs have the same batches of indices."""
        return not self.repeated

    def ordered_indices(self) -> np.ndarray:
        """Return the order in which batches are made; fairseq sets its random numbers, and shuffles the batches."""
        if not self.repeated:
            return np.arange(len(self))
        order = np.random.permutation(len(self))
        return order[self.sizes[order].argsort(kind="stable")]
