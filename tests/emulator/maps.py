"""Call the emulator's kernels of maps: from a projection to queries, keys and gates, and back."""

import ctypes
import math
from collections.abc import Sequence

import torch
from emulator import SHARED_KIB, TYPES, Emulator, EmulatorError, _Pretended
from support.subjects import state_dtype
from torch import Tensor

from fairseq_fwp.ops.projection import ACTIVATIONS, MOST_PARTS, Layout, Part

MAPS = ("identity", "elu", "silu", "tanh", "dpfp", "favor", "favor_relu")
NORMS = ("none", "sum", "length")


class _Vectors(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "token", "step", "head")),
    ]


class _Part(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("activation", "steps", "heads", "width")),
        ("factor", ctypes.c_double),
        ("vectors", _Vectors),
    ]


class _Projection(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "L", "W")),
        ("type", ctypes.c_int),
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "token")),
        *((name, ctypes.c_int) for name in ("heads", "steps", "width", "features", "map", "norm")),
        ("adds", ctypes.c_bool),
        *((name, ctypes.c_double) for name in ("epsilon", "query_factor", "scale", "offset")),
        ("random", ctypes.c_void_p),
        *((name, _Vectors) for name in ("queries", "keys")),
        ("parts", ctypes.c_int),
        ("part", _Part * MOST_PARTS),
        ("stream", ctypes.c_void_p),
    ]


def shapes_of(layout: Layout) -> list[tuple[int, ...]]:
    """Return the shapes of a token's queries, keys and parts."""
    mapped = [(steps, layout.heads, layout.features) for steps in (1, layout.steps)]
    return [*mapped, *(part[:3] for part in layout.parts)]


def columns_of(layout: Layout) -> list[int]:
    """Return the numbers of columns of queries and keys, and of each part."""
    return [(1 + layout.steps) * layout.heads * layout.width, *(math.prod(part[:3]) for part in layout.parts)]


def dtype_of(part: Part, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a part of a projection of this dtype."""
    return state_dtype(dtype) if part.activation == "sigmoid" else dtype


def wide(y: Tensor, x: Tensor) -> Tensor:
    """Return y in the dtype in which x is computed."""
    return y.to(state_dtype(x.dtype))


def _vectors(x: Tensor | None) -> _Vectors:
    """Return the address and strides of (B, L, steps, heads, D)."""
    if x is None:
        return _Vectors()
    assert x.stride(-1) == 1 or x.shape[-1] <= 1 or not x.numel(), "the last dimension must be contiguous"
    return _Vectors(x.data_ptr(), *x.stride()[:4])


def _run(
    emulator: Emulator,
    x: Tensor,
    layout: Layout,
    random: Tensor | None,
    results: Sequence[Tensor | None],
    to: Tensor | None,
    how: dict[str, int],
) -> None:
    """Call both directions. results: queries, keys and parts, or their gradients."""
    names = [name for name, kind in _Projection._fields_ if kind in (ctypes.c_int, ctypes.c_double, ctypes.c_bool)]
    settings = {name: getattr(layout, name) for name in names if name not in ("type", "map", "norm", "parts")}
    random = None if random is None else wide(random, x)
    given = _Projection(*x.shape, TYPES[x.dtype], x.data_ptr(), *x.stride()[:2], **settings)
    given.map, given.norm = MAPS.index(layout.map), NORMS.index(layout.norm)
    given.random = None if random is None else random.data_ptr()
    given.queries, given.keys = map(_vectors, results[:2])
    given.parts = len(layout.parts)
    for n, (part, y) in enumerate(zip(layout.parts, results[2:], strict=True)):
        given.part[n] = _Part(ACTIVATIONS.index(part.activation), *part[:3], part.factor, _vectors(y))
    gpu = {"reverse": 0, "multiprocessors": 132, "shared_kib": SHARED_KIB} | how
    run = emulator._library.emulator_map
    run.restype = ctypes.c_char_p
    address = None if to is None else ctypes.c_void_p(to.data_ptr())
    error = run(ctypes.byref(_Pretended(*gpu.values())), ctypes.byref(given), address)
    if error is not None:
        raise EmulatorError(error.decode())


def forward(emulator: Emulator, x: Tensor, layout: Layout, random: Tensor | None, **how: int) -> list[Tensor]:
    """Return queries, keys (B, L, steps, heads, features) and gates; of other parts, the columns as they are."""
    mapped = emulator._empty((*x.shape[:2], 1 + layout.steps, layout.heads, layout.features), x.dtype)
    made, results = [mapped], [mapped[:, :, :1], mapped[:, :, 1:]]
    for part, columns in zip(layout.parts, x.split(columns_of(layout), 2)[1:], strict=True):
        results.append(columns.unflatten(2, part[:3]))
        if part.activation != "none":
            results[-1] = emulator._empty(results[-1].shape, dtype_of(part, x.dtype))
            made.append(results[-1])
    _run(emulator, x, layout, random, results, None, how)
    for y in made:
        emulator._check_guards(y)
    return results


def backward(
    emulator: Emulator,
    x: Tensor,
    layout: Layout,
    random: Tensor | None,
    gradients: Sequence[Tensor | None],
    **how: int,
) -> Tensor:
    """Return the gradient of the projection."""
    to = emulator._empty(x.shape, x.dtype)
    _run(emulator, x, layout, random, gradients, to, how)
    emulator._check_guards(to)
    return to
