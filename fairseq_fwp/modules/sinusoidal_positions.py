"""Absolute sinusoidal positions for any integer positions, so that decoding can go on from a count."""

import torch
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor, nn


class SinusoidalPositions(nn.Module):
    """Vaswani et al. 2017, Sec. 3.5, in fairseq's layout (sines, then cosines) and with its offset.

    fairseq's own module takes the length of the prefix for the position when it decodes, and so must see the whole
    prefix; this one takes positions (B, L), 0 = the first token, and returns (B, L, embed_dim). Its table grows on
    demand and is in no checkpoint. offset: fairseq's number of the first position, padding index + 1.
    """

    table: Tensor

    def __init__(self, embed_dim: int, offset: int, initial_size: int = 1024) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.offset = offset
        self.register_buffer("table", self._rows(initial_size), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        needed = int(positions.max()) + 1 if positions.numel() else 0
        if needed > len(self.table):
            self.table = self._rows(max(needed, 2 * len(self.table))).to(self.table)
        return self.table[positions]

    def _rows(self, count: int) -> Tensor:
        return SinusoidalPositionalEmbedding.get_embedding(count + self.offset, self.embed_dim)[self.offset :]


class VaswaniPositions(nn.Module):
    """Vaswani et al. 2017, Sec. 3.5, as printed: the first position is 0, and the wavelengths are 10000^(2i / D) 2 pi.

    Sines come before cosines, as in the public code of Transformer-XL. fairseq's layout has other wavelengths:
    10000^(i / (D/2 - 1)) 2 pi. positions (B, L) -> (B, L, embed_dim) in float32, or float64 in a model of float64.
    """

    wide: Tensor

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.register_buffer("wide", torch.zeros(()), persistent=False)  # follows the model's dtype

    def forward(self, positions: Tensor) -> Tensor:
        return sinusoids(positions.to(torch.promote_types(self.wide.dtype, torch.float32)), self.embed_dim)


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """positions (...) -> (..., dim): sines, then cosines, of wavelengths from 2 pi to 10000 * 2 pi."""
    frequencies = 10000 ** (-torch.arange(0, dim, 2, device=positions.device, dtype=positions.dtype) / dim)
    angles = positions.unsqueeze(-1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :dim]
