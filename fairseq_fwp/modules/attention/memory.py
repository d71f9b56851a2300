"""The memory of an attention, without parameters: an update rule, attention normalisation, padding and a backend.

Shapes: B batch, L tokens, H heads, Dk feature_dim of the map, Dv size of a value, N keys and values a token. q and k
(B, H, L, Dk) are mapped. v is (B, H, L, Dv). Gates have the names of the rule's. A gate is (B, H, L, size), and (B, H,
L) if it is one number. For a rule of several steps k and v are (B, H, L, N, size).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_fwp.modules.attention.base import scores_are_cheaper
from fairseq_fwp.modules.attention.normalization import AttentionNormalization, running_sum
from fairseq_fwp.modules.update_rules import UpdateRule
from fairseq_fwp.ops.arguments import at_least_float32


class FastWeightState(NamedTuple):
    """The state of a layer: weights (B, H, Dk, Dv), and what some layers have.

    normalizer: (B, H, Dk), with attention normalisation;
    recent: (B, W - 1, C), the inputs of the last tokens of a short convolution.
    """

    weights: Tensor
    normalizer: Tensor | None = None
    recent: Tensor | None = None


@dataclass
class Memory:
    """A matrix (Dk, Dv) per head, which every token writes and then reads, as Schlag et al. 2021, Secs. 3 and 4.

    rule: how it is written; normalization: of the output, and of values that the rule retrieves; None = none;
    backend: of the operators.
    """

    rule: UpdateRule
    normalization: AttentionNormalization | None = None
    backend: str = "auto"

    def pad(
        self, k: Tensor, gates: Mapping[str, Tensor], padding: Tensor | None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return k and the gates with which padded tokens do not change the memory.

        Their keys are zero, and their gates as the rule says. padding (B, L): True at padding; None = nowhere.
        """
        if padding is None:
            return k, gates

        def fill(gate: Tensor, value: float) -> Tensor:  # token by token, as gates lie in memory
            by_token = gate.transpose(1, 2)
            return by_token.masked_fill(padding.view(*padding.shape, *[1] * (gate.dim() - 2)), value).transpose(1, 2)

        k = k.masked_fill(padding.view(padding.shape[0], 1, -1, *[1] * (k.dim() - 3)), 0)
        at_padding = {gate.name: gate.at_padding for gate in self.rule.gates if gate.at_padding is not None}
        return k, {**gates, **{name: fill(gates[name], value) for name, value in at_padding.items()}}

    def write_and_read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Mapping[str, Tensor],
        state: FastWeightState | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, FastWeightState]:
        """Return the normalised output (B, H, L, Dv), and the state after the last token, without `recent`.

        state: before the first token, None = empty; first (B, L): True at tokens that begin a document, where the
        memory is empty; None = nowhere.
        """
        if state is None and first is None and self._suits_scores(q, v):
            return self._read_scores(q, k, v), FastWeightState(k.mT @ v, k.sum(2) if self.normalization else None)
        weights, z = (None, None) if state is None else (state.weights, state.normalizer)
        divisor = None
        if self.normalization is not None:
            divisor, k, v, z = self._normalize(q, k, v, gates, z, first)
        in_order = [gates[name] for name in self.rule.operation.gates]
        out, weights = self.rule.operation(q, k, v, *in_order, weights, first=first, backend=self.backend)
        if divisor is not None:
            out = (out / divisor.unsqueeze(-1)).to(out.dtype)
        return out, FastWeightState(weights, z)

    def _normalize(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], z: Tensor | None, first: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the divisor of the output (B, H, L), k and v with which the rule retrieves normalised values, and z.

        z: the argument is before the first token, None = zeros; the result is after the last one.
        """
        normalization, normalizer = self.normalization, self.rule.normalizer
        assert normalization is not None and normalizer is not None  # `check_rule` refuses others
        if normalizer.gates is not None:
            # A memory for values of one, which forgets as the rule does.
            given = (q, k, torch.ones_like(v[..., :1]), *normalizer.gates(**gates))
            before = None if z is None else z.unsqueeze(-1)
            operation = normalizer.operation or self.rule.operation
            divisor, z = operation(*map(at_least_float32, given), before, first=first, backend=self.backend)
            return normalization.bound(divisor.squeeze(-1)), k, v, z.squeeze(-1)
        sums = running_sum(k, z, first)
        divisor = normalization.output_divisor(q, sums)
        if normalizer.retrieved and not normalization.read_out_only:
            k, v = normalization.normalize_retrieval(k, v, sums, first)
        return divisor, k, v, sums[:, :, -1].clone()  # a slice would keep all sums in memory

    def write_and_read_whole(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        """Return the output of `write_and_read` for whole sequences: they need no state, and a sum has none."""
        return self._read_scores(q, k, v) if self._suits_scores(q, v) else self.write_and_read(q, k, v, gates)[0]

    def _suits_scores(self, q: Tensor, v: Tensor) -> bool:
        """Return whether scores are the fastest form for an empty memory: float32 or float64 on a CPU."""
        length = q.shape[2]
        return (
            self.rule.only_adds
            and self.backend == "auto"
            and q.device.type == "cpu"
            and q.dtype in (torch.float32, torch.float64)
            and not torch.is_autocast_enabled("cpu")  # which would round the scores
            and scores_are_cheaper(length * length, length, (q.shape[-1], v.shape[-1]))
        )

    def _read_scores(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of a rule that only adds, for few tokens: out_t = sum over i <= t of (q_t . k_i) v_i.

        It differs in the last bits: products of matrices add in another order.
        """
        scores = (q @ k.mT).tril()
        out = scores @ v
        return out if self.normalization is None else out / self.normalization.bound(scores.sum(-1)).unsqueeze(-1)
