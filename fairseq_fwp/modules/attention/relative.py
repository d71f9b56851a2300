"""Causal attention over a segment and the memory before it, with relative positions: Transformer-XL.

Dai et al. 2019, arXiv 1901.02860, Sec. 3. With E the layer's input and R_n the sinusoids of the distance n = i - j,

    A_ij = E_i W_q W_kE E_j + E_i W_q W_kR R_n + u W_kE E_j + v W_kR R_n      (a) + (b) + (c) + (d)

Shapes: B batch, L tokens, M tokens in the memory, S = M + L, H heads, D embed_dim, d = D / H.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.modules.attention.base import (
    Alignment,
    Attention,
    Marks,
    check_heads,
    join_padding,
    reorder,
    visible_keys,
)
from fairseq_fwp.modules.attention.softmax import attend
from fairseq_fwp.modules.dropout import Dropout
from fairseq_fwp.modules.positions import sinusoids
from fairseq_fwp.ops.arguments import state_dtype

# The paper does not give initial values; this is from its public code, for u, v and learned vectors.
POSITION_STD = 0.02


class SegmentMemory(NamedTuple):
    """The memory: the layer's inputs before the segment, hidden (B, M, D), and their padding (B, M), None = no padding.

    Padding is on the left. The paper's SG, no gradient into the memory, is `detach`: call it between two segments of
    training.
    """

    hidden: Tensor
    padding: Tensor | None = None

    def last(self, count: int) -> "SegmentMemory":
        """Return the newest `count` tokens, or all if there are fewer."""
        start = max(self.hidden.shape[1] - count, 0)
        return SegmentMemory(self.hidden[:, start:], None if self.padding is None else self.padding[:, start:])


class RelativeCache(NamedTuple):
    """The memory for decoding: keys and values (B, H, M, d) and distances are projected only once.

    distances (H, M, vector_size): W_kR R_n for n = 0 ... M - 1; padding as in `SegmentMemory`.
    """

    keys: Tensor
    values: Tensor
    distances: Tensor
    padding: Tensor | None = None

    def reorder(self, rows: Tensor) -> "RelativeCache":
        """Return the rows (B',) of the batch; distances are those of all rows."""
        return RelativeCache(*reorder((self.keys, self.values), rows), self.distances, reorder(self.padding, rows))

    def last(self, count: int) -> "RelativeCache":
        """Return the newest `count` tokens, or all if there are fewer."""
        start = max(self.keys.shape[2] - count, 0)
        keys, values, distances = self.keys[:, :, start:], self.values[:, :, start:], self.distances[:, :count]
        return RelativeCache(keys, values, distances, None if self.padding is None else self.padding[:, start:])


class SinusoidalDistances(nn.Module):
    """Terms (b), (c) and (d) of the paper: sinusoids R_n, W_kR, u and v.

    embed_dim: D; num_heads: H; clamp_len: larger distances count as this one, None = no limit; dropout: of R.
    """

    def __init__(self, embed_dim: int, num_heads: int, clamp_len: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.clamp_len = clamp_len
        self.vector_size = embed_dim // num_heads
        self.proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.content_bias = nn.Parameter(torch.empty(num_heads, self.vector_size))
        self.position_bias = nn.Parameter(torch.empty(num_heads, self.vector_size))
        self.dropout = Dropout(dropout, self)
        self.initialize()

    def initialize(self) -> None:
        """Draw u and v."""
        nn.init.normal_(self.content_bias, std=POSITION_STD)
        nn.init.normal_(self.position_bias, std=POSITION_STD)

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of the keys and of the distances for q (B, H, L, d)."""
        return q + self.content_bias.unsqueeze(1).to(q.dtype), q + self.position_bias.unsqueeze(1).to(q.dtype)

    def forward(self, start: int, stop: int) -> Tensor:
        """Return W_kR R_n (H, stop - start, d) for the distances n from start on."""
        weight = self.proj.weight
        distances = torch.arange(start, stop, device=weight.device, dtype=state_dtype(weight.dtype))
        if self.clamp_len is not None:
            distances = distances.clamp(max=self.clamp_len)
        rows = self.proj(self.dropout(sinusoids(distances, weight.shape[1]).to(weight.dtype)))
        return rows.unflatten(-1, (len(self.content_bias), -1)).transpose(0, 1)


class LearnedDistances(nn.Module):
    """The positions of Shaw et al. 2018, arXiv 1803.02155, as in the comparison of Dai et al. 2019: only (a) and (b).

    W_kR R_n is one learned vector for each distance and head.

    num_heads: H; head_dim: d; clamp_len: the largest distance with its own vector, Shaw's clipping distance k;
    biased: (c) and (d) too, as in the public code of Dai et al. (--attn_type 1). u is for each head, and (d) is a
    learned number for each distance and head, the last number of its vector.
    """

    def __init__(self, num_heads: int, head_dim: int, clamp_len: int, biased: bool = False) -> None:
        super().__init__()
        self.clamp_len = clamp_len
        self.vector_size = head_dim + biased
        self.table = nn.Parameter(torch.empty(num_heads, clamp_len + 1, self.vector_size))
        self.content_bias = nn.Parameter(torch.empty(num_heads, head_dim)) if biased else None
        self.initialize()

    def initialize(self) -> None:
        """Draw the vectors and u; the numbers of (d) start at 0."""
        nn.init.normal_(self.table, std=POSITION_STD)
        if self.content_bias is not None:
            nn.init.normal_(self.content_bias, std=POSITION_STD)
            nn.init.zeros_(self.table[..., -1])

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of the keys and of the distances for q (B, H, L, d)."""
        if self.content_bias is None:
            return q, q
        return q + self.content_bias.unsqueeze(1).to(q.dtype), F.pad(q, (0, 1), value=1.0)

    def forward(self, start: int, stop: int) -> Tensor:
        """Return the vectors (H, stop - start, vector_size) of the distances from start on."""
        return self.table[:, torch.arange(start, stop, device=self.table.device).clamp(max=self.clamp_len)]


class RelativeAttention(Attention[SegmentMemory | RelativeCache]):
    """Attention softmax((a) + (b) + (c) + (d)) over the memory and the segment's past, with projections without bias.

    embed_dim: D; num_heads: H; positions: a `SinusoidalDistances` or `LearnedDistances`;
    window: a token sees itself and window - 1 tokens before it, None = all; dropout: of the attention weights.

    The scores take O(B H L S) memory: vectors of distances are not expanded to pairs of tokens.
    """

    ages = False
    states = (SegmentMemory,)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        positions: SinusoidalDistances | LearnedDistances,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.num_heads = num_heads
        self.positions = positions
        self.window = window
        self.dropout = dropout
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def read(
        self, x: Tensor, state: SegmentMemory | RelativeCache | None, marks: Marks
    ) -> tuple[Tensor, SegmentMemory | RelativeCache]:
        """Return y (B, L, D) for x (B, L, D), and the memory followed by x, of the same type as `state`."""
        memory = SegmentMemory(x[:, :0]) if state is None else state
        past = self.cache(memory) if isinstance(memory, SegmentMemory) else memory
        q, k, v = map(self.split_heads, self.in_proj(x).chunk(3, -1))
        keys, values = torch.cat([past.keys, k], dim=2), torch.cat([past.values, v], dim=2)
        projected, total = past.distances.shape[1], keys.shape[2]
        distances = torch.cat([past.distances, self.positions(projected, total).to(k.dtype)], dim=1)
        padding = join_padding(past.padding, past.keys.shape[2], marks.padding, x.shape[1])
        hidden = torch.cat([memory.hidden, x], dim=1) if isinstance(memory, SegmentMemory) else None
        if padding is None:
            y = self._attend(q, keys, values, distances, padding)
        else:
            alignment = Alignment(padding, x.shape[1])
            keys, values, padding = alignment.align(keys), alignment.align(values), alignment.padding
            hidden = None if hidden is None else alignment.align(hidden)
            y = alignment.restore(self._attend(alignment.align_queries(q), keys, values, distances, padding))
        after = RelativeCache(keys, values, distances, padding) if hidden is None else SegmentMemory(hidden, padding)
        return self.out_proj(self.merge_heads(y)), after

    def cache(self, memory: SegmentMemory) -> RelativeCache:
        """Return the memory with its keys and values, for decoding; valid as long as the weights do not change."""
        embed_dim = self.in_proj.in_features
        projected = F.linear(memory.hidden, self.in_proj.weight[embed_dim:])
        keys, values = map(self.split_heads, projected.chunk(2, -1))
        distances = keys.new_zeros(self.num_heads, 0, self.positions.vector_size)
        return RelativeCache(keys, values, distances, memory.padding)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, distances: Tensor, padding: Tensor | None) -> Tensor:
        content, position = self.positions.queries(q)
        scores = _by_key(position * q.shape[-1] ** -0.5 @ distances.flip(1).transpose(-1, -2))
        visible = visible_keys(q.shape[2], keys.shape[2], padding, q.device, self.window)
        mask, dropout = scores.masked_fill(~visible, -torch.inf), self.dropout if self.training else 0.0
        return attend(content, keys, values, mask, dropout)


def _by_key(scores: Tensor) -> Tensor:
    """Return scores (..., L, S) by distance, the largest first, as a view (..., L, S) by key (Dai et al. 2019, App. B).

    The last query is S - 1 from the first key, so its row is in place. Each row above is shifted one more step to the
    right. After its distance 0 a row continues in the next row: these are keys of its future, which are masked.
    """
    length, total = scores.shape[-2:]
    return scores.flatten(-2)[..., length - 1 :].unfold(-1, total, max(total - 1, 1))
