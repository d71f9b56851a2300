"""Maps, their normalisation and gates around a rule, on the emulator: as exact as PyTorch's path, their definition."""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import maps
import pytest
import torch
import torch.nn.functional as F
from emulator import EmulatorError
from maps import columns_of, shapes_of
from support.pairwise import looped
from support.subjects import at_odd_offset, check_errors, relative_error
from torch import Tensor

from fairseq_fwp.modules.attention.normalization import SumNormalization
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import to_unit_length
from fairseq_fwp.ops.projection import Layout, Part

# The map's name in the package, and its arguments.
MAPS = {
    "identity": ("identity", {}),
    "elu": ("elu", {}),
    "silu": ("silu", {}),
    "tanh": ("tanh", {}),
    "dpfp": ("dpfp", {"nu": 3}),
    "favor": ("favor", {"offset": 1e-2, "softmax_scale": True}),
    "favor_relu": ("favor", {"relu": True, "offset": 1e-3}),
}
# PyTorch's function, and the kernel's settings.
NORMS = {
    "none": (lambda y: y, {}),
    "sum": (SumNormalization(1e-6), {"norm": "sum", "epsilon": 1e-6}),
    "sum and epsilon": (SumNormalization(0.01, add_epsilon=True), {"norm": "sum", "epsilon": 0.01, "adds": True}),
    "small sums": (SumNormalization(30.0), {"norm": "sum", "epsilon": 30.0}),
    "length": (to_unit_length, {"norm": "length", "epsilon": 1e-12}),
    "length and epsilon": (lambda y: to_unit_length(y, 0.01), {"norm": "length", "epsilon": 0.01, "adds": True}),
}
CASES = [
    (name, norm) for name, norm in product(MAPS, NORMS) if FEATURE_MAPS[MAPS[name][0]].positive or "sum" not in norm
]
# Values, a gate of one number a head, one of several, and values after a convolution.
PARTS = (Part(1, 3, 5), Part(1, 3, 1, "sigmoid", 2.0), Part(1, 3, 4, "sigmoid"), Part(1, 3, 5, "silu"))


class Case(NamedTuple):
    layout: Layout
    random: Tensor | None
    define: Callable[[Tensor], list[Tensor]]  # PyTorch's path, from a projection to queries, keys and parts


def make_case(name, norm, heads=3, width=7, steps=1, parts=PARTS, **settings):
    map_name, arguments = MAPS[name]
    feature_map = FEATURE_MAPS[map_name](width, **arguments)
    normalise, of_norm = NORMS[norm]
    settings = {"scale": feature_map.scale, "offset": getattr(feature_map, "offset", 0.0), **of_norm, **settings}
    layout = Layout(heads, steps, width, feature_map.feature_dim, name, parts=parts, **settings)

    def define(x):
        mapped, *others = x.split(columns_of(layout), 2)
        y = normalise(feature_map(mapped.unflatten(2, (1 + steps, heads, width)))).to(x.dtype)
        found = [y[:, :, :1] * layout.query_factor, y[:, :, 1:]]
        for part, columns in zip(parts, others, strict=True):
            columns = columns.unflatten(2, part[:3])
            activated = {
                "none": columns,
                "sigmoid": part.factor * maps.wide(columns, x).sigmoid(),
                "silu": F.silu(columns),
            }
            found.append(activated[part.activation])
        return found

    return Case(layout, getattr(feature_map, "projection", None), define)


def sample(layout, dtype, seed=0, tokens=(2, 5)):
    """Return a projection, and gradients of what it becomes."""
    generator = torch.Generator().manual_seed(seed)
    types = [dtype, dtype, *(maps.dtype_of(part, dtype) for part in layout.parts)]
    x = torch.randn(*tokens, sum(columns_of(layout)), generator=generator).to(dtype)
    shapes = [(*tokens, *shape) for shape in shapes_of(layout)]
    return x, [torch.randn(shape, generator=generator).to(kind) for shape, kind in zip(shapes, types, strict=True)]


def name_all(results, d_x):
    names = ("queries", "keys", *(f"part {n}" for n in range(len(results) - 2)))
    return {**dict(zip(names, results, strict=True)), "d_x": d_x}


def differentiate(compute, x, gradients):
    """Return results and gradient of a function of the projection, by name."""
    leaf = x.clone().requires_grad_()
    results = compute(leaf)
    (d_x,) = torch.autograd.grad(results, leaf, gradients)
    return name_all([y.detach() for y in results], d_x)


def run_all(emulator, case, x, gradients, **how):
    """Return those of the kernels."""
    found = maps.forward(emulator, x, *case[:2], **how)
    return name_all(found, maps.backward(emulator, x, *case[:2], gradients, **how))


@pytest.mark.parametrize("name, norm", CASES)
@looped("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_as_accurate_as_pytorch(emulator, name, norm, dtype):
    for width in (7, 16):
        case = make_case(name, norm, width=width, query_factor=0.5)

        def draw(n, case=case):
            x, gradients = sample(case.layout, dtype, n)
            truth = differentiate(case.define, x.double(), [y.double() for y in gradients])
            return truth, differentiate(case.define, x, gradients), run_all(emulator, case, x, gradients)

        check_errors(f"{name}, {norm}, {width}", draw, {})
        truth, _, found = draw(0)
        for which, y in truth.items():
            assert dtype != torch.float64 or relative_error(found[which], y) < 1e-14, which


SIZES = {
    "one number": {"heads": 1, "width": 1},
    "a warp for a vector": {"heads": 2, "width": 70},
    "the greatest": {"heads": 1, "width": 512},
    "more vectors than teams": {"heads": 40, "width": 12},
    "several keys a token": {"steps": 2, "parts": (Part(2, 3, 5), Part(1, 3, 2, "sigmoid", 2.0))},
    "keys alone": {"parts": ()},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["elu", "dpfp", "favor"])
def test_sizes(emulator, size, name):
    if (name, size) in (("dpfp", "the greatest"), ("favor", "the greatest"), ("dpfp", "one number")):
        return  # more features or random numbers than there may be; more shifts than features
    case = make_case(name, "sum", **SIZES[size])
    x, gradients = sample(case.layout, torch.float64, tokens=(2, 3))
    found, truth = run_all(emulator, case, x, gradients), differentiate(case.define, x, gradients)
    for which, y in truth.items():
        assert found[which].shape == y.shape and relative_error(found[which], y) < 1e-14, which


@pytest.mark.parametrize("name", MAPS)
@looped("dtype", [torch.float32, torch.bfloat16])
def test_order_of_threads_gpu_and_batch_change_nothing(emulator, name, dtype):
    case = make_case(name, "length", width=12)
    x, gradients = sample(case.layout, dtype, tokens=(3, 15))
    found = run_all(emulator, case, x, gradients)
    for how in ({"reverse": 1}, {"multiprocessors": 1}, {"multiprocessors": 1, "reverse": 1, "shared_kib": 99}):
        for which, y in run_all(emulator, case, x, gradients, **how).items():
            assert torch.equal(found[which], y), (which, how)
    part = (slice(1, 2), slice(4, 9))
    for which, y in run_all(emulator, case, x[part], [y[part] for y in gradients]).items():
        assert torch.equal(found[which][part], y), which


def spread(y):
    """Return the same vectors in memory with heads before tokens, as a rule returns gradients, and with gaps."""
    by_head = torch.stack([y.transpose(1, 3).contiguous().transpose(1, 3)] * 2)
    return by_head[1]


@pytest.mark.parametrize("name", ["elu", "dpfp", "favor"])
@looped("dtype", [torch.float32, torch.bfloat16])
def test_layout_and_alignment_change_nothing(emulator, name, dtype):
    """Vectors of eight numbers can be copied in pieces."""
    case = make_case(name, "sum", width=8, parts=(Part(1, 3, 8), Part(1, 3, 4, "sigmoid")))
    x, gradients = sample(case.layout, dtype)
    found = run_all(emulator, case, x, gradients)
    spacious = torch.stack([x, x], 2).flatten(1, 2)[:, ::2]
    widened = torch.cat([x, x[..., :3]], 2)[..., : x.shape[2]]
    for other in (spacious, widened, at_odd_offset(x)):
        for change in (spread, at_odd_offset):
            for which, y in run_all(emulator, case, other, [change(y) for y in gradients]).items():
                assert torch.equal(found[which], y), which


def test_an_absent_gradient_is_zero(emulator):
    case = make_case("favor", "sum")
    x, gradients = sample(case.layout, torch.float32)
    for n in range(len(gradients)):
        zeros, absent = ([z if i == n else y for i, y in enumerate(gradients)] for z in (0 * gradients[n], None))
        found = maps.backward(emulator, x, *case[:2], absent)
        assert torch.equal(found, maps.backward(emulator, x, *case[:2], zeros))


def test_a_vector_without_features(emulator):
    """DPFP maps it to zero, whose sum and length are zero."""
    for norm in ("sum", "length"):
        case = make_case("dpfp", norm)
        x, gradients = sample(case.layout, torch.float64)
        x[0] = 0
        found, truth = run_all(emulator, case, x, gradients), differentiate(case.define, x, gradients)
        for which, y in truth.items():
            assert torch.allclose(found[which], y, rtol=1e-12, atol=1e-12), which


def test_nan_stays_in_its_vector(emulator):
    for name in MAPS:
        case = make_case(name, "length")
        x, gradients = sample(case.layout, torch.float64)
        x[1, 2, 7] = torch.nan
        found, truth = run_all(emulator, case, x, gradients), differentiate(case.define, x, gradients)
        for which in ("queries", "keys"):
            assert torch.equal(found[which].isnan(), truth[which].isnan())
        assert found["d_x"][1, 2, 7:14].isnan().any()
        found["d_x"][1, 2, 7:14] = 0
        assert not found["d_x"].isnan().any()


def test_no_tokens(emulator):
    case = make_case("elu", "sum")
    for tokens in [(0, 3), (2, 0)]:
        x, gradients = sample(case.layout, torch.float32, tokens=tokens)
        assert run_all(emulator, case, x, gradients)["queries"].shape == (*tokens, 1, 3, 7)


def test_sizes_beyond_the_kernels_are_refused(emulator):
    case = make_case("elu", "sum", width=513)
    sentence = "map vectors of up to 512 elements to as many features, got 513 and 513"
    with pytest.raises(EmulatorError, match=sentence):
        maps.forward(emulator, sample(case.layout, torch.float32)[0], *case[:2])
