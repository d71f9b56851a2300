"""The state of a fast weight layer: an immutable value, of which every method returns a new one."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class FastWeightState(NamedTuple):
    """The state of a layer: weights (B, H, Dk, Dv) and, with attention normalisation, normalizer (B, H, Dk)."""

    weights: Tensor
    normalizer: Tensor | None = None

    def detach(self) -> "FastWeightState":
        """The same values, detached from the graph (truncated back-propagation through time)."""
        return self._map(Tensor.detach)

    def reorder(self, new_order: Tensor) -> "FastWeightState":
        """The rows new_order (B',) of the batch, as beam search selects them."""
        return self._map(lambda part: part.index_select(0, new_order))

    def reset(self, rows: Tensor) -> "FastWeightState":
        """Return the state, empty in the rows of the batch that are True. rows: (B,) bool."""
        return self._map(lambda part: part.masked_fill(rows.view(-1, *[1] * (part.dim() - 1)), 0))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "FastWeightState":
        return FastWeightState(change(self.weights), None if self.normalizer is None else change(self.normalizer))
