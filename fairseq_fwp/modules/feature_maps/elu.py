"""ELU+1, the feature map of the linear Transformer."""

from typing import Any

import torch
from torch import Tensor

from fairseq_fwp.modules.feature_maps.feature_map import FeatureMap
from fairseq_fwp.modules.precision import at_least_float32
from fairseq_fwp.ops.rule import is_transformed


class EluPlusOne(FeatureMap):
    """The map phi(x) = ELU(x) + 1, that is x + 1 for x > 0 and exp(x) otherwise.

    Katharopoulos et al. 2020, arXiv 2006.16236, Eq. 7; Schlag et al. 2021, arXiv 2102.11174, Eq. 30.
    Maps (..., head_dim) of any floating dtype to (..., feature_dim = head_dim) in float32 (float64 stays), > 0.
    """

    positive = True

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.feature_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        x = at_least_float32(x)
        # Literally, ELU(x) + 1 loses all digits if exp(x) is below the rounding error of 1.
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp()) if is_transformed() else _EluPlusOne.apply(x)


class _EluPlusOne(torch.autograd.Function):
    """The map with its own backward pass, which torch.func does not take: autograd's takes several times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        features = x.clamp(max=0).exp_().add_(x.clamp(min=0))
        ctx.save_for_backward(features)
        return features

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # The derivative is phi(x) itself where phi(x) < 1, and 1 elsewhere.
        return grad * ctx.saved_tensors[0].clamp(max=1)
