"""The state of a fast weight layer: an immutable value, whose methods return new states."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_fwp.modules.layers import at_least_float32


class Gradients(NamedTuple):
    """Gradients of a linear layer at M positions: its inputs (B, M, in) and errors, gradients of outputs (B, M, out).

    The gradient of the layer's weight is inputs^T errors, and the gradient of its bias is the sum of errors. For a
    vector, inputs are None and errors are its gradients.
    """

    inputs: Tensor | None
    errors: Tensor

    def then(self, more: "Gradients") -> "Gradients":
        """Return these gradients followed by `more`."""
        inputs = None if self.inputs is None or more.inputs is None else torch.cat([self.inputs, more.inputs], 1)
        return Gradients(inputs, torch.cat([self.errors, more.errors], 1))

    def detach(self) -> "Gradients":
        """Return the same values, detached from the graph."""
        return self.map(Tensor.detach)

    def sum(self, of_weight: bool) -> Tensor:
        """Return the sum over positions in float32 or wider: of a weight (B, in, out), or of a vector (B, out)."""
        errors = at_least_float32(self.errors)
        return at_least_float32(self.inputs).mT @ errors if of_weight and self.inputs is not None else errors.sum(1)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Gradients":
        """Return the gradients with every tensor changed."""
        return Gradients(None if self.inputs is None else change(self.inputs), change(self.errors))


class FastWeightLayerState(NamedTuple):
    """The state of a layer after part of a stream, detached from the graph.

    update: Delta, the running update of past segments by weight, (B, in, out) or (B, out); empty in the first segment;
    history: the gradients at the positions of the current segment, by part;
    pending (B, D): features after the last token, whose loss needs the next token;
    started (B,) bool: rows that have read a token.
    """

    update: dict[str, Tensor]
    history: dict[str, Gradients]
    pending: Tensor
    started: Tensor

    def detach(self) -> "FastWeightLayerState":
        """Return the same values, detached from the graph."""
        return self._map(Tensor.detach)

    def reorder(self, new_order: Tensor) -> "FastWeightLayerState":
        """Return the rows new_order (B',) of the batch, as beam search selects them."""
        return self._map(lambda values: values.index_select(0, new_order))

    def reset(self, rows: Tensor) -> "FastWeightLayerState":
        """Return the state, empty in the rows of the batch that are True. rows: (B,) bool."""
        return self._map(lambda values: values.masked_fill(rows.view(-1, *(1,) * (values.dim() - 1)), 0))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "FastWeightLayerState":
        return FastWeightLayerState(
            {name: change(value) for name, value in self.update.items()},
            {name: gradients.map(change) for name, gradients in self.history.items()},
            change(self.pending),
            change(self.started),
        )
