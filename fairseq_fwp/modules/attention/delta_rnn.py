"""The Delta RNN: fast weights whose outputs are fed back through a second memory.

Irie, Schlag, Csordas & Schmidhuber 2021, "Going Beyond Linear Transformers with Recurrent Fast Weight Programmers"
(arXiv 2106.06295). Shapes: B batch, L tokens, H heads, D embed_dim, d = D / H.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairseq_fwp.modules.attention.base import Attention, reset
from fairseq_fwp.modules.attention.fast_weight import FastWeightAttention
from fairseq_fwp.modules.attention.memory import FastWeightState, Memory
from fairseq_fwp.modules.attention.normalization import SumNormalization
from fairseq_fwp.modules.feature_maps import FeatureMap
from fairseq_fwp.modules.update_rules import find_rule
from fairseq_fwp.ops.arguments import at_least_float32


class DeltaRnnState(NamedTuple):
    """The memories W (B, H, Dk, d) and R (B, H, d, d), and the last output y (B, H, d) before its projection."""

    weights: Tensor
    recurrent: Tensor
    output: Tensor


class DeltaRnn(Attention[DeltaRnnState]):
    """Attention y_t = phi(q_t) W_t + softmax(y_(t-1)) R_t, with the delta rule for both memories, and y_0 = 0.

    R has its own keys, values and rates, projected from the token as for W. Its keys are a softmax, like the vector
    that reads it. This is version 2 of the public code. The recurrence runs token by token, in Python.

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
        self.num_heads = num_heads
        self.recurrent = Memory(find_rule("delta"), backend=backend)
        self.recurrent_proj = nn.Linear(embed_dim, 2 * embed_dim + num_heads, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(
        self,
        x: Tensor,
        state: DeltaRnnState | None = None,
        key_padding_mask: Tensor | None = None,
        first: Tensor | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, DeltaRnnState]:
        """Return y (B, L, D) for x (B, L, D), and the state after the last token; see `FastWeightAttention`."""
        before = None if state is None else FastWeightState(state.weights)
        q, k, v, gates, _ = self.feedforward.prepare(x, key_padding_mask=key_padding_mask)
        read, after = self.feedforward.memory.read(q, k, v, gates, before, first)
        z = at_least_float32(read.to(x.dtype))
        k, v, beta = self._project(x, z.dtype)
        memory = z.new_zeros(*z.shape[:2], z.shape[3], z.shape[3]) if state is None else state.recurrent
        y = z.new_zeros(*z.shape[:2], z.shape[3]) if state is None else state.output
        outs = []
        for t in range(x.shape[1]):
            if first is not None:
                memory, y = reset((memory, y), first[:, t])
            k_t, v_t, beta_t = (part[:, :, t : t + 1] for part in (k, v, beta))
            q_t = y.softmax(-1).unsqueeze(2)
            out, (written, *_) = self.recurrent.read(q_t, k_t, v_t, {"beta": beta_t}, FastWeightState(memory))
            new = z[:, :, t] + out.squeeze(2)
            if key_padding_mask is not None:
                padded = key_padding_mask[:, t, None, None]
                written, new = torch.where(padded[..., None], memory, written), torch.where(padded, y, new)
            memory, y = written, new
            outs.append(y)
        out = (torch.stack(outs, 2) if outs else z) * self.feedforward.read_out.scale
        return self.out_proj(self.merge_heads(out).to(x.dtype)), DeltaRnnState(after.weights, memory, y)

    def _project(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return k (B, H, L, d), a softmax, v (B, H, L, d) and beta (B, H, L) of the memory R."""
        embed_dim = x.shape[-1]
        projected = self.recurrent_proj(x).to(dtype)
        k, v = (self.split_heads(part) for part in projected[..., : 2 * embed_dim].chunk(2, -1))
        return k.softmax(-1), v, projected[..., 2 * embed_dim :].sigmoid().transpose(1, 2)

    def state_size(self, length: int, carried: bool = False) -> int:
        head_dim = self.out_proj.in_features // self.num_heads
        return self.feedforward.state_size(length) + self.num_heads * head_dim * (head_dim + 1)
