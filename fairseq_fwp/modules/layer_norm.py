"""The normalisation of a token's vector: layer or RMS normalisation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.ops.checks import check
from fairseq_fwp.ops.rows import Opening, rms_norm


class RmsNorm(nn.RMSNorm):
    """RMS normalisation without shift (Zhang & Sennrich 2019, arXiv 1910.07467), followed by a gate if there is one."""

    def forward(self, x: Tensor, gate: Tensor | None = None, opening: Opening = F.silu) -> Tensor:
        """Return x (..., D) normalised, times opening(gate)."""
        epsilon = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, epsilon, gate, opening)


def layer_norm(dim: int, rms_norm: bool = False, epsilon: float = 1e-5) -> nn.Module:
    """Return layer normalisation, or RMS normalisation."""
    check(epsilon > 0, f"`norm_epsilon` must be above 0, got {epsilon}")
    return RmsNorm(dim, eps=epsilon) if rms_norm else nn.LayerNorm(dim, eps=epsilon)
