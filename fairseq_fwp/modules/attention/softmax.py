"""Causal softmax attention with the interface of fast weight attention, over the whole past or a window: the baseline.

Shapes: B batch, L tokens, S tokens seen so far, w window, n blocks of b tokens. H heads of size d, G heads of keys and
values, D embed_dim.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.modules.attention.base import Alignment, Attention, Marks, head_size, join_padding, visible_keys
from fairseq_fwp.modules.layer_norm import layer_norm
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.checks import check
from fairseq_fwp.ops.operator import is_transformed

Scaling: TypeAlias = tuple[float, float, float, float]


class KeyValueCache(NamedTuple):
    """All keys and values so far, (B, G, S, d), and a mask of padding (B, S), None = no padding."""

    keys: Tensor
    values: Tensor
    padding: Tensor | None = None

    def last(self, count: int) -> "KeyValueCache":
        """Return the newest `count` tokens, or all if there are fewer."""
        start = max(self.keys.shape[2] - count, 0)
        padding = None if self.padding is None else self.padding[:, start:]
        return KeyValueCache(self.keys[:, :, start:], self.values[:, :, start:], padding)


@dataclass
class KeyValueMemory:
    """Keys and values of tokens, without parameters, which softmax(q k^T / sqrt(d)) reads.

    window: w, the number of tokens that a token sees, itself included, None = all before it too;
    rope_theta: base of the angles by which q and k are rotated, None = no rotation: see `rotate`;
    rope_scaling: arguments of `scale_frequencies`, None = not scaled. Raises ValueError for a window below 1.
    """

    window: int | None = None
    rope_theta: float | None = None
    rope_scaling: Scaling | None = None

    def __post_init__(self) -> None:
        check(self.window is None or self.window >= 1, f"`window` must be at least 1 token, got {self.window}")

    def write_and_read(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueCache | None, padding: Tensor | None, dropout: float
    ) -> tuple[Tensor, KeyValueCache]:
        """Return the output (B, H, L, d) of q, after k and v (B, G, L, d) are added, and the cache of what is kept.

        padding (B, L): True at tokens that other tokens do not attend to and windows do not count; dropout: of the
        attention weights.
        """
        cache = extend(state, k, v, padding)
        if self.window is None:
            return self._attend(q, cache, dropout), cache
        if cache.padding is None:
            y = self._attend_within(self.window, q, cache, dropout)
        else:
            alignment = Alignment(cache.padding, q.shape[2])
            cache = KeyValueCache(alignment.align(cache.keys), alignment.align(cache.values), alignment.padding)
            y = alignment.restore(self._attend_within(self.window, alignment.align_queries(q), cache, dropout))
        return y, cache.last(self.window - 1)

    def tokens(self, length: int, carried: bool = False) -> int:
        """Return how many tokens it keeps of a sequence of `length`, or of such segments if the state is carried."""
        if self.window is None:
            return length
        return self.window if carried else min(length, self.window)

    def _attend(self, q: Tensor, cache: KeyValueCache, dropout: float) -> Tensor:
        """Attend to the whole cache, whose last tokens are those of q (B, H, L, d)."""
        length, total = q.shape[2], cache.keys.shape[2]
        masked = cache.padding is not None or length not in (1, total)
        mask = visible_keys(length, total, cache.padding, q.device) if masked else None
        causal = mask is None and length > 1 and length == total  # one token sees all: a graph needs no comparison
        q, keys = self.turn(q, cache)
        return attend(q, keys, cache.values, mask, dropout, causal)

    def _attend_within(self, window: int, q: Tensor, cache: KeyValueCache, dropout: float) -> Tensor:
        """Attend in blocks of b <= w queries, each over the w - 1 + b keys that its tokens see."""
        batch, _, length, _ = q.shape
        total, past = cache.keys.shape[2], window - 1
        q, keys = self.turn(q, cache)
        block = max(min(window, length), 1)
        before, fill = past - (total - length), -length % block if length else 1
        keys, values = (
            F.pad(part, (0, 0, before, fill)).unfold(2, past + block, block).transpose(-1, -2)
            for part in (keys, cache.values)
        )  # (B, G, n, w - 1 + b, d)
        queries = F.pad(q, (0, 0, 0, fill)).unflatten(2, (-1, block))
        padding = q.new_zeros(batch, total, dtype=torch.bool) if cache.padding is None else cache.padding
        padding = F.pad(padding, (before, fill), value=True).unfold(1, past + block, block)  # (B, n, w - 1 + b)
        visible = visible_keys(block, past + block, padding.flatten(0, 1), q.device, window)
        queries, keys, values = (part.transpose(1, 2).flatten(0, 1) for part in (queries, keys, values))
        y = attend(queries, keys, values, visible, dropout)  # (B n, H, b, d)
        return y.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)[:, :, :length]

    def turn(self, q: Tensor, cache: KeyValueCache) -> tuple[Tensor, Tensor]:
        """Return q and all keys, rotated by their places among the tokens of the cache, if the attention rotates.

        Only differences of places matter: the cache may begin at any token. Padding has no place.
        """
        keys, padding = cache.keys, cache.padding
        if self.rope_theta is None:
            return q, keys
        total = keys.shape[2]
        places = torch.arange(total, device=q.device) if padding is None else (~padding).long().cumsum(1).unsqueeze(1)
        turned = partial(rotate, theta=self.rope_theta, scaling=self.rope_scaling)
        return turned(q, places[..., total - q.shape[2] :]), turned(keys, places)


class SoftmaxAttention(Attention[KeyValueCache]):
    """Softmax attention over the past: softmax(q k^T / sqrt(d)) v (Vaswani et al. 2017).

    embed_dim: D; num_heads: H; dropout: of the attention weights; bias: of all projections, as in fairseq and GPT-2;
    softmax_heads: H instead of num_heads, which is then that of other layers;
    kv_heads: G, a divisor of H, so that H / G heads of queries in a row share keys and values; None = H (Ainslie et al.
        2023, arXiv 2305.13245);
    head_dim: d, None = D / H;
    qk_norm, norm_epsilon: RMS normalisation of each head's q and k, before they are rotated, as in Qwen3 (Yang et al.
        2025, arXiv 2505.09388), and its epsilon;
    qkv_bias: only of q, k and v; rope_theta, window: see `KeyValueMemory`; with a window time and memory are O(L w);
    rope_scaling: arguments of `scale_frequencies` as text, such as 8,1,4,8192, None = not scaled.
    """

    named_as_rule = True
    ages = False
    states = (KeyValueCache,)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        bias: bool = False,
        softmax_heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        norm_epsilon: float = 1e-5,
        qkv_bias: bool = False,
        rope_theta: float | None = None,
        rope_scaling: str | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        if softmax_heads is not None:
            divides = softmax_heads >= 1 and embed_dim >= 1 and (head_dim is not None or embed_dim % softmax_heads == 0)
            check(divides, f"`softmax_heads` must divide `embed_dim` = {embed_dim}, got {softmax_heads}")
        self.num_heads = heads = softmax_heads or num_heads
        size = head_size(embed_dim, heads, head_dim, "head_dim")
        groups = heads if kv_heads is None else kv_heads
        check(
            groups >= 1 and heads % groups == 0, f"`kv_heads` must divide the number of heads, {heads}, got {kv_heads}"
        )
        if rope_theta is not None:
            check(rope_theta > 0, f"`rope_theta` must be above 0, got {rope_theta}")
            check(size % 2 == 0, f"`rope_theta` must be left out with heads of an odd size, got heads of {size}")
        rotates = rope_theta is not None or rope_scaling is None
        check(rotates, "`rope_theta` must be given with `rope_scaling`, got none")
        self.memory = KeyValueMemory(window, rope_theta, None if rope_scaling is None else read_scaling(rope_scaling))
        self.constant_state = window is not None
        self.dropout = dropout
        self.sizes = [heads * size, groups * size, groups * size]
        self.in_proj = nn.Linear(embed_dim, sum(self.sizes), bias=bias or qkv_bias)
        self.query_norm, self.key_norm = (layer_norm(size, True, norm_epsilon) if qk_norm else None for _ in range(2))
        self.out_proj = nn.Linear(heads * size, embed_dim, bias=bias)

    def read(self, x: Tensor, state: KeyValueCache | None, marks: Marks) -> tuple[Tensor, KeyValueCache]:
        """Return y (B, L, D) for x (B, L, D), and the cache of all tokens, or of the last window - 1."""
        y, cache = self.memory.write_and_read(
            *self.project(x), state, marks.padding, self.dropout if self.training else 0.0
        )
        return self.out_proj(self.merge_heads(y)), cache

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, L, d), k and v (B, G, L, d) of x (B, L, D)."""
        size = self.sizes[0] // self.num_heads
        q, k, v = (y.unflatten(-1, (-1, size)) for y in self.in_proj(x).split(self.sizes, -1))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def state_size(self, length: int, carried: bool = False) -> int:
        return 2 * self.memory.tokens(length, carried) * self.sizes[1]  # keys and values


def rotate(x: Tensor, places: Tensor, theta: float, scaling: Scaling | None = None) -> Tensor:
    """Return x (B, H, L, d) with the pair x_i, x_(i + d/2) rotated by the angle places theta^(-2 i / d), i < d / 2.

    Rotary positions: Su et al. 2021, arXiv 2104.09864, Eq. 34. places: (L,), or (B, 1, L); scaling: of the frequencies
    theta^(-2 i / d), see `scale_frequencies`.
    """
    half = x.shape[-1] // 2
    wide = at_least_float32(x)
    powers = torch.arange(half, dtype=wide.dtype, device=x.device) / half
    frequencies = theta**-powers
    if scaling is not None:
        frequencies = scale_frequencies(frequencies, *scaling)
    angles = places.unsqueeze(-1) * frequencies
    (left, right), cos, sin = wide.split(half, -1), angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1).to(x.dtype)


def scale_frequencies(frequencies: Tensor, factor: float, low: float, high: float, tokens: float) -> Tensor:
    """Return frequencies for texts `factor` times as long as the `tokens` of the training, as in Llama 3.1's code.

    Those that turn at most `low` times in these tokens are divided by `factor`. Those that turn at least `high` times
    stay. In between, the share that stays grows linearly with the turns.
    """
    turns = tokens * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (share + (1 - share) / factor)


def read_scaling(text: str) -> Scaling:
    """Return the arguments of `scale_frequencies` in a text such as 8,1,4,8192. Raises ValueError for another one."""
    try:
        factor, low, high, tokens = (float(number) for number in text.split(","))
    except ValueError:
        factor = low = high = tokens = math.nan
    positive = 0 < factor < math.inf and 0 <= low < high < math.inf and 0 < tokens < math.inf
    check(positive, f"`rope_scaling` must be a factor, two ascending numbers of turns, and tokens, got {text!r}")
    return factor, low, high, tokens


def attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, dropout: float, is_causal: bool = False
) -> Tensor:
    """Return torch's attention of queries, keys and values (B, G, S, d), G of which divides the heads of q.

    Its kernels have no forward mode, and no vmap.
    """
    if keys.shape[1] != q.shape[1]:
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
    if not is_transformed():
        return F.scaled_dot_product_attention(q, keys, values, mask, dropout, is_causal)
    from torch.nn.attention import SDPBackend, sdpa_kernel  # which would import the compiler at every start

    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, keys, values, mask, dropout, is_causal)


def extend(state: KeyValueCache | None, k: Tensor, v: Tensor, padding: Tensor | None) -> KeyValueCache:
    """Return the cache followed by k and v (B, G, L, d) and their padding (B, L)."""
    if state is None:
        return KeyValueCache(k, v, padding)
    padding = join_padding(state.padding, state.keys.shape[2], padding, k.shape[2])
    return KeyValueCache(torch.cat([state.keys, k], dim=2), torch.cat([state.values, v], dim=2), padding)
