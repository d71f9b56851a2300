"""Deterministic parameter-free projection (DPFP)."""

import torch
from torch import Tensor

from fairseq_fwp.modules.feature_maps.feature_map import FeatureMap
from fairseq_fwp.modules.precision import at_least_float32


class Dpfp(FeatureMap):
    """The map phi_(i nu)(x) = r([x; -x])_i r([x; -x])_(i - nu) with r(a) = max(a, 0), for shifts 1 to nu.

    Schlag et al. 2021, arXiv 2102.11174, Eq. 37, in the order of its Listing 1 (App. C).
    Maps (..., head_dim) of any floating dtype to (..., feature_dim = 2 head_dim nu) in float32 (float64 stays),
    >= 0. A vector with no two positive neighbours maps to zero.

    Raises ValueError if nu is not in 1 ... 2 head_dim - 1, where every shift pairs different elements.
    """

    positive = True

    def __init__(self, head_dim: int, nu: int = 1) -> None:
        super().__init__()
        if not 1 <= nu <= 2 * head_dim - 1:
            raise ValueError(f"`nu` must be from 1 to 2 * key dimension - 1 = {2 * head_dim - 1}, got {nu}")
        self.nu = nu
        self.feature_dim = 2 * head_dim * nu

    def forward(self, x: Tensor) -> Tensor:
        x = at_least_float32(x)
        x = torch.cat([x, -x], dim=-1).relu()
        return torch.cat([x * x.roll(shift, dims=-1) for shift in range(1, self.nu + 1)], dim=-1)
