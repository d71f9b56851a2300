"""Causal self-attention whose memory is a matrix of constant size per head, written and read at every token.

Shapes: B batch, L tokens, H heads, D embed_dim, d = D / H, Dk feature_dim of the map, Dv = d.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairseq_fwp.modules.feature_maps.feature_map import FeatureMap
from fairseq_fwp.modules.normalization import (
    NORMALIZATION_EPSILON,
    bound,
    normalize_retrieval,
    read_divisor,
    running_normalizer,
    sum_normalize,
)
from fairseq_fwp.modules.onednn import Linear
from fairseq_fwp.modules.precision import at_least_float32
from fairseq_fwp.modules.update_rules import UPDATE_RULES, Gate, find_rule


class FastWeightState(NamedTuple):
    """What a layer remembers: weights (B, H, Dk, Dv) and, with attention normalisation, normalizer (B, H, Dk)."""

    weights: Tensor
    normalizer: Tensor | None = None

    def detach(self) -> "FastWeightState":
        """The same values, cut from the graph (truncated back-propagation through time)."""
        return FastWeightState(self.weights.detach(), None if self.normalizer is None else self.normalizer.detach())

    def reorder(self, new_order: Tensor) -> "FastWeightState":
        """The rows new_order (B',) of the batch, as beam search selects them."""
        return FastWeightState(
            self.weights.index_select(0, new_order),
            None if self.normalizer is None else self.normalizer.index_select(0, new_order),
        )

    def reset(self, rows: Tensor) -> "FastWeightState":
        """Empty in the rows of the batch that are True, rows (B,) bool."""
        return FastWeightState(
            self.weights.masked_fill(rows[:, None, None, None], 0),
            None if self.normalizer is None else self.normalizer.masked_fill(rows[:, None, None], 0),
        )


class FastWeightAttention(nn.Module):
    """Feature map x update rule x two normalisations (Schlag et al. 2021, arXiv 2102.11174, Secs. 3 and 4).

    q, k, v and the rule's gates come from one projection without bias, as in the paper's Eqs. 4 and 21; gates that the
    rule gives a bias have it beside. With `bias`, as pretrained Transformers have it, all of them and the output do.

    embed_dim: D; num_heads: H; feature_map: a map built for key_dim; update_rule: a key of `UPDATE_RULES`;
    key_dim: size of a head's key before the map, None = D / H (Mao 2022 projects to few: its m);
    sum_normalization: divide mapped q and k by their sums (Schlag 2021, Eq. 29);
    attention_normalization: divide the read-out, and what the delta rule retrieves, by z . q and z . k (Eqs. 26-28);
    read_out_only: of these the read-out alone (Eq. 28), as the paper's public code does by default;
    epsilon: of both normalisations, > 0, None = the map's; add_epsilon: add it to every divisor (else: lower bound);
    sum_epsilon: that of sum normalisation, where it is another; None = the same;
    scale_read_out: times 1 / sqrt(D / H), which the paper's equations do not have and its public CUDA layers do;
    norm_read_out: layer normalisation of each head's read-out (what the public code of the rule fwm does);
    bias: of q, k, v, the output, and the gates that the rule gives none, which start at zero;
    l2_normalization: divide mapped q and k by their lengths (Schlag et al. 2021 have their sums in its place; Yang et
    al. 2024, arXiv 2406.06484, Sec. 3.3);
    negative_eigenvalues: rates of delta's family up to 2 in place of 1 (Grazzi et al. 2025, arXiv 2411.12537);
    backend: of the operators.

    Raises ValueError for an unknown rule, a head count that does not divide embed_dim, an epsilon that is no number
    above 0, read_out_only alone, a normalisation with a map whose features may be negative, or a normalisation or
    negative eigenvalues with a rule that has none.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feature_map: FeatureMap,
        update_rule: str,
        *,
        key_dim: int | None = None,
        sum_normalization: bool = False,
        attention_normalization: bool = False,
        read_out_only: bool = False,
        epsilon: float | None = None,
        add_epsilon: bool = False,
        sum_epsilon: float | None = None,
        scale_read_out: bool = False,
        norm_read_out: bool = False,
        bias: bool = False,
        l2_normalization: bool = False,
        negative_eigenvalues: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.rule = find_rule(update_rule)
        if attention_normalization:
            check_normalization(update_rule, read_out_only)
        if negative_eigenvalues and not any(gate.doubles for gate in self.rule.gates):
            raise ValueError(f"--negative-eigenvalues are of rules with a beta up to 1, and {update_rule} has none")
        if (sum_normalization or attention_normalization) and not feature_map.positive:
            raise ValueError(
                f"{type(feature_map).__name__} has features of either sign, and sum and attention normalisation "
                "divide by sums of features: choose another map, or leave both out (--arch fwp_lm has neither)"
            )
        if read_out_only and not attention_normalization:
            raise ValueError(
                "--attention-normalization-read-out-only is a kind of --attention-normalization: give both"
            )
        check_epsilons(epsilon, sum_epsilon)
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.key_dim = self.head_dim if key_dim is None else key_dim
        self.feature_map = feature_map
        self.sum_normalization = sum_normalization
        self.attention_normalization = attention_normalization
        self.read_out_only = read_out_only
        self.epsilon = feature_map.epsilon if epsilon is None else epsilon
        # Features that sum to one are no smaller with one map than with another.
        self.divisor_epsilon = NORMALIZATION_EPSILON if epsilon is None and sum_normalization else self.epsilon
        self.sum_epsilon = self.epsilon if sum_epsilon is None else sum_epsilon
        self.add_epsilon = add_epsilon
        self.scale = self.head_dim**-0.5 if scale_read_out else 1.0
        self.l2_normalization = l2_normalization
        self.negative_eigenvalues = negative_eigenvalues
        self.backend = backend
        dims = (feature_map.feature_dim, self.head_dim)
        gate_sizes = {gate.name: num_heads * (gate.size(*dims) if gate.size else 1) for gate in self.rule.gates}
        ranks = {gate.name: gate.rank(*dims) for gate in self.rule.gates if gate.rank}
        steps = self.rule.steps
        self.sizes = [(1 + steps) * num_heads * self.key_dim, steps * embed_dim, *(gate_sizes | ranks).values()]
        self.in_proj = Linear(embed_dim, sum(self.sizes), bias=False)
        self.bias = nn.Parameter(torch.zeros(sum(self.sizes[:2]))) if bias else None
        self.gate_biases = nn.ParameterDict(
            {gate.name: torch.zeros(gate_sizes[gate.name]) for gate in self.rule.gates if gate.bias or bias}
        )
        self.gate_expansions = nn.ModuleDict(
            {name: Linear(rank, gate_sizes[name], bias=False) for name, rank in ranks.items()}
        )
        self.gate_activations = nn.ModuleDict(
            {
                gate.name: gate.learned(num_heads, gate_sizes[gate.name] // num_heads)
                for gate in self.rule.gates
                if gate.learned
            }
        )
        self.read_out_norm = nn.LayerNorm(self.head_dim) if norm_read_out else None
        self.out_proj = Linear(embed_dim, embed_dim, bias=bias)
        self.initialize()

    def initialize(self) -> None:
        """Draws the initial biases of the gates, as the rule has them."""
        for gate in self.rule.gates:
            if gate.bias:
                bias = self.gate_biases[gate.name]
                with torch.no_grad():
                    bias.copy_(gate.bias(bias.numel()))

    def forward(
        self,
        x: Tensor,
        state: FastWeightState | None = None,
        key_padding_mask: Tensor | None = None,
        first: Tensor | None = None,
        *,
        keep_state: bool = True,
    ) -> tuple[Tensor, FastWeightState | None]:
        """x (B, L, D) -> y (B, L, D) and the state after the last token, which without keep_state may be left out.

        state: before the first token, None = empty; key_padding_mask (B, L): True at tokens that write nothing;
        first (B, L): True at tokens with which a document begins, before which the memory is empty, None = nowhere.
        """
        q, k, v, gates = self._project(x, key_padding_mask)
        if state is None and first is None and self._reads_by_scores(q):
            out = self._read_by_scores(q, k, v)
            if keep_state:
                state = FastWeightState(k.mT @ v, k.sum(2) if self.attention_normalization else None)
        else:
            out, state = self._read(q, k, v, gates, state, first)
        if self.read_out_norm is not None:
            out = self.read_out_norm(out.to(x.dtype))
        if self.scale != 1:
            out = out * self.scale
        out = out.transpose(1, 2).flatten(2)
        return self.out_proj(out.to(x.dtype)), state

    def state_size(self, length: int, carried: bool = False) -> int:
        """Numbers in the fast weights of a sequence, whatever its length; Schlag et al. 2021, App. F, leaves out z."""
        return self.num_heads * self.feature_map.feature_dim * self.head_dim

    def _read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: list[Tensor],
        state: FastWeightState | None,
        first: Tensor | None,
    ) -> tuple[Tensor, FastWeightState]:
        """What the rule reads, normalised (B, H, L, Dv), and the new state."""
        weights, normalizer = (None, None) if state is None else state
        divisor = None
        if self.attention_normalization:
            normalize = self._forgetting_normalizer if self.rule.forgets else self._summing_normalizer
            divisor, normalizer, k, v = normalize(q, k, v, gates, normalizer, first)
        out, weights = self.rule.operator(q, k, v, *gates, weights, backend=self.backend, **documents(first))
        if divisor is not None:
            out = (out / divisor.unsqueeze(-1)).to(out.dtype)
        return out, FastWeightState(weights, normalizer)

    def _reads_by_scores(self, q: Tensor) -> bool:
        """Whether few tokens only add to a memory so large that their L x L scores cost less than visits to it."""
        length = q.shape[2]
        return (
            self.rule is UPDATE_RULES["sum"]
            and self.backend == "auto"
            and q.device.type == "cpu"
            and q.dtype in (torch.float32, torch.float64)
            and not torch.is_autocast_enabled("cpu")  # which would round the scores
            and scores_are_cheaper(length * length, length, (q.shape[-1], self.head_dim))
        )

    def _read_by_scores(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the sum rule reads without a state: out_t = sum over i <= t of (q_t . k_i) v_i, normalised."""
        scores = (q @ k.mT).tril()
        out = scores @ v
        if not self.attention_normalization:
            return out
        return out / bound(scores.sum(-1, keepdim=True), self.divisor_epsilon, self.add_epsilon)

    def _summing_normalizer(
        self, q: Tensor, k: Tensor, v: Tensor, gates: list[Tensor], normalizer: Tensor | None, first: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """z_t . q_t (B, H, L) and z_L, z the sum of the keys; k and v so that what k retrieves is normalised too."""
        z = running_normalizer(k, normalizer, first)
        divisor = read_divisor(q, z, self.divisor_epsilon, self.add_epsilon)
        if self.rule.retrieves and not self.read_out_only:
            k, v = normalize_retrieval(k, v, z, self.divisor_epsilon, self.add_epsilon, first)
        return divisor, z[:, :, -1].clone(), k, v

    def _forgetting_normalizer(
        self, q: Tensor, k: Tensor, v: Tensor, gates: list[Tensor], normalizer: Tensor | None, first: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same, z the memory of the rule itself for values of one."""
        assert self.rule.forgets is not None
        ones = torch.ones_like(v[..., :1])
        wide = (at_least_float32(x) for x in (q, k, ones, *self.rule.forgets(*gates)))
        state = None if normalizer is None else normalizer.unsqueeze(-1)
        rule = self.rule.normalizer or self.rule.operator
        divisor, state = rule(*wide, state, backend=self.backend, **documents(first))
        return bound(divisor.squeeze(-1), self.divisor_epsilon, self.add_epsilon), state.squeeze(-1), k, v

    def _project(self, x: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """q, k (B, H, L, Dk), mapped and normalised; v (B, H, L, Dv); gates, (B, H, L, size) each. All of one dtype."""
        queries_keys, values, *gates = self.in_proj(x).split(self.sizes, dim=-1)
        if self.bias is not None:
            of_queries_keys, of_values = self.bias.split(self.sizes[:2])
            queries_keys, values = queries_keys + of_queries_keys, values + of_values
        # Features that do not sum to one, and gradients through a small divisor, can overflow float16.
        overflows = self.attention_normalization or not self.sum_normalization
        # What is kept for hundreds of tokens is a number just below 1, which half precision rounds to 1.
        forgets = any(gate.at_padding is not None for gate in self.rule.gates)
        if forgets or (overflows and values.dtype == torch.float16):
            values = at_least_float32(values)
        # (B, L, 1 + N, H, d): one call maps queries and keys, and a token has N keys and values.
        steps = self.rule.steps
        features = self.feature_map(queries_keys.unflatten(-1, (1 + steps, self.num_heads, self.key_dim)))
        if self.sum_normalization:
            features = sum_normalize(features, self.sum_epsilon, self.add_epsilon)
        if self.l2_normalization:
            features = functional.normalize(at_least_float32(features), dim=-1)  # float16 has no epsilon of 1e-12
        v = values.unflatten(-1, (steps, self.num_heads, self.head_dim)).permute(0, 3, 1, 2, 4)
        q, k = features.to(v.dtype).permute(0, 3, 1, 2, 4).split((1, steps), 3)
        if key_padding_mask is not None:
            k = k.masked_fill(key_padding_mask[:, None, :, None, None], 0)
        q, k, v = q.squeeze(3), *((k, v) if steps > 1 else (k.squeeze(3), v.squeeze(3)))
        return (
            q,
            k,
            v,
            [
                self._open(gate, projected, key_padding_mask).to(v.dtype)
                for gate, projected in zip(self.rule.gates, gates, strict=True)
            ],
        )

    def _open(self, gate: Gate, projected: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """The gate (B, H, L), or (B, H, L, size) where it has one, from its projection (B, L, H size)."""
        if gate.rank:
            projected = self.gate_expansions[gate.name](projected)
        if gate.name in self.gate_biases:
            projected = projected + self.gate_biases[gate.name]
        activation = self.gate_activations[gate.name] if gate.learned else gate.activation
        opened = activation(at_least_float32(projected).unflatten(-1, (self.num_heads, -1)))
        if gate.doubles and self.negative_eigenvalues:
            opened = 2 * opened
        if key_padding_mask is not None and gate.at_padding is not None:
            opened = opened.masked_fill(key_padding_mask[:, :, None, None], gate.at_padding)
        opened = opened.transpose(1, 2)
        return opened if gate.size else opened.squeeze(-1)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, key_dim={self.key_dim}, sum_normalization={self.sum_normalization}, "
            f"attention_normalization={self.attention_normalization}, read_out_only={self.read_out_only}, "
            f"backend={self.backend!r}"
        )


def documents(first: Tensor | None) -> dict[str, Tensor]:
    """`first` by name, where there are documents: a rule from outside the package may not know it."""
    return {} if first is None else {"first": first}


def check_heads(embed_dim: int, num_heads: int, side: str = "decoder") -> None:
    """Raises ValueError, with that side's flags, unless num_heads divides embed_dim and leaves something to each."""
    if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
        raise ValueError(
            f"the embedding dimension {embed_dim} is not divisible by {num_heads} attention heads: change "
            f"--{side}-embed-dim or --{side}-attention-heads"
        )


def check_normalization(update_rule: str, output_only: bool) -> None:
    """Raises ValueError where this attention normalisation is not defined for the rule."""
    rule = find_rule(update_rule)
    if not rule.normalizes:
        raise ValueError(
            f"attention normalisation is not defined for the update rule {update_rule}: leave out "
            "--attention-normalization (--sum-normalization is)"
        )
    if rule.normalizer and not output_only:
        raise ValueError(
            f"the update rule {update_rule} erases and forgets, and only its output can be normalised: give "
            "--attention-normalization-read-out-only as well"
        )


def check_epsilons(*given: float | None) -> None:
    """Raises ValueError for one that is no number above 0; None is a default."""
    for epsilon in given:
        if epsilon is not None and not 0 < epsilon < math.inf:
            raise ValueError(
                f"--normalization-epsilon and --sum-normalization-epsilon must be numbers above 0: got {epsilon}"
            )


def scores_are_cheaper(pairs: int, visits: int, sizes: tuple[int, int]) -> bool:
    """Whether a number for each pair of tokens costs less than visits to memories of `sizes`, (Dk, Dv).

    It does in short sequences, as most sentences are.
    """
    return pairs * sum(sizes) < visits * math.prod(sizes)
