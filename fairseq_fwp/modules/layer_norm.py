"""The normalisation of a token's vector: layer or RMS normalisation."""

from torch import nn

from fairseq_fwp.checks import check


def layer_norm(dim: int, rms_norm: bool = False, epsilon: float = 1e-5) -> nn.Module:
    """Return layer normalisation, or RMS normalisation without shift (Zhang & Sennrich 2019, arXiv 1910.07467)."""
    check(epsilon > 0, f"`norm_epsilon` must be above 0, got {epsilon}")
    return nn.RMSNorm(dim, eps=epsilon) if rms_norm else nn.LayerNorm(dim, eps=epsilon)
