"""The base class of all attentions: their heads, and the interface that a decoder uses.

Shapes: B batch, L tokens, H heads, D embed_dim, d = D / H.
"""

from typing import Any

from torch import Tensor, nn


class Attention(nn.Module):
    """Attention with several heads. Causal attention is attention(x, state, key_padding_mask) -> (y, new state).

    constant_state: whether the size of the state has a bound, so that a stream may have any length;
    packs_documents: whether it takes `first`, so that a segment may hold several documents;
    named_as_rule: whether models select it as an update rule, because it has none;
    states: the types of its state.
    """

    constant_state = True
    packs_documents = False
    named_as_rule = False
    states: tuple[type[Any], ...] = ()
    num_heads: int

    def split_heads(self, x: Tensor) -> Tensor:
        """Return x (B, L, D) as (B, H, L, d)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        """Return x (B, H, L, d) as (B, L, D)."""
        return x.transpose(1, 2).flatten(2)

    def state_size(self, length: int, carried: bool = False) -> int:
        """Return the numbers in the state of a sequence of `length` tokens, or of such segments if it is carried."""
        raise NotImplementedError


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Raise ValueError unless num_heads divides embed_dim and heads are not empty."""
    if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
        raise ValueError(f"`embed_dim` must be divisible by `num_heads`, got {embed_dim} and {num_heads}")


def check_key_dim(key_dim: int) -> None:
    """Raise ValueError unless key_dim is at least 1."""
    if key_dim < 1:
        raise ValueError(f"`key_dim` must be at least 1, got {key_dim}")
