"""Absolute sinusoidal positions for any integer positions, so that decoding can go on from a count."""

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
