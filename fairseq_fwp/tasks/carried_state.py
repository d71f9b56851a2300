"""The state that a model carries from one segment of its streams to the next: see `decoding.StreamingDecoder`."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairseq_fwp.modules.decoding import Extra, Sample, Segment, State, segment_of


class Snapshot(NamedTuple):
    """A state, the streams in its rows, and the segment that comes next."""

    segment: int = 0
    streams: tuple[int, ...] = ()
    state: State | None = None

    def for_rows(self, segment: Segment, device: torch.device) -> State | None:
        """Return the state before a batch, None if all its rows start without one."""
        state, fresh = self.state, segment["fresh"]
        if state is None or all(fresh):
            return None
        if tuple(segment["streams"]) != self.streams:
            state = state.reorder(torch.tensor([self.streams.index(s) for s in segment["streams"]], device=device))
        return state.reset(torch.tensor(fresh, device=device)) if any(fresh) else state


class CarriedState:
    """The state that one process carries through an epoch, or through a validation; off: none is carried.

    It keeps that of the last update too: --amp repeats an update with the same batches after an overflow.
    """

    def __init__(self, off: bool = False) -> None:
        self.off = off
        self._now = self._at_update = Snapshot()
        self._updated = False
        self._saved: Tensor | None = None

    @contextmanager
    def given_to(self, model: nn.Module, sample: Sample) -> Iterator[Sample]:
        """Give the sample with the state of its streams, for a block that calls the model, whose new state is kept.

        If the block fails, the old state is kept: after running out of memory, a stream continues without that segment.
        """
        segment = None if self.off else segment_of(sample)
        if segment is None:  # nothing is carried, or all streams have ended
            yield sample
            return
        device = sample["net_input"]["src_tokens"].device
        before = self._go_to(segment["segment"], device)
        net_input = {**sample["net_input"], "state": before.for_rows(segment, device)}
        # A hook, because criteria only read the first value that a model returns.
        states: list[State] = []

        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Extra]) -> None:
            states.append(output[1]["state"])

        hook = model.register_forward_hook(keep)
        try:
            yield {**sample, "net_input": net_input}
        finally:
            hook.remove()
        self._now = Snapshot(segment["segment"] + 1, tuple(segment["streams"]), states[-1].detach())

    def continue_with(self, sample: Sample) -> tuple["CarriedState", Sample]:
        """Return a copy for other streams, which continue these in turn, and their first batch, no longer fresh.

        Raises ValueError where nothing has been read.
        """
        _, streams, state = self._now
        if state is None:
            raise ValueError("--validate-from-training-state needs the state of a training, got none: leave it out")
        copy, rows = CarriedState(), torch.arange(len(sample["streams"]), device=sample["target"].device)
        copy._now = Snapshot(0, tuple(sample["streams"]), state.reorder(rows % len(streams)))
        return copy, {**sample, "fresh": [False] * len(rows)}

    def end_update(self) -> None:
        """Record an update of the parameters; call it after each update."""
        self._updated = True

    def _go_to(self, segment: int, device: torch.device) -> Snapshot:
        """Go to a segment, and return what was left there, or at the last update if this one is repeated."""
        if self._saved is not None:
            buffer, self._saved = io.BytesIO(self._saved.numpy().tobytes()), None
            self._now = self._at_update = Snapshot(*torch.load(buffer, map_location=device, weights_only=True))
        if segment < self._now.segment:
            self._now = self._at_update
        elif self._updated:
            self._at_update = self._now
        self._updated = False
        return self._now

    def save(self) -> Tensor:
        """Return the state as bytes, (n,) uint8, so that a checkpoint with it loads without this package."""
        if self._saved is not None:
            return self._saved
        buffer = io.BytesIO()
        torch.save(tuple(self._now), buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    def load(self, saved: Tensor) -> None:
        """Load the result of `save`; it is unpacked with the first batch, on its device."""
        self._saved = saved
