"""The order of a text's blocks: several streams in parallel, each with consecutive blocks."""

from typing import Any

import numpy as np
import torch
from fairseq.data.monolingual_dataset import collate

from fairseq_fwp.tasks.text_blocks import TextBlocks


class Streams:
    """A text in batch_size * num_shards streams of consecutive blocks, of which one process reads batch_size.

    Streams differ by at most one block. So the last segment of an epoch may lack some streams, and the longest stream
    is as short as possible.
    """

    def __init__(self, blocks: TextBlocks, batch_size: int, num_shards: int, shard_id: int, pad: int, eos: int) -> None:
        count = batch_size * num_shards
        self.blocks = blocks
        self.bounds = np.arange(count + 1) * len(blocks) // count
        self.segments = int(np.diff(self.bounds).max())
        self.own = range(shard_id * batch_size, (shard_id + 1) * batch_size)
        self.pad = pad
        self.eos = eos

    def batches(self) -> list[list[int]]:
        """Return this process's blocks for every segment; the number of segments is the same in all processes."""
        first, end = self.bounds[:-1], self.bounds[1:]
        return [
            [int(first[s] + segment) for s in self.own if first[s] + segment < end[s]]
            for segment in range(self.segments)
        ]

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch for fairseq's language models, with the facts about its rows that a carried state needs.

        "segment": the number of blocks that the streams have read. "last": whether these are the last blocks.
        "streams": the numbers of the streams. "fresh": whether the block starts a stream or document, and so starts
        without a state.
        """
        if not items:
            return self._no_targets()
        batch = collate(items, self.pad, self.eos)
        ids = batch["id"].numpy()
        streams = np.searchsorted(self.bounds, ids, side="right") - 1
        segment = int(ids[0] - self.bounds[streams[0]])
        if "first" in items[0] and any(item["first"][1:].any() for item in items):
            first = torch.nn.utils.rnn.pad_sequence([item["first"] for item in items], batch_first=True)
            batch["net_input"]["first"] = first
        fresh = self.blocks.starts_document[ids] | (segment == 0)
        return {
            **batch,
            "segment": segment,
            "last": segment == self.segments - 1,
            # Lists, not tensors: they are read on the CPU, wherever fairseq moves the batch.
            "streams": streams.tolist(),
            "fresh": fresh.tolist(),
        }

    def _no_targets(self) -> dict[str, Any]:
        """Return a batch without targets, for a process whose streams have ended.

        fairseq would repeat another batch there, and with --update-freq skip earlier batches.
        """
        return {
            "id": torch.tensor([-1]),
            "nsentences": 0,
            "ntokens": 0,
            "net_input": {"src_tokens": torch.tensor([[self.eos]]), "src_lengths": torch.tensor([1])},
            "target": torch.tensor([[self.pad]]),
        }
