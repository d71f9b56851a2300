"""Several streams in parallel, each with consecutive blocks of a text, and fairseq's epoch iterator over them."""

import logging
from typing import Any

import numpy as np
import torch
from fairseq.data.iterators import EpochBatchIterator

from fairseq_fwp.modules.decoding import Sample, Segment
from fairseq_fwp.patches.hooks import Divided, SavesStates
from fairseq_fwp.tasks.carried_state import CarriedState
from fairseq_fwp.tasks.text import TextBlocks

logger = logging.getLogger(__name__)

# A state is far older than those of training if it has read more than so many times their tokens.
FAR = 2


class Streams:
    """A text in batch_size * num_shards streams of consecutive blocks, of which one process reads batch_size.

    Streams differ by at most one block. So the last segment of an epoch may lack some streams, and the longest stream
    is as short as possible.
    """

    def __init__(self, blocks: TextBlocks, batch_size: int, num_shards: int, shard_id: int) -> None:
        count = batch_size * num_shards
        self.blocks = blocks
        self.bounds = np.arange(count + 1) * len(blocks) // count
        self.segments = int(np.diff(self.bounds).max())
        self.own = range(shard_id * batch_size, (shard_id + 1) * batch_size)

    def batches(self) -> list[list[int]]:
        """Return this process's blocks for every segment; the number of segments is the same in all processes."""
        own = [range(*self.bounds[stream : stream + 2].tolist()) for stream in self.own]
        return [[blocks[t] for blocks in own if t < len(blocks)] for t in range(self.segments)]

    def collate(self, items: list[Sample]) -> Sample:
        """Return a batch for fairseq's language models, with its `Segment`.

        A process whose streams have ended gets a batch without targets: fairseq would repeat another batch there, and
        with --update-freq skip earlier batches.
        """
        if not items:
            dictionary = self.blocks.vocab
            net_input = {"src_tokens": torch.tensor([[dictionary.eos()]]), "src_lengths": torch.tensor([1])}
            nothing = {"id": torch.tensor([-1]), "nsentences": 0, "ntokens": 0}
            return {**nothing, "net_input": net_input, "target": torch.tensor([[dictionary.pad()]])}
        batch = self.blocks.collater(items)
        ids = batch["id"].numpy()
        streams = np.searchsorted(self.bounds, ids, side="right") - 1
        segment = int(ids[0] - self.bounds[streams[0]])
        if "first" in items[0] and any(item["first"][1:].any() for item in items):
            first = torch.nn.utils.rnn.pad_sequence([item["first"] for item in items], batch_first=True)
            batch["net_input"]["first"] = first
        fresh = self.blocks.starts_document[ids] | (segment == 0)
        last = segment == self.segments - 1
        return {**batch, **Segment(segment=segment, last=last, streams=streams.tolist(), fresh=fresh.tolist())}


def trained_age(saved: dict[str, Any]) -> int | None:
    """Return the tokens that a stream had read at most in a training, by what `StreamIterator` saved of it.

    None: they are not known, or documents ended the states.
    """
    settings = saved.get("settings") or {}
    if settings.get("--reset-state-after", "unknown") or "tokens of text" not in settings:
        return None
    length, streams = settings["--tokens-per-sample"], settings["--batch-size"] * settings["processes"]
    whole = -(-settings["tokens of text"] // (length * streams))  # segments of an epoch
    segments = whole if saved["epoch"] > 1 else saved["iterations_in_epoch"]
    return length * (segments if settings["--carry-state"] else 1)


def warn_of_age(age: int, trained: int | None, remedy: str) -> None:
    """Warn of states after up to `age` tokens if those of training were far younger, as the model may not know them."""
    if trained and age > FAR * trained:
        logger.warning(
            f"states are scored after up to {age:,} tokens, and none is older than {trained:,} in training: {remedy}"
        )


class StreamIterator(EpochBatchIterator, SavesStates, Divided):
    """The batches of one process, never shuffled; it is saved with the states of all processes.

    carried: the state of its streams in training; settings: values, by name, that must not change in mid-epoch.
    """

    division = "streams"  # which `settings` describe; the batches of one process do not

    def __init__(
        self, streams: Streams, carried: CarriedState, settings: dict[str, Any], shard_id: int, **kwargs: object
    ) -> None:
        # fairseq distributes batches over processes one by one; streams stay in their process.
        super().__init__(streams.blocks, streams.collate, streams.batches(), disable_shuffling=True, **kwargs)
        self.carried = carried
        self.settings = settings
        self.process = shard_id
        self.states: list[Any] | None = None

    def collect_states(self, group: Any) -> None:
        """Send the states of all processes to the first one, which saves them; every process must call it."""
        if self.carried.off or self.end_of_epoch():
            return
        self.states = [self.carried.save()]
        if group is not None:
            gathered = [None] * self.settings["processes"] if self.process == 0 else None
            torch.distributed.gather_object(self.states[0], gathered, group=group)
            self.states = gathered

    def state_dict(self) -> dict[str, Any]:
        """Return fairseq's state, the settings, and in mid-epoch the collected states."""
        states, self.states = self.states, None
        return {**super().state_dict(), "settings": self.settings, "states": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the position. Raises RuntimeError for a checkpoint in mid-epoch of other streams."""
        if state_dict.get("iterations_in_epoch", 0) > 0:
            saved, now = state_dict.get("settings") or {}, self.settings
            others = [name for name in now if saved.get(name) != now[name]] if saved else []
            difference = ", ".join(f"with {name} {saved.get(name)} (now {now[name]})" for name in others)
            if others or not saved:
                raise RuntimeError(
                    f"a checkpoint in mid-epoch must be of the same task and streams, got one "
                    f"{difference or 'of another task'}: give the same settings, or --reset-dataloader to begin at the "
                    "start of the text"
                )
            if not self.carried.off:
                self.carried.load(state_dict["states"][self.process])
        super().load_state_dict(state_dict)
