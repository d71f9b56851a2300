"""The Recurrent Delta Net: the delta rule, whose queries, keys, values and rates see the last output.

Irie, Schlag, Csordas & Schmidhuber 2021, "Going Beyond Linear Transformers with Recurrent Fast Weight Programmers"
(arXiv 2106.06295). Shapes: B batch, L tokens, H heads, D embed_dim, d = D / H.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairseq_fwp.modules.attention.base import Attention, Marks, check_heads
from fairseq_fwp.ops.recurrent_delta import recurrent_delta


class RecurrentDeltaState(NamedTuple):
    """The memory W (B, H, d, d), and the last output (B, H, d) before its projection."""

    weights: Tensor
    output: Tensor


class RecurrentDelta(Attention[RecurrentDeltaState]):
    """Attention of the equation of `ops.recurrent_delta`; a softmax takes the place of a feature map.

    scale_read_out: whether outputs are divided by sqrt(d) before their projection, as in the public language models;
    backend: of the rule. Raises ValueError unless num_heads divides embed_dim.
    """

    named_as_rule = True
    packs_documents = True
    states = (RecurrentDeltaState,)

    def __init__(self, embed_dim: int, num_heads: int, *, scale_read_out: bool = False, backend: str = "auto") -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        head_dim = embed_dim // num_heads
        self.num_heads, self.backend = num_heads, backend
        self.scale = 1 / math.sqrt(head_dim) if scale_read_out else 1.0
        # In each head q, k, v and the rate, also of what the last output adds to them: R_q, R_k, R_v and r_b.
        self.in_proj = nn.Linear(embed_dim, num_heads * (3 * head_dim + 1), bias=False)
        self.recurrent = nn.Parameter(torch.empty(num_heads, head_dim, 3 * head_dim + 1))
        nn.init.normal_(self.recurrent, std=1 / math.sqrt(head_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def read(self, x: Tensor, state: RecurrentDeltaState | None, marks: Marks) -> tuple[Tensor, RecurrentDeltaState]:
        """Return y (B, L, D) for x (B, L, D), and the state after the last token: see `Attention.forward`."""
        memory, output = (None, None) if state is None else state
        out, *after = recurrent_delta(
            self.in_proj(x).unflatten(-1, (self.num_heads, -1)),
            self.recurrent,
            memory=memory,
            output=output,
            first=marks.first,
            padding=marks.padding,
            backend=self.backend,
        )
        return self.out_proj((out * self.scale).flatten(2).to(x.dtype)), RecurrentDeltaState(*after)

    def state_size(self, length: int, carried: bool = False) -> int:
        head_dim = self.recurrent.shape[1]
        return self.num_heads * head_dim * (head_dim + 1)
