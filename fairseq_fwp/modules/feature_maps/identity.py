"""No feature map: keys and queries stay as projected."""

from torch import Tensor

from fairseq_fwp.modules.feature_maps.feature_map import FeatureMap


class Identity(FeatureMap):
    """The map phi(x) = x, as in Schlag et al. 2021, Sec. 3.1 (attention without softmax) and in Mao 2022.

    Maps (..., head_dim) to itself. Its features have either sign, so no normalisation by a sum applies to it.
    """

    positive = False

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.feature_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        return x
