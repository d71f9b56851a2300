"""The projection of a layer's tokens to the queries, keys, values and gates of its update rule.

Shapes: B batch, L tokens, H heads, D embed_dim, d = D / H, N keys and values a token (1, except for rules with several
steps).
"""

import torch
from torch import Tensor, nn

from fairseq_fwp.modules.attention.heads import Attention, check_heads, check_key_dim
from fairseq_fwp.modules.feature_maps.feature_map import FeatureMap
from fairseq_fwp.modules.precision import at_least_float32
from fairseq_fwp.modules.update_rules import Gate, find_rule


class RuleProjection(Attention):
    """One projection to q, k, v and the rule's gates, without bias as in Schlag et al. 2021, Eqs. 4 and 21.

    Gates to which the rule gives a bias always have it. With `bias`, as in pretrained Transformers, all parts have one.

    feature_map: a map of keys of key_dim; negative_eigenvalues: rates of delta's family up to 2 instead of 1.

    Raises ValueError for an unknown rule, a head count that does not divide embed_dim, a key_dim below 1, and
    negative_eigenvalues with a rule that cannot have them.
    Raises TypeError for a feature_map that is not a FeatureMap.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feature_map: FeatureMap,
        update_rule: str,
        key_dim: int,
        bias: bool,
        negative_eigenvalues: bool,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        check_key_dim(key_dim)
        self.rule = rule = find_rule(update_rule)
        if negative_eigenvalues and not any(gate.doubles for gate in rule.gates):
            raise ValueError(
                f"`negative_eigenvalues` must be off for the update rule {update_rule}, got on: it doubles the write "
                "strength beta, which this rule does not have"
            )
        if not isinstance(feature_map, FeatureMap):
            raise TypeError(
                f"`feature_map` must be a FeatureMap such as FEATURE_MAPS['elu']({key_dim}), got "
                f"{type(feature_map).__name__}"
            )
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.key_dim = key_dim
        self.negative_eigenvalues = negative_eigenvalues
        self.feature_map = feature_map
        dims = (feature_map.feature_dim, self.head_dim)
        gate_sizes = {gate.name: num_heads * (gate.size(*dims) if gate.size else 1) for gate in rule.gates}
        ranks = {gate.name: gate.rank(*dims) for gate in rule.gates if gate.rank}
        self.sizes = [(1 + rule.steps) * num_heads * key_dim, rule.steps * embed_dim, *(gate_sizes | ranks).values()]
        self.in_proj = nn.Linear(embed_dim, sum(self.sizes), bias=False)
        self.bias = nn.Parameter(torch.zeros(sum(self.sizes[:2]))) if bias else None
        self.gate_biases = nn.ParameterDict(
            {gate.name: torch.zeros(gate_sizes[gate.name]) for gate in rule.gates if gate.bias or bias}
        )
        self.gate_expansions = nn.ModuleDict(
            {name: nn.Linear(rank, gate_sizes[name], bias=False) for name, rank in ranks.items()}
        )
        self.gate_activations = nn.ModuleDict(
            {
                gate.name: gate.learned(num_heads, gate_sizes[gate.name] // num_heads)
                for gate in rule.gates
                if gate.learned
            }
        )

    def initialize(self) -> None:
        """Draw the rule's initial biases of the gates."""
        for gate in self.rule.gates:
            if gate.bias:
                bias = self.gate_biases[gate.name]
                with torch.no_grad():
                    bias.copy_(gate.bias(bias.numel()))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return q and N k (B, L, 1 + N, H, key_dim), v (B, L, N, H, d) and gates (B, L, H, size) of x (B, L, D).

        Raises ValueError for an x of other dimensions.
        """
        if x.dim() != 3:
            raise ValueError(f"x must have shape (B, L, D), got {tuple(x.shape)}")
        queries_keys, values, *gates = self.in_proj(x).split(self.sizes, dim=-1)
        if self.bias is not None:
            of_queries_keys, of_values = self.bias.split(self.sizes[:2])
            queries_keys, values = queries_keys + of_queries_keys, values + of_values
        return (
            queries_keys.unflatten(-1, (-1, self.num_heads, self.key_dim)),
            values.unflatten(-1, (-1, self.num_heads, self.head_dim)),
            [self._open(gate, projected) for gate, projected in zip(self.rule.gates, gates, strict=True)],
        )

    def _open(self, gate: Gate, projected: Tensor) -> Tensor:
        """Return the gate (B, L, H, size) from its projection (B, L, H size, or its rank)."""
        if gate.rank:
            projected = self.gate_expansions[gate.name](projected)
        if gate.name in self.gate_biases:
            projected = projected + self.gate_biases[gate.name]
        activation = self.gate_activations[gate.name] if gate.learned else gate.activation
        opened: Tensor = activation(at_least_float32(projected).unflatten(-1, (self.num_heads, -1)))
        return 2 * opened if gate.doubles and self.negative_eigenvalues else opened

    def arrange(
        self, features: Tensor, v: Tensor, gates: list[Tensor], key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return the operator's inputs: q, k (B, H, L, Dk), v (B, H, L, Dv), gates (B, H, L, size).

        q and k are in v's dtype, gates in float32 at least: half precision would round a decay just below 1 to 1.

        k and v are (B, H, L, N, size) for a rule of several steps, a gate of one number is (B, H, L). A padded token
        has a key of zero, and gates that do not change the memory.
        """
        steps = self.rule.steps
        v = v.permute(0, 3, 1, 2, 4)
        q, k = features.to(v.dtype).permute(0, 3, 1, 2, 4).split((1, steps), 3)
        if key_padding_mask is not None:
            k = k.masked_fill(key_padding_mask[:, None, :, None, None], 0)
            gates = [
                opened
                if gate.at_padding is None
                else opened.masked_fill(key_padding_mask[..., None, None], gate.at_padding)
                for gate, opened in zip(self.rule.gates, gates, strict=True)
            ]
        gates = [
            opened.transpose(1, 2) if gate.size else opened.transpose(1, 2).squeeze(-1)
            for gate, opened in zip(self.rule.gates, gates, strict=True)
        ]
        return q.squeeze(3), *((k, v) if steps > 1 else (k.squeeze(3), v.squeeze(3))), gates
