"""Memories of the synthetic retrieval task: they store associations in order and are read after the last one.

Schlag, Irie & Schmidhuber 2021, arXiv 2102.11174, Sec. 6.1: values are one-hot vectors, and an output has one number
for each. Shapes: B batch, L writes, Q queries, S values, d key_dim, Dk feature_dim of the map. q is (B, Q, d) and k (B,
L, d), both before the map. values (B, L) holds the index of each one-hot vector. out is (B, Q, S).

Values are indices here, and S may be in the hundreds. So, if the rule allows it, the memory is read backwards from the
query. Unrolled, a query retrieves

    q W_L = sum_t c_t v_t        c_t = s_t (r_t . k_t)        r_L = q

with s_t the strength of the write at t (`WRITE_STRENGTHS`). r_(t-1) is r_t after the rule has written a zero
under k_t: r_(t-1) = r_t - beta_t k_t (k_t . r_t) for delta, g_t r_t for gated, r_t for sum. So the operator, run in
reverse on values of zero from the state q, gives all c_t. That costs O(L Dk) for a query, and the matrix W would cost
O(L Dk S).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairseq_fwp import ops
from fairseq_fwp.modules.attention.memory import Memory
from fairseq_fwp.modules.attention.normalization import (
    AttentionNormalization,
    SumNormalization,
    fit_normalizations,
    running_sum,
)
from fairseq_fwp.modules.feature_maps import FeatureMap
from fairseq_fwp.modules.update_rules import UPDATE_RULES, Gate, find_rule
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.checks import check

# Gates -> (B, H, L), how strongly a token writes, of operators that can be read backwards from a query: they are linear
# in the values, and their transition is symmetric.
WRITE_STRENGTHS: dict[ops.Rule, Callable[..., Tensor]] = {
    UPDATE_RULES["sum"].operation: lambda: torch.ones(()),
    UPDATE_RULES["gated"].operation: lambda gate: 1 - gate,
    UPDATE_RULES["delta"].operation: lambda beta: beta,
}


class SoftmaxMemory(nn.Module):
    """The baseline, which stores every pair: softmax(q k^T / sqrt(d)) over all writes (Schlag et al. 2021, Eq. 7).

    num_values: S. It has no gates.
    """

    initialize = staticmethod(nn.init.xavier_uniform_)  # of a projection, as in the paper's public code

    def __init__(self, num_values: int) -> None:
        super().__init__()
        self.num_values = num_values

    def gate_projections(self, in_features: int) -> nn.ModuleDict:
        return nn.ModuleDict()

    def forward(self, q: Tensor, k: Tensor, values: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Return the retrieved values (B, Q, S) of the queries."""
        products = k @ q.transpose(1, 2) / math.sqrt(q.shape[-1])
        return distribute(products.softmax(1), values, self.num_values)


class FastWeightMemory(nn.Module):
    """A memory of a feature map, an update rule and two normalisations, as in `FastWeightAttention`.

    feature_map: a map built for d; update_rule: a key of `UPDATE_RULES`; num_values: S;
    attention_normalization: of the output, and of what a rule retrieves before it writes;
    norm_read_out: layer normalisation of the output without weights, which the public code has for the rule fwm.

    Raises ValueError for an unknown rule, and a rule of several keys a token. Also for a normalisation that the rule
    does not have, or with a map whose features may be negative.
    """

    def __init__(
        self,
        feature_map: FeatureMap,
        update_rule: str,
        num_values: int,
        *,
        sum_normalization: SumNormalization | None = None,
        attention_normalization: AttentionNormalization | None = None,
        norm_read_out: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        rule = find_rule(update_rule)
        self.sum_normalization, normalization = fit_normalizations(
            feature_map, sum_normalization, attention_normalization
        )
        check(
            rule.steps == 1,
            f"the update rule must have one key per token for associations, got {update_rule} with {rule.steps}",
        )
        check(
            not attention_normalization or (rule.normalizer is not None and not rule.normalizer.output_only),
            f"`attention_normalization` must be left out for the update rule {update_rule}, where it is not defined: "
            "use `sum_normalization`",
        )
        self.memory = Memory(rule, normalization, backend)
        self.feature_map = feature_map
        self.num_values = num_values
        self.norm_read_out = norm_read_out
        self.gate_activations = nn.ModuleDict(
            {gate.name: gate.learned(1, self._size(gate)) for gate in rule.gates if gate.learned}
        )

    @property
    def write_strength(self) -> Callable[..., Tensor] | None:
        """The entry of the rule in `WRITE_STRENGTHS`."""
        return WRITE_STRENGTHS.get(self.memory.rule.operation)

    def _size(self, gate: Gate) -> int:
        return gate.width(self.feature_map.feature_dim, self.num_values)

    def gate_projections(self, in_features: int) -> nn.ModuleDict:
        """Return linear maps from the written vectors to the logits of each gate, with a bias if the rule gives one.

        They have full rank here; in layers the rank may be smaller.
        """
        projections = nn.ModuleDict()
        for gate in self.memory.rule.gates:
            size = self._size(gate)
            projections[gate.name] = linear = nn.Linear(in_features, size, bias=gate.bias is not None)
            if gate.bias is not None:
                linear.bias = nn.Parameter(gate.bias(size))
        return projections

    @staticmethod
    def initialize(weight: Tensor) -> None:
        """Draw a projection (d, ...) to keys or queries as the paper's public code does."""
        limit = weight.shape[0] ** -0.5
        nn.init.uniform_(weight, -limit, limit)

    def forward(self, q: Tensor, k: Tensor, values: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Return the retrieved values (B, Q, S); gates: logits (B, L, size), by the names of `gate_projections`."""
        q, k = self._map(q), self._map(k)
        gates = {gate.name: self._activate(gate, gates[gate.name]) for gate in self.memory.rule.gates}
        if self.write_strength is None:
            out = self._read_matrix(q, k, values, gates)
        else:
            out = self._read_backwards(q, k, values, gates, self.write_strength(**gates))
        out = out.squeeze(1)
        return functional.layer_norm(out, out.shape[-1:]) if self.norm_read_out else out

    def _map(self, x: Tensor) -> Tensor:
        """Return the mapped and normalised keys or queries as those of one head: (B, L, d) -> (B, 1, L, Dk)."""
        features = at_least_float32(self.feature_map(x))
        return (self.sum_normalization(features) if self.sum_normalization else features).unsqueeze(1)

    def _activate(self, gate: Gate, logits: Tensor) -> Tensor:
        """Return the gate (B, 1, L, size), or (B, 1, L) for a gate of one number."""
        activation = self.gate_activations[gate.name] if gate.learned else gate.activation
        activated: Tensor = activation(at_least_float32(logits).unsqueeze(2)).transpose(1, 2)
        return activated if gate.size else activated.squeeze(-1)

    def _read_matrix(self, q: Tensor, k: Tensor, values: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Return the values (B, 1, Q, S) that queries retrieve from the memory, which all pairs have written."""
        v = functional.one_hot(values, self.num_values).unsqueeze(1).to(k.dtype)
        z = k.sum(2)
        _, state = self.memory.write_and_read(k, k, v, gates)
        out = q @ state.weights
        if self.memory.normalization is None:
            return out
        normalizer = self.memory.rule.normalizer
        if normalizer is not None and normalizer.gates is not None and state.normalizer is not None:
            z = state.normalizer
        return out / self.memory.normalization.bound(q @ z.unsqueeze(-1))

    def _read_backwards(
        self, q: Tensor, k: Tensor, values: Tensor, gates: dict[str, Tensor], strength: Tensor
    ) -> Tensor:
        """Return the same for a rule with a write strength (B, 1, L), without the matrix."""
        normalization, normalizer = self.memory.normalization, self.memory.rule.normalizer
        retrieves = normalizer is not None and normalizer.retrieved
        written, scale, z = k, k.new_ones(1), k.sum(2)
        if normalization is not None and retrieves:  # a factor of the values normalises what is retrieved
            ones = k.new_ones(*k.shape[:3], 1)
            written, scale = normalization.normalize_retrieval(k, ones, running_sum(k))
        weights = self._retrieved(q, written, gates, strength) * scale
        out = distribute(weights.squeeze(1), values, self.num_values).unsqueeze(1)
        if normalization is None:
            return out
        # The one-hot vectors sum to values of one, whose memory is the normaliser.
        divisor = q @ z.unsqueeze(-1) if retrieves else out.sum(-1, keepdim=True)
        return out / normalization.bound(divisor)

    def _retrieved(self, q: Tensor, k: Tensor, gates: dict[str, Tensor], strength: Tensor) -> Tensor:
        """Return c (B, 1, L, Q), how much of each written value a query retrieves.

        The operator reads after each write, so the read after write t uses the key of write t - 1.
        """
        if not gates:  # r stays q
            return k @ q.mT
        k, state = k.flip(2), q.mT
        writes, reads = k[:, :, :-1], k[:, :, 1:]
        zeros = k.new_zeros(*writes.shape[:3], q.shape[2])
        before = [gates[gate.name].flip(2)[:, :, :-1] for gate in self.memory.rule.gates]
        out, _ = self.memory.rule.operation(reads, writes, zeros, *before, state, backend=self.memory.backend)
        return strength.unsqueeze(-1) * torch.cat([k[:, :, :1] @ state, out], dim=2).flip(2)


def distribute(weights: Tensor, values: Tensor, num_values: int) -> Tensor:
    """Return sum_t weights_t v_t with one-hot v_t: weights (B, L, Q) -> (B, Q, S)."""
    out = weights.new_zeros(weights.shape[0], num_values, weights.shape[2])
    return out.scatter_add(1, values.unsqueeze(-1).expand_as(weights), weights).mT
