"""Learned ReLU features, the feature map of pretrained Transformers fine-tuned into recurrent ones."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairseq_fwp.modules.feature_maps.feature_map import FeatureMap
from fairseq_fwp.modules.precision import at_least_float32


class LearnedRelu(FeatureMap):
    """The map phi(x) = ReLU(W x + b) with W (num_features, head_dim) and b learned.

    Kasai et al. 2021, arXiv 2103.13076, Sec. 2.2 (T2R); the baseline of Mao 2022, arXiv 2210.04243. One W and b serve
    the queries and keys of all heads of a layer: a map sees one vector at a time, not which head it belongs to. They
    start as PyTorch's linear layers do, uniform within 1 / sqrt(head_dim).

    Maps (..., head_dim) of any floating dtype to (..., feature_dim = num_features, default head_dim) in float32
    (float64 stays), >= 0. A vector on the negative side of every row of W maps to zero.

    Raises ValueError if num_features is not positive.
    """

    positive = True

    def __init__(self, head_dim: int, num_features: int | None = None) -> None:
        super().__init__()
        num_features = head_dim if num_features is None else num_features
        if num_features < 1:
            raise ValueError(f"`num_features` must be at least 1, got {num_features}")
        self.feature_dim = num_features
        self.linear = nn.Linear(head_dim, num_features)

    def initialize(self) -> None:
        """Draw W and b again."""
        self.linear.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = at_least_float32(x)
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, self.linear.weight.to(x.dtype), self.linear.bias.to(x.dtype)).relu()
