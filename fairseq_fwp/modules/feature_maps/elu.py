"""ELU+1, the feature map of the linear Transformer."""

from torch import Tensor, nn


class EluPlusOne(nn.Module):
    """phi(x) = ELU(x) + 1, that is x + 1 for x > 0 and exp(x) otherwise.

    Katharopoulos et al. 2020, arXiv 2006.16236, Eq. 7; Schlag et al. 2021, arXiv 2102.11174, Eq. 30.
    Maps (..., head_dim) of any floating dtype to (..., feature_dim = head_dim) in float32 (float64 stays), > 0.
    """

    positive = True

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.feature_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() if x.dtype.itemsize < 4 else x
        # ELU(x) + 1 computed as written loses all digits where exp(x) is below the rounding of 1.
        return x.clamp(max=0).exp() + x.clamp(min=0)
