"""Causal self-attention whose memory is a matrix of constant size per head, written and read at every token.

Shapes: B batch, L tokens, H heads, D embed_dim, d = D / H, Dk feature_dim of the map, Dv size of a value, by default d.
N is the number of keys and values a token: 1, except for rules with several steps.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_fwp.modules.attention.base import NO_MARKS, Attention, Marks, head_size
from fairseq_fwp.modules.attention.convolution import ShortConvolution
from fairseq_fwp.modules.attention.gates import Gates
from fairseq_fwp.modules.attention.memory import FastWeightState, Memory
from fairseq_fwp.modules.attention.normalization import (
    AttentionNormalization,
    LengthNormalization,
    SumNormalization,
    fit_normalizations,
)
from fairseq_fwp.modules.attention.read_out import OUTPUT_GATES, gate_projection, read_out
from fairseq_fwp.modules.feature_maps import Favor, FeatureMap, kernel_name
from fairseq_fwp.modules.layer_norm import layer_norm
from fairseq_fwp.modules.update_rules import UpdateRule, find_rule
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.checks import check, look_up
from fairseq_fwp.ops.projection import Layout, Part, has_kernel, map_projection


class Mapped(NamedTuple):
    """What becomes of a layer's projection.

    q: (B, H, L, 1, Dk), and k: (B, H, L, N, Dk), in v's dtype; v: (B, L, N, H, Dv); gates: (B, L, H, size), by name.
    recent: a convolution's inputs of the last tokens, None without one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Tensor]
    recent: Tensor | None


class FastWeightAttention(Attention[FastWeightState]):
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
        self.key_dim = key_dim = head_size(embed_dim, num_heads, key_dim)
        self.value_dim = value_dim = head_size(embed_dim, num_heads, value_dim, "value_dim")
        self.num_heads = num_heads
        self.value_heads = value_heads = heads_of_values(num_heads, value_heads)
        rule = find_rule(update_rule)
        check_map(feature_map, key_dim)
        self.feature_map = feature_map
        dims, values = (feature_map.feature_dim, value_dim), value_heads * value_dim
        self.mixed_columns = [(1 + rule.steps) * num_heads * key_dim, rule.steps * values]
        columns = [*self.mixed_columns, *(gate.columns(value_heads, *dims) for gate in rule.gates)]
        self.in_proj = nn.Linear(embed_dim, sum(columns), bias=False)
        self.bias = nn.Parameter(torch.zeros(sum(self.mixed_columns))) if bias else None
        self.gates = Gates(rule, update_rule, value_heads, dims, bias, negative_eigenvalues, decay_lower_bound)
        # Parameters have the names and the order that they have in checkpoints and in the states of optimizers.
        self.gate_biases, self.gate_expansions = self.gates.biases, self.gates.expansions
        self.gate_activations = self.gates.activations
        if attention_normalization:
            attention_normalization.check_rule(update_rule, rule)
        of_sum, of_attention = fit_normalizations(feature_map, sum_normalization, attention_normalization)
        of_length = LengthNormalization(l2_normalization_epsilon)
        self.key_normalizations = [norm for norm in (of_sum, of_length if l2_normalization else None) if norm]
        self.memory = Memory(rule, of_attention, backend)
        self.query_scale = dims[0] ** -0.5 if scale_queries else 1.0
        # Features that do not sum to one, and gradients through a small divisor, can overflow float16.
        self.overflows = attention_normalization is not None or sum_normalization is None
        self.read_out_scale = value_dim**-0.5 if scale_read_out else 1.0
        self.opening = look_up("`output_gate`", output_gate, OUTPUT_GATES)
        self.read_out_norm = layer_norm(value_dim, rms_norm, norm_epsilon) if norm_read_out else None
        self.out_proj = nn.Linear(values, embed_dim, bias=bias)
        self.convolution = ShortConvolution(sum(self.mixed_columns), conv_size) if conv_size else None
        self.output_gate = gate_projection(self.opening, embed_dim, values, output_gate_rank)
        self.layout = self._find_layout()
        self.gates.initialize()

    @property
    def rule(self) -> UpdateRule:
        """The update rule of the memory."""
        return self.memory.rule

    @property
    def columns(self) -> dict[str, int]:
        """How many columns of the projection queries and keys (q_k), values (v) and gates have, in their order."""
        q_k, v = self.mixed_columns
        return {"q_k": q_k, "v": v, **self.gates.columns}

    def read(self, x: Tensor, state: FastWeightState | None, marks: Marks) -> tuple[Tensor, FastWeightState]:
        """Return y (B, L, D) for x (B, L, D), and the state after the last token: see `Attention.forward`."""
        q, k, v, gates, recent = self.memory_inputs(x, state, marks)
        out, after = self.memory.write_and_read(q, k, v, gates, state, marks.first)
        return self.project_output(out, x), after._replace(recent=recent)

    def read_whole(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return y (B, L, D) of `forward` for whole sequences, which nobody continues."""
        q, k, v, gates, _ = self.memory_inputs(x, None, Marks(key_padding_mask))
        return self.project_output(self.memory.write_and_read_whole(q, k, v, gates), x)

    def initialize(self) -> None:
        """Draw the rule's initial biases of the gates."""
        self.gates.initialize()

    def memory_inputs(
        self, x: Tensor, state: FastWeightState | None = None, marks: Marks = NO_MARKS
    ) -> tuple[Tensor, Tensor, Tensor, Mapping[str, Tensor], Tensor | None]:
        """Return what the memory reads of x (B, L, D): q, k (B, H, L, Dk), v (B, H, L, Dv) and gates, padded.

        q and k are in v's dtype, gates in float32 at least: half precision would round a decay just below 1 to 1. The
        last result is a convolution's inputs of the last tokens, None without one.
        Raises ValueError for an x of other dimensions.
        """
        if x.dim() != 3:  # the message is not for a compiled graph, where sizes are symbols
            raise ValueError(f"x must have shape (B, L, D), got {tuple(x.shape)}")
        projected = self.in_proj(x)
        compute = self.map_by_kernel if self._suits_kernel(projected) else self.map_in_pytorch
        q, k, v, of_tokens, recent = compute(projected, state, marks)
        v = v.permute(0, 3, 1, 2, 4)
        if self.rule.steps == 1:
            k, v = k.squeeze(3), v.squeeze(3)
        k, gates = self.memory.pad(k, self.gates.by_head(of_tokens), marks.padding)
        return q.squeeze(3), k, v, gates, recent

    def map_in_pytorch(
        self, projected: Tensor, state: FastWeightState | None = None, marks: Marks = NO_MARKS
    ) -> Mapped:
        """Return what becomes of the projection (B, L, C) of x: the definition."""
        mixed, gates, recent = self.split_projection(projected, state, marks)
        return Mapped(*self.map_features(*mixed), gates, recent)

    def split_projection(
        self, projected: Tensor, state: FastWeightState | None, marks: Marks
    ) -> tuple[list[Tensor], dict[str, Tensor], Tensor | None]:
        """Return inputs of `map_features`, gates (B, L, H, size) by name, and a convolution's last inputs.

        Here and below v and gates have value_heads heads.
        """
        # A convolution takes all its channels at once. Without one, a second split would copy their gradients again.
        sizes = self.mixed_columns if self.convolution is None else [sum(self.mixed_columns)]
        parts = projected.split([*sizes, *self.gates.columns.values()], dim=-1)
        mixed, of_gates = list(parts[: len(sizes)]), dict(zip(self.gates.columns, parts[len(sizes) :], strict=True))
        if projected.device.type == "cpu":  # where kernels compute in float32, and would convert their arguments
            mixed = [at_least_float32(part) for part in mixed]
        if self.bias is not None:
            mixed = [part + bias for part, bias in zip(mixed, self.bias.split(sizes), strict=True)]
        recent = None
        if self.convolution is not None:
            before = None if state is None else state.recent
            convolved, recent = self.convolution(*mixed, before, marks)
            mixed = [convolved]
        return mixed, self.gates(of_gates), recent

    def map_features(self, *mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mapped and normalised q (B, H, L, 1, Dk) and k (B, H, L, N, Dk), in v's dtype, and v (B, L, N, H, Dv).

        mixed: q and N k, and v, of the projection (B, L, C); after a convolution they are one tensor, and v lacks SiLU.
        """
        queries_keys, v = mixed if self.convolution is None else mixed[0].split(self.mixed_columns, -1)
        v = v if self.convolution is None else F.silu(v)
        queries_keys = queries_keys.unflatten(-1, (-1, self.num_heads, self.key_dim))
        v = v.unflatten(-1, (-1, self.value_heads, self.value_dim))
        if self.overflows and v.dtype == torch.float16:
            v = at_least_float32(v)
        features = self.feature_map(queries_keys)
        for normalization in self.key_normalizations:
            features = normalization(features)
        q, k = self.features_by_head(features.to(v.dtype)).split((1, self.rule.steps), 3)
        return q * self.query_scale if self.query_scale != 1 else q, k, v

    def features_by_head(self, features: Tensor) -> Tensor:
        """Return features (B, L, N, num_heads, Dk) as (B, H, L, N, Dk)."""
        features = features.permute(0, 3, 1, 2, 4)
        shared_by = self.value_heads // self.num_heads
        return features if shared_by == 1 else features.repeat_interleave(shared_by, 1)

    def project_output(self, out: Tensor, x: Tensor) -> Tensor:
        """Return y (B, L, D) of the memory's output (B, H, L, Dv) and x (B, L, D)."""
        gate = None if self.output_gate is None else self.output_gate(x)
        y = read_out(out, x.dtype, self.read_out_scale, self.read_out_norm, self.opening, gate)
        return self.out_proj(y)

    def state_size(self, length: int, carried: bool = False) -> int:
        # Without z, as in Schlag et al. 2021, App. F.
        recent = 0 if self.convolution is None else self.convolution.weight[:, 1:].numel()
        return self.value_heads * self.feature_map.feature_dim * self.value_dim + recent

    def extra_repr(self) -> str:
        normalizations = [*self.key_normalizations, self.memory.normalization]
        return f"num_heads={self.num_heads}, key_dim={self.key_dim}, normalizations={normalizations}"

    # Map, normalisation and gates by one CUDA kernel, in place of the steps above.

    def map_by_kernel(self, projected: Tensor, state: FastWeightState | None = None, marks: Marks = NO_MARKS) -> Mapped:
        """Return what `map_in_pytorch` does, of what the kernel suits: `kernel_checks` compares the two."""
        assert self.layout is not None
        if self.convolution is None:
            q, k, v, *parts = map_projection(self._add_biases(projected), self.layout, self._random_rows)
            gates, recent = self.gates.of_kernel(dict(zip(self.gates.columns, parts, strict=True))), None
        else:
            (convolved,), gates, recent = self.split_projection(projected, state, marks)
            q, k, v = map_projection(convolved, self.layout, self._random_rows)
        return Mapped(self.features_by_head(q), self.features_by_head(k), v, gates, recent)

    @property
    def _random_rows(self) -> Tensor | None:
        return self.feature_map.projection if isinstance(self.feature_map, Favor) else None

    def _find_layout(self) -> Layout | None:
        """Return what the kernel needs to know of this layer; None if it cannot compute its steps."""
        name, norms = kernel_name(self.feature_map), [norm.form for norm in self.key_normalizations]
        if name is None or len(norms) > 1 or self.memory.backend not in ("auto", "kernel"):
            return None
        values = self.rule.steps, self.value_heads, self.value_dim
        # The kernel follows a convolution, without the gates.
        plain = [Part(*values), *map(self.gates.part, self.rule.gates)]
        parts = plain if self.convolution is None else [Part(*values, "silu")]
        dims = self.num_heads, self.rule.steps, self.key_dim, self.feature_map.feature_dim
        norm = norms[0] if norms else ("none", False, 0.0)
        factors = self.query_scale, self.feature_map.scale, self.feature_map.offset
        layout, random = Layout(*dims, name, *norm, *factors, tuple(parts)), self._random_rows
        return layout if layout.fits(0 if random is None else random.numel()) else None

    def _suits_kernel(self, projected: Tensor) -> bool:
        """Return whether the kernel computes what PyTorch would of a projection, in the same dtypes."""
        if self.layout is None or not has_kernel(projected) or (self.overflows and projected.dtype == torch.float16):
            return False
        # Under autocast, biases make gates float32, and leave values without biases in half precision.
        autocast = projected.dtype != self.in_proj.weight.dtype
        return not (autocast and self.bias is None and any(x is not None for x in self.gates.added_biases()))

    def _add_biases(self, projected: Tensor) -> Tensor:
        biases, sizes = [self.bias, *self.gates.added_biases()], [sum(self.mixed_columns), *self.gates.columns.values()]
        if all(bias is None for bias in biases):
            return projected
        zeros = self.in_proj.weight.new_zeros
        parts = [zeros(size) if bias is None else bias for bias, size in zip(biases, sizes, strict=True)]
        return projected + torch.cat(parts)


def check_map(feature_map: object, key_dim: int) -> None:
    """Raise TypeError for what is not a feature map, such as its name."""
    if not isinstance(feature_map, FeatureMap):
        example = f"FEATURE_MAPS['elu']({key_dim})"
        raise TypeError(f"`feature_map` must be a FeatureMap such as {example}, got {type(feature_map).__name__}")


def heads_of_values(num_heads: int, value_heads: int | None) -> int:
    """Return the number of values' heads, None = num_heads. Raises ValueError unless it is a multiple of that."""
    heads = num_heads if value_heads is None else value_heads
    multiple = heads >= num_heads and heads % num_heads == 0
    check(multiple, f"`value_heads` must be a multiple of `num_heads` = {num_heads}, got {heads}")
    return heads
