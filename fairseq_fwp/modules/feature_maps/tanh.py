"""Hyperbolic tangent, the key and query activation of the fast weight memory."""

from torch import Tensor

from fairseq_fwp.modules.feature_maps.feature_map import FeatureMap
from fairseq_fwp.modules.precision import at_least_float32


class Tanh(FeatureMap):
    """The map phi(x) = tanh(x), element by element.

    Schlag, Munkhdalai & Schmidhuber 2021, arXiv 2011.07831; the baseline of Schlag et al. 2021, arXiv 2102.11174,
    Sec. 6.1.2. Maps (..., head_dim) of any floating dtype to (..., feature_dim = head_dim) in float32 (float64 stays).
    Its features have either sign, so no normalisation by a sum applies to it.
    """

    positive = False

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.feature_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        return at_least_float32(x).tanh()
