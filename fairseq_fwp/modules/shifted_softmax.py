"""Adaptive softmaxes whose features end with what is added to the biases of this position."""

from torch import Tensor, nn

from fairseq_fwp.modules.adaptive_input import AdaptiveInput
from fairseq_fwp.modules.adaptive_softmax import AdaptiveSoftmax, ProjectedAdaptiveSoftmax, TiedAdaptiveSoftmax


class ShiftedSoftmax(AdaptiveSoftmax):
    """Features (..., D + shift_entries): those of D dimensions, a shift for each word's bias and each cluster's.

    For "bias only" of Clark et al. 2022 (arXiv 2212.02475, Table 2), where tokens change the output softmax's bias.
    """

    @property
    def shift_entries(self) -> int:
        """V + the number of clusters."""
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
    """All words share the weight of one embedding."""


class ShiftedProjectedSoftmax(ShiftedSoftmax, ProjectedAdaptiveSoftmax):
    """Over an `AdaptiveInput`."""


def build_shifted_softmax(embedding: nn.Embedding | AdaptiveInput, cutoffs: list[int]) -> ShiftedSoftmax:
    """The one that fits the embedding; cutoffs as in `AdaptiveSoftmax`, those of an `AdaptiveInput` are its own."""
    if isinstance(embedding, AdaptiveInput):
        return ShiftedProjectedSoftmax(embedding)
    return ShiftedTiedSoftmax(embedding, cutoffs)
