"""Causal self-attention whose memory is a matrix of constant size per head, written and read at every token.

Shapes: B batch, L tokens, H heads, D embed_dim, d = D / H, Dk feature_dim of the map, Dv size of a value, by default d.
N is the number of keys and values a token: 1, except for rules with several steps.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.checks import check, look_up
from fairseq_fwp.modules.attention.base import Attention, head_size
from fairseq_fwp.modules.attention.convolution import ShortConvolution
from fairseq_fwp.modules.attention.memory import FastWeightState, Memory
from fairseq_fwp.modules.attention.normalization import (
    AttentionNormalization,
    SumNormalization,
    fit_normalizations,
)
from fairseq_fwp.modules.feature_maps import Favor, FeatureMap, kernel_form
from fairseq_fwp.modules.layer_norm import RmsNorm, layer_norm
from fairseq_fwp.modules.update_rules import Gate, MambaDecay, UpdateRule, find_rule, resolve, unit_length
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.projection import Layout, Part, has_kernel, map_projection

LEAST_LENGTH = 1e-12  # by which `F.normalize` divides
OUTPUT_GATES = {"none": None, "silu": F.silu, "sigmoid": torch.sigmoid}


class FastWeightAttention(Attention):
    """Attention with fast weights: a feature map, an update rule and two normalisations.

    Schlag et al. 2021, arXiv 2102.11174, Secs. 3 and 4. One projection gives q, k, v and the rule's gates, without bias
    as in Eqs. 4 and 21. Gates to which the rule gives a bias always have it.

    embed_dim: D; num_heads: H; feature_map: a map built for key_dim; update_rule: a key of `UPDATE_RULES`;
    key_dim: size of a head's key before the map, None = D / H (the m of Mao 2022 is smaller);
    value_dim: Dv, None = D / H;
    value_heads: memories, a multiple of H, None = H: each q and k serves so many in a row, with their own v and gates;
    conv_size: tokens W that a convolution of q, k and v sees before the map, v through SiLU after it; 0 = none;
    sum_normalization: of mapped q and k;
    l2_normalization: divide mapped q and k by their lengths (Yang et al. 2024, arXiv 2406.06484, Sec. 3.3);
    l2_normalization_epsilon: added to the squares of these lengths, as in public code;
    scale_queries: mapped q times 1 / sqrt(Dk), as in softmax attention;
    attention_normalization: of the output, and of values that the rule retrieves;
    scale_read_out: times 1 / sqrt(Dv), as in the paper's public CUDA layers, not in its equations;
    norm_read_out: layer normalisation of each head's output, as in the public code of the rule fwm;
    rms_norm, norm_epsilon: RMS normalisation there instead of layer normalisation, and its epsilon;
    output_gate: a key of `OUTPUT_GATES`, the function of a projection of x by which the output is then multiplied;
    output_gate_rank: of that projection, whose second factor has a bias; None = full rank, without bias;
    bias: of q, k, v and the output, and of gates to which the rule gives none, from zero;
    negative_eigenvalues: rates of delta's family up to 2 instead of 1 (Grazzi et al. 2025, arXiv 2411.12537);
    decay_lower_bound: see `MambaDecay`;
    backend: of the operators.

    Convolution, gate and scale are those of DeltaNet, Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention.
    Raises ValueError for an unknown rule, a head count that does not divide embed_dim and sizes below 1. So it does
    if the map or the rule cannot have a normalisation, negative_eigenvalues or decay_lower_bound.
    Raises TypeError for a feature_map that is not a FeatureMap.
    """

    packs_documents = True
    states = (FastWeightState,)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feature_map: FeatureMap,
        update_rule: str,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        value_heads: int | None = None,
        conv_size: int = 0,
        sum_normalization: SumNormalization | None = None,
        l2_normalization: bool = False,
        l2_normalization_epsilon: float = 0.0,
        scale_queries: bool = False,
        attention_normalization: AttentionNormalization | None = None,
        scale_read_out: bool = False,
        norm_read_out: bool = False,
        rms_norm: bool = False,
        norm_epsilon: float = 1e-5,
        output_gate: str = "none",
        output_gate_rank: int | None = None,
        bias: bool = False,
        negative_eigenvalues: bool = False,
        decay_lower_bound: float | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        key_dim = head_size(embed_dim, num_heads, key_dim)
        value_dim = head_size(embed_dim, num_heads, value_dim, "value_dim")
        value_heads = num_heads if value_heads is None else value_heads
        multiple = value_heads >= num_heads and value_heads % num_heads == 0
        check(multiple, f"`value_heads` must be a multiple of `num_heads` = {num_heads}, got {value_heads}")
        rule = find_rule(update_rule)
        check(
            not negative_eigenvalues or any(gate.doubles for gate in rule.gates),
            f"`negative_eigenvalues` must be off for the update rule {update_rule}, got on: it doubles the write "
            "strength beta, which this rule does not have",
        )
        if not isinstance(feature_map, FeatureMap):
            example = f"FEATURE_MAPS['elu']({key_dim})"
            raise TypeError(f"`feature_map` must be a FeatureMap such as {example}, got {type(feature_map).__name__}")
        self.num_heads = num_heads
        self.value_heads = value_heads
        self.head_dim = value_dim
        self.key_dim = key_dim
        self.negative_eigenvalues = negative_eigenvalues
        self.feature_map = feature_map
        dims, values = (feature_map.feature_dim, value_dim), value_heads * value_dim
        gate_sizes = {gate.name: value_heads * gate.width(*dims) for gate in rule.gates}
        ranks = {gate.name: resolve(gate.rank, *dims) for gate in rule.gates if gate.rank}
        self.sizes = [(1 + rule.steps) * num_heads * key_dim, rule.steps * values, *(gate_sizes | ranks).values()]
        self.in_proj = nn.Linear(embed_dim, sum(self.sizes), bias=False)
        self.bias = nn.Parameter(torch.zeros(sum(self.sizes[:2]))) if bias else None
        self.gate_biases = nn.ParameterDict(
            {gate.name: torch.zeros(gate_sizes[gate.name]) for gate in rule.gates if gate.bias or bias}
        )
        self.gate_expansions = nn.ModuleDict(
            {name: nn.Linear(rank, gate_sizes[name], bias=False) for name, rank in ranks.items()}
        )
        learned: dict[str, Callable[[int, int], nn.Module]] = {
            gate.name: gate.learned for gate in rule.gates if gate.learned
        }
        if decay_lower_bound is not None:
            fits = MambaDecay in learned.values()
            check(fits, f"`decay_lower_bound` must be left out for the update rule {update_rule}, got one")
            bounded = partial(MambaDecay, lower_bound=decay_lower_bound)
            learned = {name: bounded if kind is MambaDecay else kind for name, kind in learned.items()}
        self.gate_activations = nn.ModuleDict(
            {name: activation(value_heads, gate_sizes[name] // value_heads) for name, activation in learned.items()}
        )
        if attention_normalization:
            attention_normalization.check_rule(update_rule, rule)
        self.sum_normalization, attention_normalization = fit_normalizations(
            feature_map, sum_normalization, attention_normalization
        )
        self.memory = Memory(rule, attention_normalization, backend)
        self.key_normalizations: list[Callable[[Tensor], Tensor]] = []
        if self.sum_normalization is not None:
            self.key_normalizations.append(self.sum_normalization)
        positive = l2_normalization_epsilon >= 0
        check(positive, f"`l2_normalization_epsilon` must be at least 0, got {l2_normalization_epsilon}")
        if l2_normalization:
            self.key_normalizations.append(partial(unit_length, epsilon=l2_normalization_epsilon))
        self.query_scale = feature_map.feature_dim**-0.5 if scale_queries else 1.0
        self.scale = self.head_dim**-0.5 if scale_read_out else 1.0
        # Features that do not sum to one, and gradients through a small divisor, can overflow float16.
        self.overflows = attention_normalization is not None or sum_normalization is None
        self.read_out_norm = layer_norm(self.head_dim, rms_norm, norm_epsilon) if norm_read_out else None
        self.out_proj = nn.Linear(values, embed_dim, bias=bias)
        self.convolution = ShortConvolution(sum(self.sizes[:2]), conv_size) if conv_size else None
        self.gate_function = look_up("`output_gate`", output_gate, OUTPUT_GATES)
        rank = output_gate_rank
        check(rank is None or rank >= 1, f"`output_gate_rank` must be at least 1, got {rank}")
        self.output_gate: nn.Module | None = None
        if self.gate_function is not None:
            low = None if rank is None else (nn.Linear(embed_dim, rank, bias=False), nn.Linear(rank, values))
            self.output_gate = nn.Linear(embed_dim, values, bias=False) if low is None else nn.Sequential(*low)
        self.layout = self._find_layout(l2_normalization, l2_normalization_epsilon)
        self.initialize()

    @property
    def rule(self) -> UpdateRule:
        """The update rule of the memory."""
        return self.memory.rule

    def forward(
        self,
        x: Tensor,
        state: FastWeightState | None = None,
        key_padding_mask: Tensor | None = None,
        first: Tensor | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, FastWeightState]:
        """Return y (B, L, D) for x (B, L, D), and the state after the last token.

        state: before the first token, None = empty; key_padding_mask (B, L): True at tokens that do not write;
        first (B, L): True at tokens that begin a document, where the memory is empty; None = nowhere.
        """
        q, k, v, gates, recent = self.prepare(x, state, key_padding_mask, first)
        out, after = self.memory.read(q, k, v, gates, state, first)
        return self.out_proj(self.gate(out, x)), after._replace(recent=recent)

    def read_whole(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return y (B, L, D) of `forward` for whole sequences, which nobody continues: see `Memory.read_whole`."""
        q, k, v, gates, _ = self.prepare(x, key_padding_mask=key_padding_mask)
        return self.out_proj(self.gate(self.memory.read_whole(q, k, v, gates), x))

    def initialize(self) -> None:
        """Draw the rule's initial biases of the gates."""
        for gate in self.rule.gates:
            if gate.bias:
                bias = self.gate_biases[gate.name]
                with torch.no_grad():
                    bias.copy_(gate.bias(bias.numel()))

    def _find_layout(self, of_length: bool, epsilon_of_length: float) -> Layout | None:
        """Return what the kernel for map, normalisation and gates needs; None if it does not know this layer."""
        form, of_sum = kernel_form(self.feature_map), self.sum_normalization
        if form is None or (of_sum and of_length) or self.memory.backend not in ("auto", "kernel"):
            return None
        norm: tuple[str, bool, float] = ("none", False, 0.0)
        if of_sum is not None and of_sum.epsilon is not None:
            norm = ("sum", of_sum.add_epsilon, of_sum.epsilon)
        if of_length:
            norm = ("length", epsilon_of_length > 0, epsilon_of_length or LEAST_LENGTH)
        values = self.rule.steps, self.value_heads, self.head_dim
        parts = [Part(*values), *map(self._part_of, self.rule.gates, self.sizes[2:])]
        if self.convolution is not None:  # which the kernel follows, without the gates
            parts = [Part(*values, "silu")]
        dims = self.num_heads, self.rule.steps, self.key_dim, self.feature_map.feature_dim
        layout = Layout(*dims, form.name, *norm, self.query_scale, form.scale, form.offset, tuple(parts))
        random = self.feature_map.projection.numel() if isinstance(self.feature_map, Favor) else 0
        return layout if layout.fits(random) else None

    def _part_of(self, gate: Gate, size: int) -> Part:
        """Return the columns of a gate; only the kernel's own activation is applied there."""
        if gate.rank:
            return Part(1, 1, size)
        is_sigmoid = gate.activation is torch.sigmoid and not gate.learned
        doubled = 2.0 if gate.doubles and self.negative_eigenvalues else 1.0
        return Part(1, self.value_heads, size // self.value_heads, *(("sigmoid", doubled) if is_sigmoid else ()))

    def prepare(
        self,
        x: Tensor,
        state: FastWeightState | None = None,
        key_padding_mask: Tensor | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor | None]:
        """Return what the memory reads of x (B, L, D): q, k (B, H, L, Dk), v (B, H, L, Dv) and gates, padded.

        q and k are in v's dtype, gates in float32 at least: half precision would round a decay just below 1 to 1. The
        last result is a convolution's inputs of the last tokens, None without one.
        Raises ValueError for an x of other dimensions.
        """
        if x.dim() != 3:  # the message is not for a compiled graph, where sizes are symbols
            raise ValueError(f"x must have shape (B, L, D), got {tuple(x.shape)}")
        projected, recent = self.in_proj(x), None
        has_map = self._has_map(projected)
        if has_map and self.convolution is None:
            q, k, v, gates = self.map_at_once(self._add_biases(projected))
        else:
            mixed, gates, recent = self.project(projected, state, key_padding_mask, first)
            q, k, v = self.map_at_once(*mixed)[:3] if has_map else self.map(*mixed)
        return (*self.arrange(q, k, v, gates, key_padding_mask), recent)

    def _has_map(self, projected: Tensor) -> bool:
        """Return whether the kernel computes what PyTorch would, in the same dtypes."""
        if self.layout is None or not has_kernel(projected) or (self.overflows and projected.dtype == torch.float16):
            return False
        # Under autocast, biases make gates float32, and leave values without biases in half precision.
        autocast = projected.dtype != self.in_proj.weight.dtype
        return not (autocast and self.bias is None and any(bias is not None for bias in self._added_biases()))

    def _added_biases(self) -> list[Tensor | None]:
        """Return the biases of q, k and v, and of each gate. Those of factored gates come later."""
        return [self.bias, *(None if gate.rank else self.gate_biases.get(gate.name) for gate in self.rule.gates)]

    def _add_biases(self, projected: Tensor) -> Tensor:
        """Return a projection with its biases."""
        pairs = [*zip(self._added_biases(), (sum(self.sizes[:2]), *self.sizes[2:]), strict=True)]
        if all(bias is None for bias, _ in pairs):
            return projected
        zeros = self.in_proj.weight.new_zeros
        return projected + torch.cat([zeros(size) if bias is None else bias for bias, size in pairs])

    def map_at_once(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return q, k and v as `map`, and gates, by one kernel.

        mixed: a projection with its biases, or the output of a convolution, without gates.
        """
        assert self.layout is not None
        random = self.feature_map.projection if isinstance(self.feature_map, Favor) else None
        q, k, v, *parts = map_projection(mixed, self.layout, random)
        gates = []
        for gate, of_part, part in zip(self.rule.gates, self.layout.parts[1:], parts, strict=False):
            if gate.rank:
                gates.append(self._activate(gate, part.flatten(2)))
            else:
                gates.append(self._open(gate, part.squeeze(2)) if of_part.activation == "none" else part.squeeze(2))
        return self._by_head(q), self._by_head(k), v, gates

    def project(
        self,
        projected: Tensor,
        state: FastWeightState | None = None,
        key_padding_mask: Tensor | None = None,
        first: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Return the inputs of `map`, gates (B, L, H, size), and a convolution's inputs of the last tokens.

        Here and below v and gates have value_heads heads.
        """
        # A convolution takes all its channels at once. Without one, a second split would copy their gradients again.
        sizes = self.sizes[:2] if self.convolution is None else [sum(self.sizes[:2])]
        parts = projected.split([*sizes, *self.sizes[2:]], dim=-1)
        mixed, projections = list(parts[: len(sizes)]), parts[len(sizes) :]
        if projected.device.type == "cpu":  # where kernels compute in float32, and would convert their arguments
            mixed = [at_least_float32(part) for part in mixed]
        if self.bias is not None:
            mixed = [part + bias for part, bias in zip(mixed, self.bias.split(sizes), strict=True)]
        recent = None
        if self.convolution is not None:
            before = None if state is None else state.recent
            convolved, recent = self.convolution(*mixed, before, key_padding_mask, first)
            mixed = [convolved]
        gates = [self._activate(gate, x) for gate, x in zip(self.rule.gates, projections, strict=True)]
        return mixed, gates, recent

    def _activate(self, gate: Gate, projected: Tensor) -> Tensor:
        """Return the gate (B, L, H, size) from its projection (B, L, H size, or its rank)."""
        if gate.rank:
            projected = self.gate_expansions[gate.name](projected)
        if gate.name in self.gate_biases:
            projected = projected + self.gate_biases[gate.name]
        return self._open(gate, projected.unflatten(-1, (self.value_heads, -1)))

    def _open(self, gate: Gate, projected: Tensor) -> Tensor:
        """Return the gate from its projection with biases (B, L, H, size)."""
        activation = self.gate_activations[gate.name] if gate.learned else gate.activation
        activated: Tensor = activation(at_least_float32(projected))
        return 2 * activated if gate.doubles and self.negative_eigenvalues else activated

    def map(self, *mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mapped and normalised q (B, H, L, 1, Dk) and k (B, H, L, N, Dk), in v's dtype, and v (B, L, N, H, Dv).

        mixed: q and N k, and v, of the projection (B, L, C); after a convolution they are one tensor, and v lacks SiLU.
        """
        queries_keys, v = mixed if self.convolution is None else mixed[0].split(self.sizes[:2], -1)
        v = v if self.convolution is None else F.silu(v)
        queries_keys = queries_keys.unflatten(-1, (-1, self.num_heads, self.key_dim))
        v = v.unflatten(-1, (-1, self.value_heads, self.head_dim))
        if self.overflows and v.dtype == torch.float16:
            v = at_least_float32(v)
        features = self.feature_map(queries_keys)
        for normalization in self.key_normalizations:
            features = normalization(features)
        q, k = self._by_head(features.to(v.dtype)).split((1, self.rule.steps), 3)
        return q * self.query_scale if self.query_scale != 1 else q, k, v

    def _by_head(self, features: Tensor) -> Tensor:
        """Return features (B, L, N, num_heads, Dk) as (B, H, L, N, Dk)."""
        features = features.permute(0, 3, 1, 2, 4)
        shared_by = self.value_heads // self.num_heads
        return features if shared_by == 1 else features.repeat_interleave(shared_by, 1)

    def arrange(
        self, q: Tensor, k: Tensor, v: Tensor, gates: list[Tensor], key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return what `map` and `project` return as the memory reads it: all by head, k and gates padded."""
        v = v.permute(0, 3, 1, 2, 4)
        if self.rule.steps == 1:
            k, v = k.squeeze(3), v.squeeze(3)
        by_head = [gate.transpose(1, 2) for gate in gates]
        gates = [x if gate.size else x.squeeze(-1) for gate, x in zip(self.rule.gates, by_head, strict=True)]
        k, gates = self.memory.pad(k, gates, key_padding_mask)
        return q.squeeze(3), k, v, gates

    def gate(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the memory's output (B, H, L, Dv) normalised, scaled and gated by x (B, L, D): (B, L, H Dv)."""
        opening, norm = self.gate_function, self.read_out_norm
        gate = None if self.output_gate is None else self.output_gate(x)
        if isinstance(norm, RmsNorm) and self.scale == 1 and gate is not None and opening is not None:
            by_head = gate.unflatten(-1, (self.value_heads, -1))
            return norm(out.to(x.dtype).transpose(1, 2), by_head, opening).flatten(2)
        if norm is not None:
            out = norm(out.to(x.dtype))
        if self.scale != 1:
            out = out * self.scale
        out = self.merge_heads(out).to(x.dtype)
        return out if gate is None or opening is None else out * opening(gate)

    def state_size(self, length: int, carried: bool = False) -> int:
        # Without z, as in Schlag et al. 2021, App. F.
        recent = 0 if self.convolution is None else self.convolution.weight[:, 1:].numel()
        return self.value_heads * self.feature_map.feature_dim * self.head_dim + recent

    def extra_repr(self) -> str:
        normalizations = [*self.key_normalizations, self.memory.normalization]
        return f"num_heads={self.num_heads}, key_dim={self.key_dim}, normalizations={normalizations}"
