"""Absolute positions for any integers, so that decoding and streams can continue from a count.

A decoder calls its positions with the places (B, L) of tokens in their rows, 0 = the first token, for vectors (B, L,
embed_dim). It also says whether it is decoding, where the end of a sample is not known.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.ops.checks import check


class LearnedPositions(nn.Module):
    """A vector for each of `count` positions. Raises ValueError for a position without a vector."""

    def __init__(self, count: int, embed_dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(count, embed_dim)

    def forward(self, positions: Tensor, decoding: bool = False) -> Tensor:
        # A compiled graph takes one path for all inputs: it has only the error of the lookup.
        if not torch.compiler.is_compiling() and positions.numel():
            count, needed = self.table.num_embeddings, int(positions.max()) + 1
            requirement = f"the text must have at most {count} tokens, the positions that the model has learned"
            check(needed <= count, f"{requirement}, got {needed}")
        vectors: Tensor = self.table(positions)
        return vectors


class SinusoidalPositions(nn.Module):
    """Sinusoids of Vaswani et al. 2017, Sec. 3.5, in fairseq's layout (sines, then cosines) and with its offset.

    They are float32. There is no table, so that a stream may have a hundred million tokens.
    offset: fairseq's number of the first position, padding index + 1.
    """

    def __init__(self, embed_dim: int, offset: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.offset = offset

    def forward(self, positions: Tensor, decoding: bool = False) -> Tensor:
        half = self.embed_dim // 2
        # float64: in float32 the angle of position ten million is off by half a radian.
        exponents = torch.arange(half, dtype=torch.float64, device=positions.device) / max(half - 1, 1)
        angles = (positions + self.offset).unsqueeze(-1) * torch.exp(-math.log(10000) * exponents)
        return F.pad(torch.cat([angles.sin(), angles.cos()], dim=-1).float(), (0, self.embed_dim % 2))


class CountedPositions(nn.Module):
    """`SinusoidalPositions` of tokens (B, L), with the interface of fairseq's Transformer; padding is not counted."""

    # fairseq's encoder and decoder read this; sinusoids have no last position.
    max_positions = 10**6

    def __init__(self, embed_dim: int, padding_idx: int) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        self.sinusoids = SinusoidalPositions(embed_dim, offset=padding_idx + 1)
        self.register_buffer("dtype_of_model", torch.empty(0), persistent=False)

    def forward(self, tokens: Tensor, incremental_state: dict[str, object] | None = None) -> Tensor:
        """Return (B, L, embed_dim) in the model's dtype; in decoding (B, 1, embed_dim), of the last token."""
        token = tokens.ne(self.padding_idx)
        if incremental_state is not None:
            vectors = self.sinusoids(token.sum(1, keepdim=True) - 1)
        else:
            table = self.sinusoids(torch.arange(tokens.shape[1], device=tokens.device))
            vectors = F.embedding((token.cumsum(1) - 1).clamp(min=0), table)
        return vectors.to(self.dtype_of_model)


class VaswaniPositions(nn.Module):
    """Sinusoids of Vaswani et al. 2017, Sec. 3.5, as printed, of distances from the end of the sample, which has 0.

    Wavelengths are 10000^(2i / D) 2 pi, as in the public code of Transformer-XL; fairseq's are 10000^(i / (D/2 - 1)) 2
    pi. Vectors are float64. sample_length: in decoding, samples of this length follow each other.
    """

    def __init__(self, embed_dim: int, sample_length: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.sample_length = sample_length

    def forward(self, positions: Tensor, decoding: bool = False) -> Tensor:
        end = self.sample_length - 1
        distances = (end - positions) % self.sample_length if decoding else positions[:, -1:] - positions
        return sinusoids(distances.double(), self.embed_dim)


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """Return (..., dim) for positions (...): sines, then cosines, of wavelengths from 2 pi to 10000 * 2 pi."""
    frequencies = 10000 ** (-torch.arange(0, dim, 2, device=positions.device, dtype=positions.dtype) / dim)
    angles = positions.unsqueeze(-1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[..., :dim]
