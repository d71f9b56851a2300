"""Map, normalisation and gates of a fast weight layer by one CUDA kernel, in place of the layer's own steps.

The definition is `FastWeightAttention.compute`; `kernel_checks` compares the two. Shapes: B batch, L tokens, H
heads of values, Dk features of a key, Dv size of a value, N keys and values a token.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fairseq_fwp.modules.attention.convolution import ShortConvolution
from fairseq_fwp.modules.attention.gates import Gates
from fairseq_fwp.modules.attention.memory import FastWeightState, Memory
from fairseq_fwp.modules.attention.normalization import LengthNormalization, SumNormalization
from fairseq_fwp.modules.feature_maps import Favor, FeatureMap, kernel_form
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


class Layer(Protocol):
    """What the kernel needs of a `FastWeightAttention`."""

    num_heads: int
    value_heads: int
    key_dim: int
    head_dim: int
    mixed_columns: list[int]
    query_scale: float
    overflows: bool
    bias: nn.Parameter | None
    in_proj: nn.Linear
    convolution: ShortConvolution | None
    feature_map: FeatureMap
    key_normalizations: list[SumNormalization | LengthNormalization]
    gates: Gates
    memory: Memory
    layout: Layout | None

    def features_by_head(self, features: Tensor) -> Tensor: ...

    def project(
        self,
        projected: Tensor,
        state: FastWeightState | None = None,
        key_padding_mask: Tensor | None = None,
        first: Tensor | None = None,
    ) -> tuple[list[Tensor], dict[str, Tensor], Tensor | None]: ...


def find_layout(layer: Layer) -> Layout | None:
    """Return what the kernel needs to know of a layer; None if it cannot compute its steps."""
    form, norms = kernel_form(layer.feature_map), [norm.form for norm in layer.key_normalizations]
    if form is None or len(norms) > 1 or layer.memory.backend not in ("auto", "kernel"):
        return None
    rule = layer.memory.rule
    values = rule.steps, layer.value_heads, layer.head_dim
    # The kernel follows a convolution, without the gates.
    plain = [Part(*values), *map(layer.gates.part, rule.gates)]
    parts = plain if layer.convolution is None else [Part(*values, "silu")]
    dims = layer.num_heads, rule.steps, layer.key_dim, layer.feature_map.feature_dim
    norm = norms[0] if norms else ("none", False, 0.0)
    layout = Layout(*dims, form.name, *norm, layer.query_scale, form.scale, form.offset, tuple(parts))
    random = layer.feature_map.projection.numel() if isinstance(layer.feature_map, Favor) else 0
    return layout if layout.fits(random) else None


def suits(layer: Layer, projected: Tensor) -> bool:
    """Return whether the kernel computes what PyTorch would of a projection, in the same dtypes."""
    if layer.layout is None or not has_kernel(projected) or (layer.overflows and projected.dtype == torch.float16):
        return False
    # Under autocast, biases make gates float32, and leave values without biases in half precision.
    autocast = projected.dtype != layer.in_proj.weight.dtype
    return not (autocast and layer.bias is None and any(x is not None for x in layer.gates.added_biases()))


def compute(
    layer: Layer,
    projected: Tensor,
    state: FastWeightState | None = None,
    key_padding_mask: Tensor | None = None,
    first: Tensor | None = None,
) -> Mapped:
    """Return what `FastWeightAttention.compute` does, of a projection (B, L, C) that the kernel suits."""
    if layer.convolution is None:
        q, k, v, *of_gates = _map(layer, _add_biases(layer, projected))
        gates = layer.gates.of_kernel(dict(zip(layer.gates.columns, of_gates, strict=True)))
        return Mapped(q, k, v, gates, None)
    (convolved,), gates, recent = layer.project(projected, state, key_padding_mask, first)
    q, k, v = _map(layer, convolved)
    return Mapped(q, k, v, gates, recent)


def _map(layer: Layer, mixed: Tensor) -> list[Tensor]:
    assert layer.layout is not None
    random = layer.feature_map.projection if isinstance(layer.feature_map, Favor) else None
    q, k, *others = map_projection(mixed, layer.layout, random)
    return [layer.features_by_head(q), layer.features_by_head(k), *others]


def _add_biases(layer: Layer, projected: Tensor) -> Tensor:
    biases = [layer.bias, *layer.gates.added_biases()]
    if all(bias is None for bias in biases):
        return projected
    zeros, sizes = layer.in_proj.weight.new_zeros, (sum(layer.mixed_columns), *layer.gates.columns.values())
    pairs = zip(biases, sizes, strict=True)
    return projected + torch.cat([zeros(size) if bias is None else bias for bias, size in pairs])
