"""fairseq's epoch iterator over streams: in their order, and saved with the states of all processes."""

from typing import Any

import torch
from fairseq.data.iterators import EpochBatchIterator

from fairseq_fwp.tasks.carried_state import CarriedState
from fairseq_fwp.tasks.streams import Streams


class StreamIterator(EpochBatchIterator):
    """The batches of one process, never shuffled.

    carried: the state of its streams in training, None = none is carried; settings: what must not change in
    mid-epoch, by name.
    """

    def __init__(
        self, streams: Streams, carried: CarriedState | None, settings: dict[str, Any], shard_id: int, **kwargs: Any
    ) -> None:
        # fairseq deals out batches to processes one by one; streams stay where they are.
        super().__init__(streams.blocks, streams.collate, streams.batches(), disable_shuffling=True, **kwargs)
        self.carried = carried
        self.settings = settings
        self.process = shard_id
        self.states: list[Any] | None = None

    def collect_states(self, group: Any) -> None:
        """Send the states of all processes to the first, which saves; to be called by each of them."""
        if self.carried is None or self.end_of_epoch():
            return
        self.states = [self.carried.save()]
        if group is not None:
            gathered = [None] * self.settings["processes"] if self.process == 0 else None
            torch.distributed.gather_object(self.states[0], gathered, group=group)
            self.states = gathered

    def state_dict(self) -> dict[str, Any]:
        """fairseq's, the settings, and in mid-epoch the states that were collected."""
        states, self.states = self.states, None
        return {**super().state_dict(), "settings": self.settings, "states": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the position. Raises RuntimeError for a checkpoint in mid-epoch of other streams."""
        if state_dict.get("iterations_in_epoch", 0) > 0:
            self._check(state_dict.get("settings"))
            if self.carried is not None:
                self.carried.load(state_dict["states"][self.process])
        super().load_state_dict(state_dict)

    def _check(self, saved: dict[str, Any] | None) -> None:
        if saved is None:
            difference = "of another task"
        else:
            pairs = ((name, saved.get(name), value) for name, value in self.settings.items())
            difference = ", ".join(f"with {name} {before} (now {now})" for name, before, now in pairs if before != now)
        if difference:
            raise RuntimeError(
                f"the checkpoint stopped in the middle of an epoch {difference}, where these streams cannot go on: "
                "give the same settings, or --reset-dataloader to begin at the first epoch's first token"
            )
