"""RWKV-7's whole attention, "time mixing": its memory, and all that its paper has around it.

Peng et al. 2025, "RWKV-7 'Goose' with Expressive Dynamic State Evolution" (arXiv 2503.14456), Sec. 4.1. Shapes: B
batch, L tokens, H heads, D embed_dim, d = D / H.
"""

import math

import torch
from torch import Tensor, nn

from fairseq_fwp.modules.attention.base import Attention, Marks, check_heads
from fairseq_fwp.modules.attention.convolution import TokenShift
from fairseq_fwp.modules.attention.memory import FastWeightState, Memory
from fairseq_fwp.modules.attention.normalization import LengthNormalization
from fairseq_fwp.modules.update_rules import find_rule, rwkv7_decay
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.checks import check

# Powers of the first mixtures of receptances, decays, keys, values, rates and gates: see `TokenShift`.
POWERS = (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)


class TimeMix(Attention[FastWeightState]):
    """RWKV-7's attention, with six mixtures x_q ... x_g of each token's input and the one before (token shift).

        q = W_q x_q      k = W_k x_k      v = W_v x_v      a = sigmoid(f(x_a))      g = f(sigmoid)(x_g)
        w = exp(-exp(-1/2) sigmoid(f(tanh)(x_w)))          y = u / ||u|| in each head, u = k * c
        v <- v + sigmoid(f(x_v)) * (v of the first layer - v)                  k <- k * (1 + (a - 1) * e)
        W_t = diag(w) W_(t-1) - (a y)^T (y W_(t-1)) + k^T v                    (the rule rwkv7)
        out = W_o (g * (GroupNorm(q W_t) + (sum over d of q k b) v))

    f(x) = B A x + bias and f(s)(x) = B s(A x) have low rank; c, e (D) and b (H, d) are learned. The gate has no bias.

    embed_dim: D; num_heads: H; depth: share of the model's layers below this one, 0 = the first, whose v is mixed into
    that of others; decay_rank, rate_rank, value_rank, output_gate_rank: of f for w, a, v and g, None: see `low_rank`;
    norm_epsilon: times d that of the group normalisation; l2_normalization_epsilon: added to ||u||^2;
    backend: of the operator.

    Raises ValueError for a head count that does not divide embed_dim, and for ranks and epsilons that cannot be.
    """

    named_as_rule = True
    packs_documents = True
    states = (FastWeightState,)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        depth: float = 0.0,
        decay_rank: int | None = None,
        rate_rank: int | None = None,
        value_rank: int | None = None,
        output_gate_rank: int | None = None,
        norm_epsilon: float = 1e-5,
        l2_normalization_epsilon: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        check(norm_epsilon > 0, f"`norm_epsilon` must be above 0, got {norm_epsilon}")
        self.num_heads = num_heads
        self.depth = depth
        self.key_normalization = LengthNormalization(l2_normalization_epsilon)
        self.memory = Memory(find_rule("rwkv7"), backend=backend)
        head_dim = embed_dim // num_heads
        self.token_shift = TokenShift(embed_dim, [power * (1 - depth) for power in POWERS])
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(3))
        self.decay = low_rank("decay_rank", embed_dim, decay_rank, 2.5, nn.Tanh())
        self.rate = low_rank("rate_rank", embed_dim, rate_rank, 2.5)
        self.value = low_rank("value_rank", embed_dim, value_rank, 1.7) if depth else None
        self.output_gate = low_rank("output_gate_rank", embed_dim, output_gate_rank, 5, nn.Sigmoid(), bias=False)
        self.removal_scale = nn.Parameter(torch.empty(embed_dim))
        self.rate_scale = nn.Parameter(torch.empty(embed_dim))
        self.bonus = nn.Parameter(torch.empty(num_heads, head_dim))
        self.read_out_norm = nn.GroupNorm(num_heads, embed_dim, head_dim * norm_epsilon)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Set what is not a matrix to values after public code: heads begin with decays of all lengths."""
        size = len(self.removal_scale)
        ramp = (torch.arange(size) / max(size - 1, 1)) ** (1 + self.depth**0.3)
        self.decay.get_parameter("2.bias").copy_(6 * ramp - 5.5)
        self.rate.get_parameter("2.bias").fill_(-0.19)
        if self.value is not None:
            self.value.get_parameter("2.bias").fill_(0.73)
        self.removal_scale.fill_(0.71)
        self.rate_scale.fill_(1.02)
        self.bonus.fill_(-0.04)

    def read(self, x: Tensor, state: FastWeightState | None, marks: Marks) -> tuple[Tensor, FastWeightState]:
        """Return y (B, L, D) for x (B, L, D), and the state after the last token: see `Attention.forward`."""
        before = None if state is None else state.recent
        mixed, recent = self.token_shift(x, before, marks)
        x_q, x_w, x_k, x_v, x_a, x_g = mixed.unbind(0)
        q, k, v = self.q_proj(x_q), self.k_proj(x_k), self.v_proj(x_v)
        decay = rwkv7_decay(at_least_float32(self.decay(x_w)))
        rate = at_least_float32(self.rate(x_a)).sigmoid()
        if marks.shared is not None:
            first_v = marks.shared.setdefault("values", v)  # of the first layer, with which others mix theirs
            if self.value is not None:
                v = torch.lerp(v, first_v, self.value(x_v).sigmoid())
        removal_key = self.key_normalization(self.split_heads(k * self.removal_scale))
        k = (k * (1 + (rate - 1) * self.rate_scale)).to(v.dtype)
        q, k, v, decay, rate = (self.split_heads(part) for part in (q, k, v, decay, rate))
        gates = {"decay": decay, "removal_key": removal_key, "removal_rate": rate}
        k, padded = self.memory.pad(k, gates, marks.padding)
        out, after = self.memory.write_and_read(q, k, v, padded, state, marks.first)
        out = self.merge_heads(out).to(x.dtype)
        out = self.read_out_norm(out.flatten(0, 1)).view(out.shape)
        bonus = (q * k * self.bonus.unsqueeze(1)).sum(-1, keepdim=True) * v
        out = (out + self.merge_heads(bonus)) * self.output_gate(x_g)
        return self.out_proj(out), after._replace(recent=recent)

    def state_size(self, length: int, carried: bool = False) -> int:
        size = self.out_proj.in_features
        return size * size // self.num_heads + size


def low_rank(
    name: str, size: int, rank: int | None, factor: float, activation: nn.Module | None = None, bias: bool = True
) -> nn.Sequential:
    """Return x -> B s(A x) + bias from (..., size) to the same; s = activation, None = none.

    rank: of B; None: factor sqrt(size), rounded to a multiple of 32, as in public code.
    """
    if rank is None:
        rank = max(32 * round(factor * math.sqrt(size) / 32), 32)
    check(rank >= 1, f"`{name}` must be at least 1, got {rank}")
    activation = nn.Identity() if activation is None else activation
    return nn.Sequential(nn.Linear(size, rank, bias=False), activation, nn.Linear(rank, size, bias=bias))
