"""The checks of all kernels before their first use, which `ops.kernels.self_check` runs in another process."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_fwp.modules.attention.fast_weight import FastWeightAttention, Mapped
from fairseq_fwp.modules.attention.normalization import SumNormalization
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.ops import projection, recurrent_delta
from fairseq_fwp.ops.kernels.self_check import LIMITS, Compared, KernelCheck, Named, check_in_child
from fairseq_fwp.ops.rule import Rule
from fairseq_fwp.ops.rules import RULES

CPU = torch.device("cpu")
# Lengths with several chunks on tensor cores, kept states and a partial chunk at the end. Sizes for copies of single
# numbers and of 16 bytes, in kernels for narrow, ordinary and wide keys.
SIZES = (
    {"B": 2, "H": 2, "Hk": 1, "L": 70, "N": 2, "Dk": 20, "Dv": 24},
    {"B": 1, "H": 2, "Hk": 1, "L": 66, "N": 2, "Dk": 64, "Dv": 64},
    {"B": 1, "H": 1, "Hk": 1, "L": 67, "N": 2, "Dk": 100, "Dv": 16},
)
# Few and long enough for segments that run at once, in bfloat16. Wide values are spread over several blocks.
LONG = (
    {"B": 1, "H": 1, "Hk": 1, "L": 2080, "N": 2, "Dk": 16, "Dv": 16},
    {"B": 1, "H": 1, "Hk": 1, "L": 2080, "N": 2, "Dk": 16, "Dv": 160},
)
WITH_SEGMENTS = ("sum_rule", "delta_rule", "gated_rule", "gla_rule", "gated_delta_rule", "dplr_rule")


class RuleCheck(NamedTuple):
    """The check of a rule, with gates of each allowed shape."""

    rule: Rule

    @property
    def name(self) -> str:
        """The name of the rule."""
        return self.rule.name

    def compare(self, device: torch.device) -> Iterator[Compared]:
        """Yield results of the kernel, those of the reference, and the dtype."""
        rule = self.rule
        all_sizes = (*SIZES, *LONG) if rule.name in WITH_SEGMENTS else SIZES
        for sizes, gates in itertools.product(all_sizes, itertools.product(*rule.gates.values())):
            token, state = ("B", "H", "L"), ("B", "H", "Dk", "Dv")
            shapes = {"q": ("B", "Hk", "L", "Dk"), "k": rule.key, "v": rule.value}
            shapes |= dict(zip(rule.gates, gates, strict=True))
            shapes |= {"state": state, "d_out": (*token, "Dv"), "d_state": state}
            numbers = {name: [sizes[letter] for letter in shape] for name, shape in shapes.items()}
            inputs = sample(numbers, sizes["Dk"] / 2)
            documents = (torch.arange(sizes["L"]) == 33).expand(sizes["B"], -1)
            usual = ((None, tuple(LIMITS)), (documents, (torch.float32, torch.bfloat16)))
            for first, dtypes in ((None, (torch.bfloat16,)),) if sizes in LONG else usual:
                truth = results(rule.reference, inputs, torch.float64, CPU, first)
                for dtype in dtypes:
                    yield results(rule.run_operator, inputs, dtype, device, first), truth, dtype


class RecurrentDeltaCheck:
    """The check of `recurrent_delta`."""

    name = recurrent_delta.NAME

    def compare(self, device: torch.device) -> Iterator[Compared]:
        """Yield results of the kernel, those of the definition in float64, and the dtype."""

        def run(backend: str, *tokens: Tensor, state: Tensor, first: Tensor) -> tuple[Tensor, ...]:
            return recurrent_delta.recurrent_delta(*tokens, memory=state, first=first, backend=backend)[:2]

        for length, dim in ((70, 16), (35, 20), (35, 64)):
            out, state = [2, length, 2, dim], [2, 2, dim, dim]
            shapes = {"x": [*out[:3], 3 * dim + 1], "weights": [2, dim, 3 * dim + 1], "z": out, "d_out": out}
            inputs = sample(shapes | {"state": state, "d_state": state}, dim)
            first = (torch.arange(length) == 33).expand(2, -1)
            truth = results(partial(run, "reference"), inputs, torch.float64, CPU, first)
            for dtype in LIMITS:
                yield results(partial(run, "auto"), inputs, dtype, device, first), truth, dtype


def sample(shapes: dict[str, list[int]], sum_of_key: float) -> dict[str, Tensor]:
    """Return arguments and gradients in float64 that are exact in bfloat16: keys of sum one, gates from 1/2 to 1."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        normal = name in ("q", "v", "state", "d_out", "d_state")
        x = (torch.randn if normal else torch.rand)(shape, generator=generator)
        x = x if normal else x / sum_of_key if name in ("k", "removal_key", "removal") else 1 - x / 2
        tensors[name] = x.bfloat16().double()
    return tensors


def results(compute: Any, inputs: dict[str, Tensor], dtype: torch.dtype, device: torch.device, first: Any) -> Any:
    """Return out, the new state and all gradients by name, in float64 on the CPU."""
    of_state = torch.promote_types(dtype, torch.float32)
    moved = {name: x.to(device, of_state if "state" in name else dtype) for name, x in inputs.items()}
    gradients = moved.pop("d_out"), moved.pop("d_state")
    leaves = {name: x.detach().requires_grad_() for name, x in moved.items()}
    *tokens, state = leaves.values()
    outputs = compute(*tokens, state=state, first=None if first is None else first.to(device))
    results = (*outputs, *torch.autograd.grad(outputs, list(leaves.values()), gradients))
    names = ("out", "the new state", *(f"the gradient of {name}" for name in leaves))
    return {name: x.detach().double().cpu() for name, x in zip(names, results, strict=True)}


MAP_SIZES, HEADS = (3, 35), 3  # batch, tokens; heads
SUM, ADDED = SumNormalization(), SumNormalization(0.01, add_epsilon=True)
# Map and its arguments, rule, size of keys and of values, and options. Vectors of few numbers, of a few pieces that are
# copied at once, and of many.
MAP_CASES: tuple[tuple[str, dict[str, Any], str, int, int, dict[str, Any]], ...] = (
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


class MapCheck:
    """The check of the kernel for maps, normalisation and gates."""

    name = projection.NAME

    def compare(self, device: torch.device) -> Iterator[Compared]:
        """Yield results of the kernel, those of PyTorch in float64, and the dtype; nothing on a device without it."""
        if device.type != projection.DEVICE:
            return
        for name, arguments, rule, key_dim, value_dim, options in MAP_CASES:
            feature_map = FEATURE_MAPS[name](key_dim, **arguments)
            options = {"key_dim": key_dim, "value_dim": value_dim, **options}
            layer = FastWeightAttention(12, HEADS, feature_map, rule, **options).double()
            x = torch.randn(*MAP_SIZES, layer.in_proj.out_features).bfloat16().double()
            truth = _map_results(FastWeightAttention.map_in_pytorch, layer, x)
            for dtype in LIMITS:
                layer.to(device, dtype)
                yield _map_results(FastWeightAttention.map_by_kernel, layer, x.to(device, dtype)), truth, dtype


def _map_results(
    compute: Callable[[FastWeightAttention, Tensor], Mapped], layer: FastWeightAttention, x: Tensor
) -> Named:
    """Return queries, keys, values, gates and the gradient of x, a projection, in float64 on the CPU."""
    leaf = x.detach().requires_grad_()
    q, k, v, gates, _ = compute(layer, leaf)
    results = [q, k, v, *gates.values()]
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(y.shape, generator=generator).bfloat16().to(y) for y in results]
    found = (*results, *torch.autograd.grad(results, leaf, gradients))
    names = ("queries", "keys", "values", *(gate.name for gate in layer.rule.gates), "the gradient of the projection")
    return {name: x.detach().double().cpu() for name, x in zip(names, found, strict=True)}


RULE_CHECKS = [RuleCheck(rule) for rule in RULES if rule.has_kernel]
CHECKS: tuple[KernelCheck, ...] = (*RULE_CHECKS, MapCheck(), RecurrentDeltaCheck())


def main() -> None:
    """Check all kernels; the device and the number of the first check are arguments of the program."""
    check_in_child(CHECKS)
