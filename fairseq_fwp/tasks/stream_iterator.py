"""fairseq's epoch iterator over streams, in their order; it is saved with the states of all processes."""

from typing import Any

import torch
from fairseq.data.iterators import EpochBatchIterator

from fairseq_fwp.tasks.carried_state import CarriedState
from fairseq_fwp.tasks.streams import Streams


class StreamIterator(EpochBatchIterator):
    """The batches of one process, never shuffled.

    carried: the state of its streams in training, None = no state; settings: values, by name, that must not change in
    mid-epoch.
    """

    def __init__(
        self, streams: Streams, carried: CarriedState | None, settings: dict[str, Any], shard_id: int, **kwargs: Any
    ) -> None:
        # fairseq distributes batches over processes one by one; streams stay in their process.
        super().__init__(streams.blocks, streams.collate, streams.batches(), disable_shuffling=True, **kwargs)
        self.carried = carried
        self.settings = settings
        self.process = shard_id
        self.states: list[Any] | None = None

    def collect_states(self, group: Any) -> None:
        """Send the states of all processes to the first one, which saves them; every process must call it."""
        if self.carried is None or self.end_of_epoch():
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
                f"a checkpoint in mid-epoch must be of the same task and streams, got one {difference}: give the same "
                "settings, or --reset-dataloader to begin at the start of the text"
            )
