"""The Delta RNN: fast weights whose outputs are fed back through a second memory.

Irie, Schlag, Csordas & Schmidhuber 2021, "Going Beyond Linear Transformers with Recurrent Fast Weight Programmers"
(arXiv 2106.06295). Shapes: B batch, L tokens, H heads, D embed_dim, d = D / H.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.modules.attention.base import Attention, Marks
from fairseq_fwp.modules.attention.fast_weight import FastWeightAttention
from fairseq_fwp.modules.attention.memory import FastWeightState
from fairseq_fwp.modules.attention.normalization import SumNormalization
from fairseq_fwp.modules.feature_maps import FeatureMap
from fairseq_fwp.ops.recurrent_delta import recurrent_delta


class DeltaRnnState(NamedTuple):
    """The memories W (B, H, Dk, d) and R (B, H, d, d), and the last output y (B, H, d) before its projection."""

    weights: Tensor
    recurrent: Tensor
    output: Tensor


class DeltaRnn(Attention[DeltaRnnState]):
    """Attention y_t = phi(q_t) W_t + softmax(y_(t-1)) R_t, with the delta rule for both memories, and y_0 = 0.

    R has its own keys, values and rates, projected from the token as for W. Its keys are a softmax, like the vector
    that reads it. This is version 2 of the public code. The recurrence is `ops.recurrent_delta`, without its R.

    Arguments are those of `FastWeightAttention`, which is the memory W. Raises ValueError as it does.
    """

    named_as_rule = True
    packs_documents = True
    states = (DeltaRnnState,)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feature_map: FeatureMap,
        *,
        key_dim: int | None = None,
        sum_normalization: SumNormalization | None = None,
        l2_normalization: bool = False,
        scale_read_out: bool = False,
        negative_eigenvalues: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.feedforward = FastWeightAttention(
            *(embed_dim, num_heads, feature_map, "delta"),
            key_dim=key_dim,
            sum_normalization=sum_normalization,
            l2_normalization=l2_normalization,
            scale_read_out=scale_read_out,
            negative_eigenvalues=negative_eigenvalues,
            backend=backend,
        )
        del self.feedforward.out_proj  # only y is projected
        self.num_heads, self.backend = num_heads, backend
        self.recurrent_proj = nn.Linear(embed_dim, 2 * embed_dim + num_heads, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def read(self, x: Tensor, state: DeltaRnnState | None, marks: Marks) -> tuple[Tensor, DeltaRnnState]:
        """Return y (B, L, D) for x (B, L, D), and the state after the last token: see `Attention.forward`."""
        before = None if state is None else FastWeightState(state.weights)
        q, k, v, gates, _ = self.feedforward.memory_inputs(x, None, marks)
        read, memory = self.feedforward.memory.write_and_read(q, k, v, gates, before, marks.first)
        out, *after = recurrent_delta(
            self._project(x),
            z=read.to(x.dtype).transpose(1, 2),
            memory=None if state is None else state.recurrent,
            output=None if state is None else state.output,
            first=marks.first,
            padding=marks.padding,
            backend=self.backend,
        )
        y = (out * self.feedforward.read_out_scale).flatten(2).to(x.dtype)
        return self.out_proj(y), DeltaRnnState(memory.weights, *after)

    def _project(self, x: Tensor) -> Tensor:
        """Return for each head of R (B, L, H, 3 d + 1): zeros for the query, key, value and rate, before softmax."""
        kv, beta = self.recurrent_proj(x).split([2 * x.shape[-1], self.num_heads], dim=-1)
        kv = kv.unflatten(-1, (2, self.num_heads, -1)).transpose(2, 3)
        return F.pad(torch.cat([kv.flatten(3), beta.unsqueeze(-1)], dim=-1), (kv.shape[-1], 0))

    def state_size(self, length: int, carried: bool = False) -> int:
        head_dim = self.out_proj.in_features // self.num_heads
        return self.feedforward.state_size(length) + self.num_heads * head_dim * (head_dim + 1)
