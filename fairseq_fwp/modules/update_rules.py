"""Update rules for layers: the operation on tensors, and the gates that a layer projects for it.

A new rule is a step in `ops/rules.py`, or in a plug-in, and one line in `UPDATE_RULES`. Shapes: B batch, H heads, L
tokens, Dk size of a mapped key, Dv size of a value.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp import ops
from fairseq_fwp.ops import rows
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.checks import check, look_up

Size: TypeAlias = Literal["Dk", "Dv"] | int


@dataclass(frozen=True)
class Gate:
    """A gate, which the layer projects for every token and head: activation(x W + bias), in (0, 1) by default.

    size: how many numbers a head's gate has. None: it is one number, and the rule takes (B, H, L) in place of
        (B, H, L, size).
    rank: of W for all heads together. None: W is not factored.
    bias: function from their number to the initial values of the biases. None: there is no bias, so that the gate
        starts near 1/2.
    at_padding: the value at padding, with which padding does not change the memory. None: the value does not matter.
    activation: function of (B, L, H, size) in place of the sigmoid.
    learned: function (H, size) -> a module with parameters in place of the sigmoid.
    doubles: whether the gate goes up to 2 with negative eigenvalues.
    """

    name: str
    _: KW_ONLY
    size: Size | None = None
    rank: Size | None = None
    bias: Callable[[int], Tensor] | None = None
    at_padding: float | None = None
    activation: Callable[[Tensor], Tensor] = torch.sigmoid
    learned: Callable[[int, int], nn.Module] | None = None
    doubles: bool = False

    def __post_init__(self) -> None:
        for option, size in (("size", self.size), ("rank", self.rank)):
            is_size = size is None or size in ("Dk", "Dv") or type(size) is int
            check(
                is_size, f"the {option} of the gate {self.name!r} must be 'Dk', 'Dv', an integer or None, got {size!r}"
            )

    def width(self, key_dim: int, value_dim: int) -> int:
        """Return how many numbers a head's gate has, for Dk and Dv."""
        return 1 if self.size is None else resolve(self.size, key_dim, value_dim)

    def columns(self, heads: int, key_dim: int, value_dim: int) -> int:
        """Return how many columns of a layer's projection the gates of all heads have: W's rank, if it is factored."""
        dims = (key_dim, value_dim)
        return heads * self.width(*dims) if self.rank is None else resolve(self.rank, *dims)


def resolve(size: Size, key_dim: int, value_dim: int) -> int:
    """Return a size as a number, for Dk and Dv."""
    return size if isinstance(size, int) else {"Dk": key_dim, "Dv": value_dim}[size]


class Normalizer(NamedTuple):
    """z of attention normalisation, which divides the output of a rule by z . q.

    gates: function from the rule's gates to those of a rule for values (B, H, L, 1) of one, whose memory is z. So z
        forgets as the memory does. None: z is the plain sum of the keys.
    operation: the rule that takes these gates. None: it is the rule itself.
    retrieved: whether the rule writes the difference to the value that the key retrieves. It is divided too, unless z
        has a rule of its own: then only the output can be divided.
    """

    gates: Callable[..., tuple[Tensor, ...]] | None = None
    operation: ops.Rule | None = None
    retrieved: bool = False

    @property
    def output_only(self) -> bool:
        """Whether only the output can be divided."""
        return self.operation is not None


class UpdateRule(NamedTuple):
    """An update rule of layers: what it computes, and the gates that a layer projects for it.

    normalizer: what attention normalisation divides by. None: it is not defined for the rule.
    steps: keys and values a token, N: k (B, H, L, N, Dk), v (B, H, L, N, Dv).
    only_adds: whether what it reads from an empty memory is (q k^T) v, causally masked: cheaper for few tokens.
    """

    operation: ops.Rule
    gates: tuple[Gate, ...] = ()
    normalizer: Normalizer | None = Normalizer()
    steps: int = 1
    only_adds: bool = False

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Pickle an entry of the table as its name: its functions may have none."""
        names = [name for name, rule in UPDATE_RULES.items() if rule is self]
        return (find_rule, (names[0],)) if names else (UpdateRule, tuple(self))


def uniform_gate_bias(number: int) -> Tensor:
    """Return biases (number,) with which a sigmoid gate starts uniform in (1/n, 1 - 1/n), n = max(number, 3).

    Uniform gate initialisation: Gu et al. 2020, arXiv 1910.09890, Sec. 3.1; Mao 2022, arXiv 2210.04243, Sec. 3.
    """
    lowest = 1 / max(number, 3)
    return torch.logit(torch.empty(number).uniform_(lowest, 1 - lowest))


class MambaDecay(nn.Module):
    """The decay a = exp(-exp(A) softplus(x + b)); A is learned for each head, b for each number of it.

    Gu & Dao 2023, "Mamba" (arXiv 2312.00752), Sec. 3.6, as used in Gated DeltaNet and Kimi Delta Attention. exp(A)
    starts uniform in (1, 16), and softplus(b) log-uniform in (0.001, 0.1). So at first most of the memory is kept.

    lower_bound: of log a, below 0: a = exp(lower_bound sigmoid(exp(A) (x + b))), where A starts at 0. None = no bound.
    It is the "safe gate" of flash-linear-attention's Kimi Delta Attention. Raises ValueError for a bound of 0 or more.
    """

    def __init__(self, num_heads: int, size: int, lower_bound: float | None = None) -> None:
        super().__init__()
        check(lower_bound is None or lower_bound < 0, f"`decay_lower_bound` must be below 0, got {lower_bound}")
        self.lower_bound = lower_bound
        rate = torch.ones(num_heads, 1) if lower_bound else torch.empty(num_heads, 1).uniform_(1, 16)
        self.log_rate = nn.Parameter(rate.log())
        step = torch.empty(num_heads, size).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(self, x: Tensor) -> Tensor:
        """Return the decay (B, L, H, size), in (0, 1)."""
        rate = at_least_float32(self.log_rate).exp()
        if self.lower_bound is None:
            return torch.exp(-rate * F.softplus(x + self.bias))
        return torch.exp(self.lower_bound * torch.sigmoid(rate * (x + self.bias)))


def gla_decay(x: Tensor) -> Tensor:
    """Return sigmoid(x)^(1/16): Yang et al. 2024 (arXiv 2312.06635), Sec. 4.4."""
    return torch.exp(F.logsigmoid(x) / 16)


def rwkv7_decay(x: Tensor) -> Tensor:
    """Return exp(-exp(-1/2) sigmoid(x)), which is above 0.545: Peng et al. 2025 (arXiv 2503.14456), Eq. 12."""
    return torch.exp(-math.exp(-0.5) * torch.sigmoid(x))


def to_unit_length(x: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return x / ||x|| along the last dimension, in float32 or wider: the epsilon is too small for float16.

    epsilon: added to ||x||^2; by default the length has a lower bound.
    """
    x = at_least_float32(x)
    return rows.unit_length(x, epsilon) if epsilon else F.normalize(x, dim=-1)


BETA = Gate("beta", doubles=True)
UPDATE_RULES = {
    "sum": UpdateRule(ops.sum_rule, only_adds=True),
    "gated": UpdateRule(
        # Mao 2022, Eq. 5: the gate has no bias, and also gates the normaliser.
        ops.gated_rule,
        (Gate("gate", at_padding=1),),
        Normalizer(lambda gate: (gate,)),
    ),
    "gla": UpdateRule(
        # Yang et al. 2024, Sec. 4.4: a projection of rank 16.
        ops.gla_rule,
        (Gate("decay", size="Dk", rank=16, bias=torch.zeros, at_padding=1, activation=gla_decay),),
        Normalizer(lambda decay: (decay,)),
    ),
    "delta": UpdateRule(ops.delta_rule, (BETA,), Normalizer(retrieved=True)),
    "decay": UpdateRule(
        ops.decay_rule,
        (
            Gate("key_decay", size="Dk", bias=uniform_gate_bias, at_padding=1),
            Gate("value_decay", size="Dv", bias=uniform_gate_bias, at_padding=1),
        ),
        # The paper does not normalise decaying memories; the rule on values of one gives the remaining keys.
        Normalizer(lambda key_decay, value_decay: (key_decay, torch.ones_like(value_decay[..., :1]))),
    ),
    "gated_delta": UpdateRule(
        ops.gated_delta_rule,
        (Gate("decay", at_padding=1, learned=MambaDecay), BETA),
        Normalizer(lambda decay, beta: (decay,), ops.gla_rule, retrieved=True),
    ),
    "kda": UpdateRule(
        # Kimi Team 2025, Sec. 4: a decay for each dimension of the key, of the rank of a head.
        ops.gated_delta_rule,
        (Gate("decay", size="Dk", rank="Dv", at_padding=1, learned=MambaDecay), BETA),
        Normalizer(lambda decay, beta: (decay,), ops.gla_rule, retrieved=True),
    ),
    "gdn2": UpdateRule(
        # Hatamizadeh et al. 2026: the decay of Kimi Delta Attention, and gates for erasing and writing.
        ops.gdn2_rule,
        (
            Gate("decay", size="Dk", rank="Dv", at_padding=1, learned=MambaDecay),
            Gate("erase", size="Dk"),
            Gate("write", size="Dv"),
        ),
        Normalizer(lambda decay, erase, write: (decay,), ops.gla_rule, retrieved=True),
    ),
    # Siems et al. 2025 use up to four steps a token; the symmetric group of three elements needs two.
    "delta_product": UpdateRule(ops.delta_product_rule, (replace(BETA, size=2),), normalizer=None, steps=2),
    "rwkv7": UpdateRule(
        # After Peng et al. 2025, with projections of the rank of a head for the decay and the rate. In the paper the
        # decay's projection contains a tanh. The removal key is projected here; in the paper it is the key times a
        # learned vector.
        ops.rwkv7_rule,
        (
            Gate("decay", size="Dk", rank="Dv", bias=torch.zeros, at_padding=1, activation=rwkv7_decay),
            Gate("removal_key", size="Dk", activation=to_unit_length),
            Gate("removal_rate", size="Dk", rank="Dv", bias=torch.zeros, at_padding=0),
        ),
        normalizer=None,
    ),
    "fwm": UpdateRule(ops.fwm_rule, (Gate("beta"),), Normalizer(retrieved=True)),
}


def find_rule(name: str) -> UpdateRule:
    """Return the rule of that name. Raises ValueError for an unknown name, and for an invalid rule."""
    rule = look_up("update rule", name, UPDATE_RULES)
    where = f"UPDATE_RULES[{name!r}]"
    check(isinstance(rule, UpdateRule), f"{where} must be an UpdateRule, got {type(rule).__name__}")
    are_gates = isinstance(rule.gates, tuple) and all(isinstance(gate, Gate) for gate in rule.gates)
    check(are_gates, f"{where}: gates must be a tuple such as (Gate('beta'),), got {rule.gates!r}")
    check(isinstance(rule.operation, ops.Rule), f"{where}: operation must be an ops.Rule, got {rule.operation!r}")
    is_normalizer = rule.normalizer is None or isinstance(rule.normalizer, Normalizer)
    check(is_normalizer, f"{where}: normalizer must be a Normalizer or None, got {rule.normalizer!r}")
    names, wanted = [gate.name for gate in rule.gates], [*rule.operation.gates]
    check(
        names == wanted,
        f"{where}: gates must be those of {rule.operation.name}, in their order: {', '.join(wanted)}, "
        f"got {', '.join(names) or 'none'}",
    )
    return rule
