"""Adaptive softmaxes whose features end with shifts of the biases at each position."""

from torch import Tensor, nn

from fairseq_fwp.modules.adaptive_softmax import (
    AdaptiveInput,
    AdaptiveSoftmax,
    ProjectedAdaptiveSoftmax,
    TiedAdaptiveSoftmax,
)


class ShiftedSoftmax(AdaptiveSoftmax):
    """An adaptive softmax of features (..., D + shift_entries), which end with shifts of all biases.

    For "bias only" of Clark et al. 2022 (arXiv 2212.02475, Table 2), where tokens change the output softmax's bias.
    """

    @property
    def shift_entries(self) -> int:
        """The number of shifts: V + the number of clusters."""
        return self.bounds[-1] + len(self.bounds) - 2

    def _head(self, flat: Tensor) -> Tensor:
        head = super()._head(flat)  # words, with their shifts, and clusters
        head[:, self.bounds[1] :] += flat[:, flat.shape[1] - (len(self.bounds) - 2) :]
        return head

    def _words(self, index: int, flat: Tensor) -> Tensor:
        first = flat.shape[1] - self.shift_entries
        return super()._words(index, flat) + flat[:, first + self.bounds[index] : first + self.bounds[index + 1]]

    def _project(self, index: int, flat: Tensor) -> Tensor:
        return super()._project(index, flat[:, : flat.shape[1] - self.shift_entries])


class ShiftedTiedSoftmax(ShiftedSoftmax, TiedAdaptiveSoftmax):
    """A shifted softmax whose words share the weight of one embedding."""


class ShiftedProjectedSoftmax(ShiftedSoftmax, ProjectedAdaptiveSoftmax):
    """A shifted softmax tied to an `AdaptiveInput`."""


def build_shifted_softmax(embedding: nn.Embedding | AdaptiveInput, cutoffs: list[int]) -> ShiftedSoftmax:
    """Return the class that fits the embedding; cutoffs as in `AdaptiveSoftmax`, ignored for an `AdaptiveInput`."""
    if isinstance(embedding, AdaptiveInput):
        return ShiftedProjectedSoftmax(embedding)
    return ShiftedTiedSoftmax(embedding, cutoffs)
