"""Self-referential weight matrices: attention whose only projection computes outputs, and changes itself.

Irie, Schlag, Csordas & Schmidhuber 2022, "A Modern Self-Referential Weight Matrix That Learns to Modify Itself" (arXiv
2202.05780). Shapes: B batch, L tokens, H heads, D embed_dim, d = D / H.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairseq_fwp.modules.attention.base import Attention, check_heads
from fairseq_fwp.ops.srwm import srwm


class SrwmState(NamedTuple):
    """The change (B, H, d, 3 d + 4) of the matrices since the first token."""

    change: Tensor


class Srwm(Attention[SrwmState]):
    """Attention of the equation of `ops.srwm`: each head reads its part of the input, which nothing projects.

    softmax_input: whether that part is mapped by a softmax; rate_mean: the mean of the initial columns of the rates;
    query_scale: of those of queries, times the deviation 1 / sqrt(d) of all; backend: of the rule.
    Raises ValueError unless num_heads divides embed_dim.
    """

    named_as_rule = True
    packs_documents = True
    states = (SrwmState,)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        softmax_input: bool = False,
        rate_mean: float = -1.0,
        query_scale: float = 1.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        head_dim = embed_dim // num_heads
        self.num_heads, self.softmax_input, self.backend = num_heads, softmax_input, backend
        # In each head the columns of y, q, k and the four rates.
        self.weights = nn.Parameter(torch.randn(num_heads, head_dim, 3 * head_dim + 4) / math.sqrt(head_dim))
        with torch.no_grad():
            self.weights[..., head_dim : 2 * head_dim] *= query_scale
            self.weights[..., 3 * head_dim :] += rate_mean
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(
        self,
        x: Tensor,
        state: SrwmState | None = None,
        key_padding_mask: Tensor | None = None,
        first: Tensor | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, SrwmState]:
        """Return y (B, L, D) for x (B, L, D), and the state after the last token; see `Attention`."""
        heads = x.unflatten(-1, (self.num_heads, -1))
        out, change = srwm(
            heads.softmax(-1) if self.softmax_input else heads,
            self.weights,
            None if state is None else state.change,
            first=first,
            padding=key_padding_mask,
            backend=self.backend,
        )
        return self.out_proj(out.flatten(2).to(x.dtype)), SrwmState(change)

    def state_size(self, length: int, carried: bool = False) -> int:
        return self.weights.numel()
