"""Word embeddings whose size falls with the word's frequency, as Transformer-XL's `div_val` has them."""

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

# The paper does not give initial values; this is from its public code.
PROJECTION_STD = 0.01


class AdaptiveInput(nn.Module):
    """Embeddings in clusters of falling word frequency (Baevski & Auli 2019, arXiv 1809.10853, Sec. 3).

    Words of cluster c, between two cutoffs, have D / div_val^c dimensions and a projection to D without bias, even in
    the first cluster. fairseq's module of this name treats the padding index as a word of every cluster, and then does
    not train that word.

    vocab_size: V; embed_dim: D; cutoffs: ascending ranks below V, or empty; div_val: at least 1;
    padding_idx: its embedding is always zero. Raises ValueError for invalid cutoffs or div_val, or if
    the last cluster would have no dimension.
    """

    def __init__(
        self, vocab_size: int, embed_dim: int, cutoffs: list[int], div_val: int, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        check_cutoffs(cutoffs, vocab_size, padding_idx)
        if div_val < 1:
            raise ValueError(f"`div_val` must be at least 1, got {div_val}")
        if embed_dim < div_val ** len(cutoffs):
            raise ValueError(
                f"`embed_dim` must be at least {div_val ** len(cutoffs)}, which is `div_val` to the power of the "
                f"number of cutoffs, got {embed_dim}"
            )
        self.embedding_dim = embed_dim
        self.num_embeddings = vocab_size
        self.padding_idx = padding_idx
        self.bounds = [0, *cutoffs, vocab_size]
        sizes = [embed_dim // div_val**index for index in range(len(cutoffs) + 1)]
        self.tables: Any = nn.ModuleList(
            nn.Embedding(high - low, size, padding_idx if low == 0 else None)
            for (low, high), size in zip(pairwise(self.bounds), sizes, strict=True)
        )
        self.projections: Any = nn.ModuleList(nn.Linear(size, embed_dim, bias=False) for size in sizes)
        self.initialize()

    def initialize(self) -> None:
        """Draw the projections as the paper's public code does."""
        for projection in self.projections:
            nn.init.normal_(projection.weight, std=PROJECTION_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return embeddings (B, L, D) of tokens (B, L)."""
        flat = tokens.flatten()
        x = self.projections[0].weight.new_zeros(len(flat), self.embedding_dim)
        clusters = zip(pairwise(self.bounds), self.tables, self.projections, strict=True)
        for (low, high), table, projection in clusters:
            rows = ((flat >= low) & (flat < high)).nonzero().squeeze(1)
            x = x.index_copy(0, rows, projection(table(flat[rows] - low)).to(x.dtype))
        return x.unflatten(0, tokens.shape)

    def extra_repr(self) -> str:
        return f"bounds={self.bounds}"


def check_cutoffs(cutoffs: list[int], vocab_size: int, padding_idx: int | None) -> None:
    """Check that the cutoffs divide the vocabulary, with padding in the first cluster; raise ValueError otherwise."""
    bounds, least = [0, *cutoffs, vocab_size], 0 if padding_idx is None else padding_idx + 1
    if any(low >= high for low, high in pairwise(bounds)) or bounds[1] < least:
        raise ValueError(
            f"`cutoffs` must be ascending, from {max(least, 1)} to below the vocabulary's {vocab_size} words, got "
            f"{','.join(map(str, cutoffs))}"
        )
