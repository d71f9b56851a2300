"""Check the arguments of update rules; an error says in one sentence what is wrong.

B batch, H heads, Hk heads of q and k, L tokens, Dk size of a key, Dv size of a value.
"""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Results = tuple[Tensor, Tensor]  # out and the new state
Shape = tuple[str, ...]
PER_TOKEN: Shape = ("B", "H", "L")
PER_KEY: Shape = ("B", "H", "L", "Dk")
SHARED_KEY: Shape = ("B", "Hk", "L", "Dk")  # of q and k: each head serves H / Hk consecutive heads
PER_VALUE: Shape = ("B", "H", "L", "Dv")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a rule accumulates and returns its state: float64 for float64 inputs, else float32.

    A bfloat16 state would cause five times the error of bfloat16 inputs with a float32 state.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32 if its dtype has 16 bits, and x itself otherwise."""
    return x.float() if x.dtype.itemsize < 4 else x


def expect_shape(name: str, x: Tensor, **sizes: int | None) -> None:
    """Raise ValueError unless a tensor has these sizes, in their order; None: of any size."""
    if len(sizes) != x.dim() or any(size not in (None, n) for size, n in zip(sizes.values(), x.shape, strict=True)):
        wanted = ", ".join(size if number is None else f"{size} = {number}" for size, number in sizes.items())
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(x.shape)}")


def first_state(q: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    """Return a contiguous copy of the state (B, H, Dk, Dv) before the first token, or zeros."""
    if state is not None:
        return state.clone(memory_format=torch.contiguous_format)
    return q.new_zeros((*v.shape[:2], q.shape[3], v.shape[-1]), dtype=state_dtype(q.dtype))


def for_heads(x: Tensor, heads: int) -> Tensor:
    """Return q or k with a copy of each head for all heads that share it: (B, Hk, ...) -> (B, H, ...)."""
    return x if x.shape[1] in (0, heads) else x.repeat_interleave(heads // x.shape[1], 1)


def outer(column: Tensor, row: Tensor) -> Tensor:
    """Return the write (..., Dk, Dv) of a value (..., Dv) under a key (..., Dk)."""
    return column.unsqueeze(-1) * row.unsqueeze(-2)


def retrieve(key: Tensor, memory: Tensor) -> Tensor:
    """Return the value (..., Dv) that a key (..., Dk) retrieves from a memory (..., Dk, Dv)."""
    return (key.unsqueeze(-2) @ memory).squeeze(-2)


def check_arguments(
    rule: str,
    tensors: dict[str, tuple[Tensor, tuple[Shape, ...]]],
    state: Tensor | None = None,
    first: Tensor | None = None,
) -> None:
    """Raise ValueError (shape, device) or TypeError (dtype, not a tensor) unless the arguments fit one another.

    ``tensors`` are q, k, v and the rule's gates, each with its allowed shapes, as names of sizes. They are in q's
    dtype. A gate may also be in the state's dtype, because half precision rounds a decay just below 1 to 1.
    """
    for name, (x, _) in tensors.items():
        _expect_dense(rule, name, x, "a tensor")
    sizes, q = _sizes(rule, tensors), tensors["q"][0]
    if q.dtype not in DTYPES:
        raise TypeError(f"{rule}: q must be float32, float64, bfloat16 or float16, got {q.dtype}")
    for name, (x, shapes) in tensors.items():
        is_gate, wide = name not in ("q", "k", "v"), state_dtype(q.dtype)
        dtype_words = f"dtype {wide} or q's dtype" if is_gate and wide != q.dtype else "q's dtype"
        _expect(rule, name, x, shapes, sizes, wide if is_gate and x.dtype == wide else q.dtype, dtype_words, q.device)
    if state is not None:
        _expect_dense(rule, "state", state, "a tensor or None")
        dtype = state_dtype(q.dtype)
        shapes = (("B", "H", "Dk", "Dv"),)
        _expect(rule, "state", state, shapes, sizes, dtype, "dtype", q.device)
    if first is not None:
        _expect_dense(rule, "first", first, "a tensor or None")
        _expect(rule, "first", first, (("B", "L"),), sizes, torch.bool, "dtype", q.device)


def _sizes(rule: str, tensors: dict[str, tuple[Tensor, tuple[Shape, ...]]]) -> dict[str, int]:
    """Return the sizes by name, from q and v, and from k if neither has them."""
    sizes: dict[str, int] = {}
    for name in ("q", "v", "k"):
        x, (shape,) = tensors[name]
        if x.dim() != len(shape):
            raise ValueError(f"{rule}: {name} must have shape ({', '.join(shape)}), got {tuple(x.shape)}")
        sizes = dict(zip(shape, x.shape, strict=True)) | sizes
    heads, shared = sizes["H"], sizes["Hk"]
    if heads != shared and (shared == 0 or heads % shared):
        raise ValueError(f"{rule}: v must have a multiple of q's heads, got {heads} and {shared}")
    return sizes


def _expect_dense(rule: str, name: str, x: Tensor, kind: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{rule}: {name} must be {kind}, got {type(x).__name__}")
    # The dispatcher has no kernel for other layouts, and would call the operator's Python body forever.
    if x.layout != torch.strided:
        raise TypeError(f"{rule}: {name} must be a dense tensor, got one of layout {x.layout}")


def _expect(
    rule: str,
    name: str,
    x: Tensor,
    shapes: tuple[Shape, ...],
    sizes: dict[str, int],
    dtype: torch.dtype,
    dtype_words: str,
    device: torch.device,
) -> None:
    allowed = {shape: tuple(sizes[size] for size in shape) for shape in shapes}
    if x.shape not in allowed.values():
        wanted = " or ".join(f"({', '.join(shape)}) = {numbers}" for shape, numbers in allowed.items())
        raise ValueError(f"{rule}: {name} must have shape {wanted}, got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise TypeError(f"{rule}: {name} must have {dtype_words} = {dtype}, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{rule}: {name} must be on q's device = {device}, got {x.device}")
