"""Absolute positions with a learned vector each, as in GPT and fairseq's `--decoder-learned-pos`."""

import torch
from torch import Tensor, nn


class LearnedPositions(nn.Module):
    """Vectors (B, L, embed_dim) of positions (B, L), 0 = the first token.

    count: the number of positions. Raises ValueError for a position without a vector.
    """

    def __init__(self, count: int, embed_dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(count, embed_dim)

    def forward(self, positions: Tensor) -> Tensor:
        count = self.table.num_embeddings
        # A compiled graph takes one path for all inputs: it has only the error of the lookup.
        if not torch.compiler.is_compiling() and positions.numel() and int(positions.max()) >= count:
            raise ValueError(
                f"the text must have at most {count} tokens, the positions that the model has learned, got "
                f"{int(positions.max()) + 1}"
            )
        found: Tensor = self.table(positions)
        return found
