"""Absolute positions with a learned vector each, as GPT and fairseq's `--decoder-learned-pos` have them."""

import torch
from torch import Tensor, nn


class LearnedPositions(nn.Module):
    """positions (B, L), 0 = the first token -> (B, L, embed_dim).

    count: of positions that there are. Raises ValueError for one beyond: it has no vector.
    """

    def __init__(self, count: int, embed_dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(count, embed_dim)

    def forward(self, positions: Tensor) -> Tensor:
        count = self.table.num_embeddings
        # A compiler takes one path for all inputs: its graph has the error of the lookup.
        if not torch.compiler.is_compiling() and positions.numel() and int(positions.max()) >= count:
            raise ValueError(
                f"token {int(positions.max()) + 1} has no position: the model has learned {count}, and neither reads "
                "nor generates more after one another"
            )
        found: Tensor = self.table(positions)
        return found
