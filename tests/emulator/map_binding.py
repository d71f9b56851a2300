"""The operator of maps, normalisation and gates on CUDA tensors, and its autograd in C++, for CPU tensors.

Use it in a process of its own, as cuda_binding.py.
"""

import contextlib
import ctypes
from collections import Counter
from functools import partial
from itertools import pairwise

import cuda_binding
import pytest
import torch
from support.subjects import at_odd_offset, relative_error
from test_maps import CASES, differentiate, make_case, sample
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_fwp.kernel_checks import MapCheck
from fairseq_fwp.modules.attention import FastWeightAttention, fast_weight
from fairseq_fwp.modules.attention.normalization import AttentionNormalization, SumNormalization
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.ops import convolution, projection, rows
from fairseq_fwp.ops.kernels import self_check
from fairseq_fwp.ops.projection import Layout, map_projection

LIMITS = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def compute(case, x):
    return map_projection(x, case.layout, case.random)


def check_results() -> None:
    """Every map with every normalisation, in every dtype, from projections with and without gaps."""
    for number, (name, norm) in enumerate(CASES):
        for dtype, limit in LIMITS.items():
            if norm == "small sums" and dtype == torch.float16:  # its gradients are too small
                continue
            case = make_case(name, norm, steps=1 + number % 2, query_factor=0.5)
            x, gradients = sample(case.layout, dtype)
            other = [x, at_odd_offset(x), torch.stack([x, x], -1)[..., 0]][number % 3]
            gradients = [y.transpose(1, 3).contiguous().transpose(1, 3) for y in gradients]
            found = differentiate(partial(compute, case), other, gradients)
            truth = differentiate(case.define, x.double(), [y.double() for y in gradients])
            for which, y in truth.items():
                assert found[which].dtype == (dtype if "part" not in which else found[which].dtype)
                assert (error := relative_error(found[which], y)) < limit, (name, norm, dtype, which, error)


def check_autograd() -> None:
    case = make_case("dpfp", "sum", width=5)
    x, gradients = sample(case.layout, torch.float64)
    assert torch.autograd.gradcheck(partial(compute, case), x.requires_grad_())
    # Only some results are used.
    for n in range(len(gradients)):
        (found,) = torch.autograd.grad(compute(case, x)[n], x, gradients[n])
        assert relative_error(found, torch.autograd.grad(case.define(x)[n], x, gradients[n])[0]) < 1e-14
    # The second derivative is refused, the first under create_graph is not.
    (d_x,) = torch.autograd.grad(compute(case, x), x, gradients, create_graph=True)
    assert torch.equal(d_x, torch.autograd.grad(compute(case, x), x, gradients)[0])
    with pytest.raises(RuntimeError, match="for second derivatives use backend='reference'"):
        d_x.sum().backward()
    # Without a graph, results are the same, and a part that is left is not copied.
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = compute(case, x)
            assert all(torch.equal(y, z) for y, z in zip(found, compute(case, x.detach()), strict=True))
            assert found[2].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def check_arguments() -> None:
    """What would make a kernel read outside of a tensor is refused."""
    case = make_case("favor", "none")
    x, _ = sample(case.layout, torch.float32)
    for layout, random, given, message in (
        (case.layout, case.random, x[..., 1:], r"projected must have shape \(B, L, 87\), got \[2, 5, 86\]"),
        (case.layout, case.random[:, 1:], x, r"random must be a Float tensor of \[4, 7\]"),
        (case.layout, None, x, "random must be given for FAVOR"),
        (case.layout._replace(features=7), case.random, x, "features must be even, got 7"),
        (case.layout._replace(map="elu"), None, x, "features must fit the map and 7 numbers, got 8"),
        (case.layout._replace(map="softmax"), None, x, "map must be one of the kernels', got softmax"),
        (case.layout._replace(heads=0), case.random, x, "sizes must be positive"),
    ):
        with pytest.raises(RuntimeError, match=message):
            map_projection(given, layout, random)
    for features, fits in ((128, True), (129, False)):  # the greatest matrix of FAVOR+
        layout = Layout(1, 1, 64, features, "favor_relu")
        x, random = torch.randn(1, 1, 128), torch.randn(features, 64)
        assert layout.fits(random.numel()) == fits
        with contextlib.nullcontext() if fits else pytest.raises(RuntimeError, match="at most 8192 numbers, got 8256"):
            map_projection(x, layout, random)


def results_of(layer, x, first, mask, fused: bool) -> dict[str, Tensor]:
    """Return the layer's results and all gradients, with PyTorch's path or with the kernel."""
    projection.DEVICE = "cpu" if fused else "cuda"
    y, state = layer(x, key_padding_mask=mask, first=first)
    torch.manual_seed(1)
    loss = sum((part * torch.randn_like(part)).sum() for part in (y, *state) if part is not None)
    names, leaves = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, (x, *leaves))
    return dict(zip(("y", "state", "x", *names), (y, state.weights, *gradients), strict=True))


def check_layers() -> None:
    """Every rule, with padding or with documents, and every map and normalisation."""
    mask, first = torch.zeros(2, 9, dtype=torch.bool), torch.zeros(2, 9, dtype=torch.bool)
    mask[1, :3] = first[:, 4] = True
    plain = {"l2_normalization": True, "scale_queries": True, "value_heads": 4}
    by_rule = [("silu", rule, plain | {"negative_eigenvalues": rule == "delta"}) for rule in UPDATE_RULES]
    sums = {"sum_normalization": SumNormalization(), "attention_normalization": AttentionNormalization()}
    by_map = [(name, "delta", sums) for name in ("elu", "dpfp", "favor")]
    other = [("identity", "sum", {}), ("tanh", "fwm", {"l2_normalization": True, "l2_normalization_epsilon": 1e-6})]
    other += [("elu", rule, {"bias": True}) for rule in ("delta", "decay", "gla")]
    other += [("silu", rule, plain | {"conv_size": 3, "bias": True}) for rule in ("sum", "kda", "delta_product")]
    for number, (name, rule, options) in enumerate((*by_rule, *by_map, *other)):
        torch.manual_seed(0)
        layer = FastWeightAttention(12, 2, FEATURE_MAPS[name](6), rule, **options).double()
        assert layer.layout is not None
        x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
        given = (first, None) if number % 2 else (None, mask)
        truth, found = (results_of(layer, x, *given, fused) for fused in (False, True))
        for which, y in truth.items():
            assert (error := relative_error(found[which], y)) < 1e-11, (name, rule, which, error)


class Operations(TorchDispatchMode):
    """Counts operations that are not views, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        results = operation(*arguments, **(options or {}))
        if not any(x.alias_info for x in operation._schema.arguments) and "empty" not in operation.__name__:
            self.found[operation.__name__.partition(".")[0]] += 1
        return results


def check_counts() -> None:
    """Around the rule there is one kernel forward and one back, and nothing else but products."""
    launches = ctypes.CDLL(str(cuda_binding.build())).emulator_launches
    feature_map, sums = FEATURE_MAPS["dpfp"](16), SumNormalization()
    layer = FastWeightAttention(32, 2, feature_map, "delta", sum_normalization=sums).bfloat16()
    x = torch.randn(2, 9, 32, dtype=torch.bfloat16, requires_grad=True)
    projection.DEVICE, counts = "cpu", [launches()]
    with Operations() as forward:
        q, k, v, gates, _ = layer.memory_inputs(x)
    counts.append(launches())
    results = (q, k, v, *gates.values())
    gradients = [torch.ones_like(y) for y in results]
    with Operations() as backward:
        torch.autograd.grad(results, x, gradients)
    counts.append(launches())
    assert [after - before for before, after in pairwise(counts)] == [1, 1]
    assert forward.found == Counter(mm=1, _unsafe_view=1) and backward.found == Counter(mm=1)
    with Operations() as forward:
        y, _ = layer(x)
    with Operations() as backward:
        y.backward(y.detach())
    assert forward.found == Counter(fast_weights=1, mm=2, _unsafe_view=2)
    assert backward.found == Counter(fast_weights_backward=1, mm=4)


def check_first_use() -> None:
    """The check before the first use finds nothing; it finds a map of another scale."""
    assert self_check.find_fault(MapCheck(), torch.device("cpu")) == ""
    right = fast_weight.map_projection
    fast_weight.map_projection = lambda x, layout, random: right(x, layout._replace(scale=1.0), random)
    assert "queries in float64 is off by" in self_check.find_fault(MapCheck(), torch.device("cpu"))
    fast_weight.map_projection = right


def check_all() -> None:
    cuda_binding.prepare()
    rows._has_kernel = convolution.kernel_ready = lambda x: False  # the library has no kernels of a CPU
    check_results()
    check_autograd()
    check_arguments()
    check_layers()
    check_counts()
    check_first_use()
