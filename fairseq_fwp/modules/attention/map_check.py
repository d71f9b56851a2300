"""The check of the kernel for maps, normalisation and gates before its first use: see ``kernels/self_check.py``."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_fwp.modules.attention.fast_weight import FastWeightAttention, Mapped
from fairseq_fwp.modules.attention.normalization import SumNormalization
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.ops import projection

B, L, HEADS = 3, 35, 3
SUM, ADDED = SumNormalization(), SumNormalization(0.01, add_epsilon=True)
# Map and its arguments, rule, size of keys and of values, and options. Vectors of few numbers, of a few pieces that are
# copied at once, and of many.
CASES: tuple[tuple[str, dict[str, Any], str, int, int, dict[str, Any]], ...] = (
    ("elu", {}, "delta", 7, 5, {"sum_normalization": SUM, "scale_queries": True}),
    ("elu", {}, "delta_product", 64, 64, {"sum_normalization": ADDED, "negative_eigenvalues": True}),
    ("dpfp", {"nu": 3}, "delta", 16, 16, {"sum_normalization": SUM}),
    ("dpfp", {}, "sum", 5, 7, {"l2_normalization": True, "l2_normalization_epsilon": 1e-6}),
    ("favor", {"softmax_scale": True}, "gated", 64, 64, {"sum_normalization": SUM}),
    ("favor", {"relu": True, "offset": 0.01}, "delta", 20, 20, {}),
    ("silu", {}, "delta", 128, 128, {"l2_normalization": True}),
    ("tanh", {}, "fwm", 8, 8, {}),
    ("identity", {}, "sum", 12, 12, {}),
)
Named = dict[str, Tensor]
Compared = tuple[Named, Named, torch.dtype]


class MapCheck:
    """The kernel, as `check_in_child` takes it next to the rules."""

    name = projection.NAME
    has_kernel = True

    def compare(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Compared]:
        """Yield results of the kernel, those of PyTorch in float64, and the dtype; nothing on a device without it."""
        if device.type != projection.DEVICE:
            return
        for name, arguments, rule, key_dim, value_dim, options in CASES:
            feature_map = FEATURE_MAPS[name](key_dim, **arguments)
            options = {"key_dim": key_dim, "value_dim": value_dim, **options}
            layer = FastWeightAttention(12, HEADS, feature_map, rule, **options).double()
            x = torch.randn(B, L, layer.in_proj.out_features).bfloat16().double()
            truth = _results(FastWeightAttention.compute, layer, x)
            for dtype in dtypes:
                layer.to(device, dtype)
                yield _results(FastWeightAttention.compute_by_kernel, layer, x.to(device, dtype)), truth, dtype


def _results(compute: Callable[[FastWeightAttention, Tensor], Mapped], layer: FastWeightAttention, x: Tensor) -> Named:
    """Return queries, keys, values, gates and the gradient of x, a projection, in float64 on the CPU."""
    leaf = x.detach().requires_grad_()
    q, k, v, gates, _ = compute(layer, leaf)
    results = [q, k, v, *gates.values()]
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(y.shape, generator=generator).bfloat16().to(y) for y in results]
    found = (*results, *torch.autograd.grad(results, leaf, gradients))
    names = ("queries", "keys", "values", *(gate.name for gate in layer.rule.gates), "the gradient of the projection")
    return {name: x.detach().double().cpu() for name, x in zip(names, found, strict=True)}


MAPS = MapCheck()
