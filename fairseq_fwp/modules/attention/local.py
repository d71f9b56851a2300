"""Causal softmax attention within a window: the local baseline of Mao 2022, arXiv 2210.04243, Table 2.

Shapes: B batch, L tokens, M kept earlier tokens, H heads, D embed_dim, d = D / H, w window, n blocks of b tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_fwp.modules.attention.alignment import Alignment
from fairseq_fwp.modules.attention.softmax import KeyValueCache, SoftmaxAttention, attend, extend


class LocalAttention(SoftmaxAttention):
    """Softmax attention of each token over itself and the window - 1 tokens before it.

    Time and memory are O(L w), the state holds window - 1 tokens. Raises ValueError for a window below 1.
    """

    constant_state = True
    named_as_rule = False

    def __init__(
        self, embed_dim: int, num_heads: int, window: int, dropout: float = 0.0, *, bias: bool = False
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias=bias)
        if window < 1:
            raise ValueError(f"`window` must be at least 1 token, got {window}")
        self.window = window

    def forward(
        self, x: Tensor, state: KeyValueCache | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, KeyValueCache]:
        """Return y (B, L, D) for x (B, L, D), and the last window - 1 keys and values.

        key_padding_mask (B, L): True at tokens that other tokens do not attend to and windows do not count.
        """
        q, k, v = self.project(x)
        cache = extend(state, k, v, key_padding_mask)
        if cache.padding is None:
            y = self._attend(q, cache)
        else:
            alignment = Alignment(cache.padding, x.shape[1])
            cache = KeyValueCache(alignment.align(cache.keys), alignment.align(cache.values), alignment.padding)
            y = alignment.restore(self._attend(alignment.align_queries(q), cache))
        return self.out_proj(self.merge_heads(y)), cache.last(self.window - 1)

    def _attend(self, q: Tensor, cache: KeyValueCache) -> Tensor:
        """Attend in blocks of b <= w queries, each over the w - 1 + b keys that its tokens see."""
        batch, _, length, _ = q.shape
        block = max(min(self.window, length), 1)
        fill = -length % block
        before = self.window - 1 - (cache.keys.shape[2] - length)
        keys, values = (
            F.pad(part, (0, 0, before, fill)).unfold(2, self.window - 1 + block, block).transpose(-1, -2)
            for part in (cache.keys, cache.values)
        )  # (B, H, n, w - 1 + b, d)
        queries = F.pad(q, (0, 0, 0, fill)).unflatten(2, (-1, block))
        padding = q.new_zeros(batch, cache.keys.shape[2], dtype=torch.bool) if cache.padding is None else cache.padding
        padding = F.pad(padding, (before, fill), value=True).unfold(1, self.window - 1 + block, block)  # (B, n, ...)
        columns = torch.arange(self.window - 1 + block, device=q.device)
        distance = columns[self.window - 1 :, None] - columns
        band = (distance >= 0) & (distance < self.window)
        # A padded query sees itself: a row without visible keys would be NaN.
        visible = (band & ~padding.unsqueeze(2)) | (distance == 0)
        queries, keys, values = (part.transpose(1, 2).flatten(0, 1) for part in (queries, keys, values))
        y = attend(  # (B n, H, b, d)
            queries,
            keys,
            values,
            attn_mask=visible.flatten(0, 1).unsqueeze(1),
            dropout_p=self.dropout if self.training else 0.0,
        )
        return y.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)[:, :, :length]

    def state_size(self, length: int, carried: bool = False) -> int:
        """Return the numbers in the keys and values that one token of a sequence of `length` sees."""
        return super().state_size(self.window if carried else min(length, self.window))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, window={self.window}, dropout={self.dropout}"
