"""Generated sequences of key-value pairs with queries: the data of the synthetic retrieval task."""

from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import FairseqDataset

NOT_ASKED = -1


class Setting(NamedTuple):
    """Settings of a sequence: `length` pairs of num_keys keys and as many values, drawn with or without replacement."""

    num_keys: int
    length: int
    with_replacement: bool


class Associations(FairseqDataset):
    """Sequences that depend only on seed, epoch and index, so that they never repeat and a resumed run continues.

    Schlag et al. 2021, arXiv 2102.11174, Sec. 6.1. Without replacement, keys and values occur only once. With
    replacement both are drawn for each pair, and the value to retrieve is the last one written.

    seed: several numbers; count: sequences of an epoch, None: infinitely many;
    all_queries: ask for every key, instead of one key of the pairs.
    """

    def __init__(self, setting: Setting, seed: tuple[int, ...], count: int | None, all_queries: bool) -> None:
        self.setting = setting
        self.seed = seed
        self.count = count
        self.all_queries = all_queries
        self.epoch = 1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; each epoch has different sequences."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return keys, values (L,) and queries, targets (Q,); a target is NOT_ASKED if its key does not occur."""
        generator = np.random.default_rng((*self.seed, self.epoch, index))
        keys, values = self._draw(generator), self._draw(generator)
        latest = np.full(self.setting.num_keys, NOT_ASKED)
        latest[keys] = values  # for equal indices the last one counts
        place = generator.integers(len(keys), size=1)
        queries = np.arange(self.setting.num_keys) if self.all_queries else keys[place]
        return {"keys": keys, "values": values, "queries": queries, "targets": latest[queries]}

    def _draw(self, generator: np.random.Generator) -> np.ndarray:
        num_keys, length, with_replacement = self.setting
        if with_replacement:
            return generator.integers(num_keys, size=length)
        return generator.permutation(num_keys)[:length]

    def collater(self, samples: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        """Return a batch for model and criterion; {} for no samples, as in a process without samples."""
        if not samples:
            return {}
        stacked = {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}
        target = stacked.pop("targets")
        return {"net_input": stacked, "target": target, "ntokens": target.numel(), "nsentences": len(samples)}

    def num_tokens(self, index: int) -> int:
        """Pairs of a sequence."""
        return self.setting.length

    def size(self, index: int) -> int:
        """Pairs of a sequence."""
        return self.setting.length
