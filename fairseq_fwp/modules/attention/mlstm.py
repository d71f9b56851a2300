"""The attention of xLSTM-7B: the memory mLSTM, and what its layer has around it.

Beck et al. 2025, "xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference" (arXiv 2503.13427), and its public code.
Shapes: B batch, L tokens, H heads, D embed_dim, Dk size of a key, Dv size of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp import ops
from fairseq_fwp.modules.attention.base import Attention, Marks, head_size
from fairseq_fwp.ops import MlstmState
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.checks import check

GATE_CAP = 15.0  # the greatest logarithm of an input gate, as published


class Mlstm(Attention[MlstmState]):
    """Attention with an exponential input gate, and a normaliser that is gated as the memory is.

        [q k v o] = W x        [i f] = c(W_g x + b), c(u) = 15 tanh(u / 15)
        h = mLSTM(q / sqrt(Dk), k, v, i, f)        out = W_o (sigmoid(o) * g * LayerNorm(h))

    The normalisation is that of each head, with gains g (H Dv) and without biases. Gates start without weights: the
    input gate at exp(-10), the forget gate, a sigmoid, at 3 to 6 before it, from the first head to the last.

    embed_dim: D; num_heads: H; key_dim, value_dim: Dk and Dv, None = D / H; norm_epsilon: of the normalisation;
    backend: of the operator. Raises ValueError for a head count that does not divide embed_dim, and for sizes below 1.
    """

    named_as_rule = True
    packs_documents = True
    states = (MlstmState,)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        norm_epsilon: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check(norm_epsilon > 0, f"`norm_epsilon` must be above 0, got {norm_epsilon}")
        self.key_dim = head_size(embed_dim, num_heads, key_dim)
        self.value_dim = head_size(embed_dim, num_heads, value_dim, "value_dim")
        self.num_heads = num_heads
        self.norm_epsilon = norm_epsilon
        self.backend = backend
        self.columns = [num_heads * size for size in (self.key_dim, self.key_dim, self.value_dim, self.value_dim)]
        self.in_proj = nn.Linear(embed_dim, sum(self.columns), bias=False)
        self.gates = nn.Linear(embed_dim, 2 * num_heads)
        self.read_out_gain = nn.Parameter(torch.empty(num_heads * self.value_dim))
        self.out_proj = nn.Linear(num_heads * self.value_dim, embed_dim, bias=False)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Set the gates and the gains to their first values, those of public code."""
        self.gates.weight.zero_()
        self.gates.bias.copy_(torch.cat([torch.full((self.num_heads,), -10.0), torch.linspace(3, 6, self.num_heads)]))
        self.read_out_gain.fill_(1)

    def read(self, x: Tensor, state: MlstmState | None, marks: Marks) -> tuple[Tensor, MlstmState]:
        """Return y (B, L, D) for x (B, L, D), and the state after the last token: see `Attention.forward`."""
        *projected, output_gate = self.in_proj(x).split(self.columns, -1)
        q, k, v = map(self.split_heads, projected)
        gates = GATE_CAP * torch.tanh(at_least_float32(self.gates(x)) / GATE_CAP)
        input_gate, forget_gate = gates.transpose(1, 2).chunk(2, 1)
        if marks.padding is not None:  # nothing is written, and nothing is lost
            padded = marks.padding.unsqueeze(1)
            input_gate = input_gate.masked_fill(padded, -torch.inf)
            forget_gate = forget_gate.masked_fill(padded, torch.inf)
        q = q * self.key_dim**-0.5
        out, after = ops.mlstm_rule(q, k, v, input_gate, forget_gate, state, first=marks.first, backend=self.backend)
        out = F.layer_norm(at_least_float32(out), out.shape[-1:], eps=self.norm_epsilon)
        out = self.merge_heads(out).to(x.dtype) * self.read_out_gain
        return self.out_proj(torch.sigmoid(output_gate) * out), after

    def state_size(self, length: int, carried: bool = False) -> int:
        # Without the normaliser, as in Schlag et al. 2021, App. F.
        return self.num_heads * (self.key_dim * self.value_dim + 1)
