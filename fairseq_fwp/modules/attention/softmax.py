"""Causal softmax attention with the interface of fast weight attention: the baseline.

Shapes: B batch, L tokens, S tokens seen so far, H heads, D embed_dim, d = D / H.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.modules.attention.alignment import join_padding, reset_padding
from fairseq_fwp.modules.attention.heads import Attention, check_heads
from fairseq_fwp.ops.rule import is_transformed


class KeyValueCache(NamedTuple):
    """All keys and values so far, (B, H, S, d), and a mask of padding (B, S), None = no padding."""

    keys: Tensor
    values: Tensor
    padding: Tensor | None = None

    def detach(self) -> "KeyValueCache":
        """The same values, detached from the graph."""
        return KeyValueCache(self.keys.detach(), self.values.detach(), self.padding)

    def reorder(self, new_order: Tensor) -> "KeyValueCache":
        """The rows new_order (B',) of the batch, as beam search selects them."""
        return KeyValueCache(
            self.keys.index_select(0, new_order),
            self.values.index_select(0, new_order),
            None if self.padding is None else self.padding.index_select(0, new_order),
        )

    def reset(self, rows: Tensor) -> "KeyValueCache":
        """Return the state, empty in the rows of the batch that are True. rows: (B,) bool."""
        return KeyValueCache(self.keys, self.values, reset_padding(self.padding, rows, self.keys.shape[2]))

    def last(self, count: int) -> "KeyValueCache":
        """The newest `count` tokens, or all if there are fewer."""
        start = max(self.keys.shape[2] - count, 0)
        return KeyValueCache(
            self.keys[:, :, start:],
            self.values[:, :, start:],
            None if self.padding is None else self.padding[:, start:],
        )


class SoftmaxAttention(Attention):
    """Softmax attention over the past: softmax(q k^T / sqrt(d)) v (Vaswani et al. 2017).

    embed_dim: D; num_heads: H; dropout: of the attention weights; bias: of all projections, as in fairseq and GPT-2.
    """

    constant_state = False
    named_as_rule = True
    states = (KeyValueCache,)

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, *, bias: bool = False) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.num_heads = num_heads
        self.dropout = dropout
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def forward(
        self, x: Tensor, state: KeyValueCache | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, KeyValueCache]:
        """Return y (B, L, D) for x (B, L, D), and the cache. key_padding_mask (B, L): True at padding."""
        q, k, v = self.project(x)
        past = 0 if state is None else state.keys.shape[2]
        cache = extend(state, k, v, key_padding_mask)
        mask = _attention_mask(x.shape[1], past, cache.padding, x.device)
        y = attend(
            q,
            cache.keys,
            cache.values,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None and past == 0,
        )
        return self.out_proj(self.merge_heads(y)), cache

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v, each (B, H, L, d), of x (B, L, D)."""
        return self.in_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def state_size(self, length: int, carried: bool = False) -> int:
        """Return the numbers in the keys and values of a sequence of `length` tokens."""
        return 2 * length * self.out_proj.in_features


def attend(q: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Return torch's attention of queries, keys and values. Its kernels have no forward mode, and no vmap."""
    if not is_transformed():
        return F.scaled_dot_product_attention(q, keys, values, **options)
    from torch.nn.attention import SDPBackend, sdpa_kernel  # which would import the compiler at every start

    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, keys, values, **options)


def extend(state: KeyValueCache | None, k: Tensor, v: Tensor, padding: Tensor | None) -> KeyValueCache:
    """Return the cache followed by k and v (B, H, L, d) and their padding (B, L)."""
    if state is None:
        return KeyValueCache(k, v, padding)
    padding = join_padding(state.padding, state.keys.shape[2], padding, k.shape[2])
    return KeyValueCache(torch.cat([state.keys, k], dim=2), torch.cat([state.values, v], dim=2), padding)


def _attention_mask(length: int, past: int, padding: Tensor | None, device: torch.device) -> Tensor | None:
    """Return a mask, True where a query (of `length`) may see a key (of past + length), or None if not needed."""
    if padding is None and (past == 0 or length == 1):
        return None
    query = torch.arange(past, past + length, device=device)[:, None]
    key = torch.arange(past + length, device=device)[None, :]
    mask = key <= query
    if padding is None:
        return mask
    # A padded query sees itself: a row without visible keys would be NaN.
    return (mask & (~padding[:, None, :] | (key == query))).unsqueeze(1)
