"""Self-referential weight matrices: attention whose only projection computes outputs, and changes itself.

Irie et al. 2022, arXiv 2202.05780. Shapes: B batch, L tokens, H heads, D embed_dim, d = D / H.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairseq_fwp.modules.attention.base import Attention, Marks, check_heads
from fairseq_fwp.ops.checks import check
from fairseq_fwp.ops.srwm import srwm


class SrwmState(NamedTuple):
    """The change (B, H, d, 3 d + 4) of the matrices since the first token."""

    change: Tensor


class Srwm(Attention[SrwmState]):
    """Attention of the equation of `ops.srwm`: each head reads its part of the input, also in a pre-norm layer.

    softmax_input: whether through a softmax; rate_mean: mean of the first columns of rates; query_scale: factor of
    those of queries; all deviate by 1 / sqrt(d); backend: of the rule.
    Raises ValueError unless num_heads divides embed_dim and these numbers are finite.
    """

    named_as_rule = True
    packs_documents = True
    reads_input = True
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
        for name, number in (("rate_mean", rate_mean), ("query_scale", query_scale)):
            check(math.isfinite(number), f"`{name}` must be finite, got {number}")
        head_dim = embed_dim // num_heads
        self.num_heads, self.backend = num_heads, backend
        self.map = nn.Softmax(dim=-1) if softmax_input else nn.Identity()
        # In each head the columns of y, q, k and the four rates.
        self.weights = nn.Parameter(torch.randn(num_heads, head_dim, 3 * head_dim + 4) / math.sqrt(head_dim))
        with torch.no_grad():
            self.weights[..., head_dim : 2 * head_dim] *= query_scale
            self.weights[..., 3 * head_dim :] += rate_mean
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def read(self, x: Tensor, state: SrwmState | None, marks: Marks) -> tuple[Tensor, SrwmState]:
        """Return y (B, L, D) for x (B, L, D), and the state after the last token: see `Attention.forward`."""
        heads = self.map(x.unflatten(-1, (self.num_heads, -1)))
        before = None if state is None else state.change
        out, change = srwm(heads, self.weights, before, first=marks.first, padding=marks.padding, backend=self.backend)
        return self.out_proj(out.flatten(2).to(x.dtype)), SrwmState(change)

    def state_size(self, length: int, carried: bool = False) -> int:
        return self.weights.numel()
