"""Softmax over the last tokens and the delta rule over all, side by side in one layer, on the same q, k and v.

The synchronous hybrid of Irie, Yau & Gershman 2025, "Blending Complementary Memory Systems in Hybrid Quadratic-Linear
Transformers" (arXiv 2506.00744), and its public code. Shapes: B batch, L tokens, H heads of size d, D embed_dim.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp import ops
from fairseq_fwp.modules.attention.base import Attention, Marks, head_size
from fairseq_fwp.modules.attention.softmax import KeyValueCache, KeyValueMemory
from fairseq_fwp.modules.layer_norm import layer_norm
from fairseq_fwp.modules.update_rules import to_unit_length
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.checks import check, look_up

# Numbers of the gate for each head of size d that mixes what the two memories give.
MIXES = {"channel": lambda size: size, "head": lambda size: 2, "sum": lambda size: 0}
LEAST_SQUARE = 1e-6  # added to the squared lengths of keys and queries, as published


class HybridState(NamedTuple):
    """The fast weights (B, H, d, d), and the keys and values of the window."""

    weights: Tensor
    cache: KeyValueCache


class Hybrid(Attention[HybridState]):
    """A window of softmax attention and fast weights, which both read and write every token (Sec. 3).

        [q k v] = W x, v <- silu(v)        f(u) = silu(u) / ||silu(u)||
        a = softmax(q K^T / sqrt(d)) V over the window        m = f(q) W / sqrt(d), with W as the delta rule writes it
        y = W_o RMSNorm(g * m + (1 - g) * a)

    The gate g, a sigmoid of the token, has a number a channel. With the mix "head" there are two gates a head, one for
    m and one for a. With "sum" the two are added.

    embed_dim: D; num_heads: H; window: tokens that softmax sees, itself included; dropout: of its weights;
    rope_theta: see `KeyValueMemory`; mix: a key of `MIXES`; negative_eigenvalues: rates up to 2 instead of 1;
    norm_epsilon: of the normalisation; backend: of the operator.
    Raises ValueError for a head count that does not divide embed_dim, no window, and an unknown mix.
    """

    named_as_rule = True
    states = (HybridState, KeyValueCache)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        window: int | None = None,
        rope_theta: float | None = None,
        mix: str = "channel",
        negative_eigenvalues: bool = False,
        norm_epsilon: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        size = head_size(embed_dim, num_heads, None)
        check(window is not None, "`window` must be given for softmax next to fast weights, got none")
        self.num_heads = num_heads
        self.dropout = dropout
        self.memory = KeyValueMemory(window, rope_theta)
        self.rate = 2.0 if negative_eigenvalues else 1.0
        self.backend = backend
        self.mix = mix
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.gates = nn.Linear(embed_dim, num_heads * (1 + look_up("`mix`", mix, MIXES)(size)), bias=False)
        self.read_out_norm = layer_norm(size, True, norm_epsilon)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def read(self, x: Tensor, state: HybridState | None, marks: Marks) -> tuple[Tensor, HybridState]:
        """Return y (B, L, D) for x (B, L, D), and the state after the last token: see `Attention.forward`."""
        q, k, v = map(self.split_heads, self.in_proj(x).chunk(3, -1))
        v = F.silu(v)
        gates = self.split_heads(self.gates(x)).sigmoid()  # of a head: the rate, then those of the mix
        beta = self.rate * at_least_float32(gates[..., 0])
        if marks.padding is not None:
            beta = beta.masked_fill(marks.padding.unsqueeze(1), 0)
        weights, cache = (None, None) if state is None else state
        recent, cache = self.memory.write_and_read(
            q, k, v, cache, marks.padding, self.dropout if self.training else 0.0
        )
        q, k = (to_unit_length(F.silu(at_least_float32(u)), LEAST_SQUARE).to(v.dtype) for u in (q, k))
        whole, weights = ops.delta_rule(q * q.shape[-1] ** -0.5, k, v, beta, weights, backend=self.backend)
        y = self.read_out_norm(self._blend(whole, recent, gates[..., 1:]))
        return self.out_proj(self.merge_heads(y).to(x.dtype)), HybridState(weights, cache)

    def _blend(self, whole: Tensor, recent: Tensor, gate: Tensor) -> Tensor:
        """Return what the fast weights and the window give (B, H, L, d), mixed by the gate (B, H, L, n)."""
        if self.mix == "sum":
            return whole + recent
        of_whole, of_recent = (gate, 1 - gate) if self.mix == "channel" else gate.split(1, -1)
        return of_whole * whole + of_recent * recent

    def state_size(self, length: int, carried: bool = False) -> int:
        width = self.out_proj.in_features
        return width * (width // self.num_heads) + 2 * self.memory.tokens(length, carried) * width
