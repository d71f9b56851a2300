"""The gates of a layer's update rule: their columns of the layer's projection become numbers for every token and head.

Shapes: B batch, L tokens, H heads of values, Dk feature_dim of the map, Dv size of a value.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from fairseq_fwp.modules.update_rules import Gate, MambaDecay, UpdateRule, resolve
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.checks import check
from fairseq_fwp.ops.projection import Part


class Gates:
    """The gates of a rule, by name: activation(x W + bias), where x W are columns of a projection, or a low rank of it.

    rule: whose gates they are; name: of the rule, for errors; heads: H; dims: Dk and Dv;
    bias, negative_eigenvalues, decay_lower_bound: of `FastWeightAttention`.

    biases, expansions and activations are its parameters, by gate. The layer registers them, under the names that they
    have in checkpoints. Raises ValueError for options that the rule's gates do not have.
    """

    def __init__(
        self,
        rule: UpdateRule,
        name: str,
        heads: int,
        dims: tuple[int, int],
        bias: bool = False,
        negative_eigenvalues: bool = False,
        decay_lower_bound: float | None = None,
    ) -> None:
        check(
            not negative_eigenvalues or any(gate.doubles for gate in rule.gates),
            f"`negative_eigenvalues` must be off for the update rule {name}, got on: it doubles "
            "gates with `doubles=True`, and this rule has none",
        )
        learned: dict[str, Callable[[int, int], nn.Module]] = {
            gate.name: gate.learned for gate in rule.gates if gate.learned
        }
        if decay_lower_bound is not None:
            fits = MambaDecay in learned.values()
            check(fits, f"`decay_lower_bound` must be left out for the update rule {name}, got one")
            bounded = partial(MambaDecay, lower_bound=decay_lower_bound)
            learned = {gate: bounded if make is MambaDecay else make for gate, make in learned.items()}
        sizes = {gate.name: gate.width(*dims) for gate in rule.gates}
        self.rule = rule
        self.heads = heads
        self.negative_eigenvalues = negative_eigenvalues
        self.columns = {gate.name: gate.columns(heads, *dims) for gate in rule.gates}
        self.biases = nn.ParameterDict(
            {gate.name: torch.zeros(heads * sizes[gate.name]) for gate in rule.gates if gate.bias or bias}
        )
        self.expansions = nn.ModuleDict(
            {
                gate.name: nn.Linear(resolve(gate.rank, *dims), heads * sizes[gate.name], bias=False)
                for gate in rule.gates
                if gate.rank
            }
        )
        self.activations = nn.ModuleDict({gate: make(heads, sizes[gate]) for gate, make in learned.items()})

    def initialize(self) -> None:
        """Draw the rule's initial biases."""
        for gate in self.rule.gates:
            if gate.bias:
                bias = self.biases[gate.name]
                with torch.no_grad():
                    bias.copy_(gate.bias(bias.numel()))

    def __call__(self, projected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gates (B, L, H, size) from their columns (B, L, columns), by name."""
        return {gate.name: self._open(gate, projected[gate.name]) for gate in self.rule.gates}

    def _open(self, gate: Gate, projected: Tensor) -> Tensor:
        """Return a gate (B, L, H, size) from its columns (B, L, columns)."""
        if gate.rank:
            projected = self.expansions[gate.name](projected)
        if gate.name in self.biases:
            projected = projected + self.biases[gate.name]
        return self._activate(gate, projected.unflatten(-1, (self.heads, -1)))

    def _activate(self, gate: Gate, projected: Tensor) -> Tensor:
        """Return a gate from its projection with biases (B, L, H, size)."""
        activation = self.activations[gate.name] if gate.learned else gate.activation
        activated: Tensor = activation(at_least_float32(projected))
        return 2 * activated if self._doubles(gate) else activated

    def _doubles(self, gate: Gate) -> bool:
        """Return whether a gate goes up to 2."""
        return gate.doubles and self.negative_eigenvalues

    def added_biases(self) -> list[Tensor | None]:
        """Return the biases of each gate's columns. Those of gates of low rank come after their expansion."""
        return [None if gate.rank else self.biases.get(gate.name) for gate in self.rule.gates]

    def of_kernel(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gates (B, L, H, size), by name, from their columns, of which the kernel has computed some."""
        gates = {}
        for gate in self.rule.gates:
            x = columns[gate.name]
            if gate.rank:
                gates[gate.name] = self._open(gate, x.flatten(2))
            elif self.part(gate).activation == "sigmoid":
                gates[gate.name] = x.squeeze(2)
            else:
                gates[gate.name] = self._activate(gate, x.squeeze(2))
        return gates

    def part(self, gate: Gate) -> Part:
        """Return the columns of a gate for the kernel, which computes only plain sigmoids, and no low rank."""
        columns = self.columns[gate.name]
        if gate.rank:
            return Part(1, 1, columns)
        sizes = (1, self.heads, columns // self.heads)
        if gate.learned or gate.activation is not torch.sigmoid:
            return Part(*sizes)
        return Part(*sizes, "sigmoid", 2.0 if self._doubles(gate) else 1.0)

    def by_head(self, gates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return gates (B, L, H, size) as the rule takes them: (B, H, L, size), or (B, H, L) for one number."""
        by_head = {}
        for gate in self.rule.gates:
            x = gates[gate.name].transpose(1, 2)
            by_head[gate.name] = x if gate.size else x.squeeze(-1)
        return by_head
