"""The base class of all feature maps."""

from torch import nn


class FeatureMap(nn.Module):
    """A module from (..., head_dim) to (..., feature_dim) that maps each vector by itself.

    feature_dim: the size of its output;
    positive: whether features are never negative, which division by a sum of features needs;
    epsilon: the lower bound of such a sum; scale: a factor of its input vectors, applied first.

    A map that learns has `initialize()`, which draws its initial values.
    """

    feature_dim: int
    positive: bool
    epsilon: float = 1e-6
    scale: float = 1.0

    def resample(self) -> None:
        """Draw random features again, for each mini-batch in training, never in evaluation. By default do nothing."""
