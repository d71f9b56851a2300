"""What every update rule asks of its arguments, and the one sentence it answers a wrong one with.

B batch, H heads, L tokens, Dk size of a key, Dv size of a value.
"""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Shape = tuple[str, ...]
PER_TOKEN: Shape = ("B", "H", "L")
PER_KEY: Shape = ("B", "H", "L", "Dk")
PER_VALUE: Shape = ("B", "H", "L", "Dv")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a rule accumulates and returns its state: float64 for float64 inputs, else float32.

    A bfloat16 state costs five times the error of bfloat16 inputs with a float32 state, so it stays float32.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def first_state(q: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    """Return a contiguous copy of the state (B, H, Dk, Dv) before the first token, or zeros."""
    if state is not None:
        return state.clone(memory_format=torch.contiguous_format)
    return q.new_zeros((*q.shape[:2], q.shape[3], v.shape[-1]), dtype=state_dtype(q.dtype))


def outer(column: Tensor, row: Tensor) -> Tensor:
    """Return (..., Dk, Dv), what a value (..., Dv) writes under a key (..., Dk)."""
    return column.unsqueeze(-1) * row.unsqueeze(-2)


def retrieve(key: Tensor, memory: Tensor) -> Tensor:
    """Return (..., Dv), what a key (..., Dk) retrieves from a memory (..., Dk, Dv)."""
    return (key.unsqueeze(-2) @ memory).squeeze(-2)


def check_arguments(
    rule: str,
    tensors: dict[str, tuple[Tensor, tuple[Shape, ...]]],
    state: Tensor | None = None,
    first: Tensor | None = None,
) -> None:
    """Raise ValueError (shape, device) or TypeError (dtype, not a tensor) unless the arguments fit one another.

    ``tensors`` are q, k, v and what else a rule has, each with the shapes that it may have, in the names of sizes.
    """
    for name, (x, _) in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{rule}: {name} must be a tensor, got {type(x).__name__}")
        _expect_strides(rule, name, x)
    sizes = _sizes(rule, tensors)
    q = tensors["q"][0]
    if q.dtype not in DTYPES:
        raise TypeError(f"{rule}: q must be float32, float64, bfloat16 or float16, got {q.dtype}")
    for name, (x, shapes) in tensors.items():
        _expect_shape(rule, name, x, shapes, sizes)
        _expect_dtype(rule, name, x, q.dtype, "q's dtype")
        _expect_device(rule, name, x, q.device)
    dtype = state_dtype(q.dtype)
    for name, given, shape, expected, why in (
        ("state", state, ("B", "H", "Dk", "Dv"), dtype, f"dtype for {q.dtype} inputs"),
        ("first", first, ("B", "L"), torch.bool, "dtype"),
    ):
        if given is None:
            continue
        if not isinstance(given, Tensor):
            raise TypeError(f"{rule}: {name} must be a tensor or None, got {type(given).__name__}")
        _expect_strides(rule, name, given)
        _expect_shape(rule, name, given, (shape,), sizes)
        _expect_dtype(rule, name, given, expected, why)
        _expect_device(rule, name, given, q.device)


def _sizes(rule: str, tensors: dict[str, tuple[Tensor, tuple[Shape, ...]]]) -> dict[str, int]:
    """Return the sizes by name, as q and v have them (and k those that neither has)."""
    sizes: dict[str, int] = {}
    for name in ("q", "v", "k"):
        x, (shape,) = tensors[name]
        if x.dim() != len(shape):
            raise ValueError(f"{rule}: {name} must have shape ({', '.join(shape)}), got {tuple(x.shape)}")
        sizes = dict(zip(shape, x.shape, strict=True)) | sizes
    return sizes


def _expect_strides(rule: str, name: str, tensor: Tensor) -> None:
    # The dispatcher has no kernel for any other layout, and would call the operator's Python body again and again.
    if tensor.layout != torch.strided:
        raise TypeError(f"{rule}: {name} must be a dense tensor, got one of layout {tensor.layout}")


def _expect_shape(rule: str, name: str, tensor: Tensor, shapes: tuple[Shape, ...], sizes: dict[str, int]) -> None:
    allowed = {shape: tuple(sizes[size] for size in shape) for shape in shapes}
    if tensor.shape not in allowed.values():
        wanted = " or ".join(f"({', '.join(shape)}) = {numbers}" for shape, numbers in allowed.items())
        raise ValueError(f"{rule}: {name} must have shape {wanted}, got {tuple(tensor.shape)}")


def _expect_dtype(rule: str, name: str, tensor: Tensor, dtype: torch.dtype, what: str) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{rule}: {name} must have {what} = {dtype}, got {tensor.dtype}")


def _expect_device(rule: str, name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{rule}: {name} must be on q's device = {device}, got {tensor.device}")
