"""What every update rule asks of its arguments, and the one sentence it answers a wrong one with.

B batch, H heads, L tokens, Dk size of a key, Dv size of a value.
"""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which a rule accumulates and returns its state: float32, or float64 for float64 inputs.

    A bfloat16 state costs five times the error of bfloat16 inputs with a float32 state, so it stays float32.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def first_state(q: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    """A contiguous copy of the state (B, H, Dk, Dv) before the first token, or zeros."""
    if state is not None:
        return state.clone(memory_format=torch.contiguous_format)
    return q.new_zeros((*q.shape[:2], q.shape[3], v.shape[3]), dtype=state_dtype(q.dtype))


def outer(column: Tensor, row: Tensor) -> Tensor:
    """(..., Dk) and (..., Dv) -> (..., Dk, Dv): what a value writes under a key."""
    return column.unsqueeze(-1) * row.unsqueeze(-2)


def check_arguments(
    rule: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    *,
    per_key: dict[str, Tensor] | None = None,
    per_value: dict[str, Tensor] | None = None,
    **gates: Tensor,
) -> None:
    """Raise ValueError (shape, device) or TypeError (dtype, not a tensor) unless the arguments fit one another.

    ``gates`` are tensors of one number a token and head: (B, H, L); ``per_key`` have one for each element of a key,
    (B, H, L, Dk), and ``per_value`` of a value, (B, H, L, Dv).
    """
    per_key, per_value = per_key or {}, per_value or {}
    tensors = {"q": q, "k": k, "v": v, **gates, **per_key, **per_value}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{rule}: {name} must be a tensor, got {type(tensor).__name__}")
        _expect_strides(rule, name, tensor)
    if q.dim() != 4:
        raise ValueError(f"{rule}: q must have shape (B, H, L, Dk), got {tuple(q.shape)}")
    if v.dim() != 4:
        raise ValueError(f"{rule}: v must have shape (B, H, L, Dv), got {tuple(v.shape)}")
    batch, heads, length, key_size = q.shape
    _expect_shape(rule, "k", k, (batch, heads, length, key_size), "q's shape (B, H, L, Dk)")
    _expect_shape(rule, "v", v, (batch, heads, length, v.shape[3]), "shape (B, H, L, Dv)")
    for name, gate in gates.items():
        _expect_shape(rule, name, gate, (batch, heads, length), "shape (B, H, L)")
    for name, gate in per_key.items():
        _expect_shape(rule, name, gate, q.shape, "shape (B, H, L, Dk)")
    for name, gate in per_value.items():
        _expect_shape(rule, name, gate, v.shape, "shape (B, H, L, Dv)")
    if q.dtype not in DTYPES:
        raise TypeError(f"{rule}: q must be float32, float64, bfloat16 or float16, got {q.dtype}")
    for name, tensor in tensors.items():
        _expect_dtype(rule, name, tensor, q.dtype, "q's dtype")
        _expect_device(rule, name, tensor, q.device)
    if state is not None:
        if not isinstance(state, Tensor):
            raise TypeError(f"{rule}: state must be a tensor or None, got {type(state).__name__}")
        _expect_strides(rule, "state", state)
        _expect_shape(rule, "state", state, (batch, heads, key_size, v.shape[3]), "shape (B, H, Dk, Dv)")
        _expect_dtype(rule, "state", state, state_dtype(q.dtype), f"dtype for {q.dtype} inputs")
        _expect_device(rule, "state", state, q.device)


def _expect_strides(rule: str, name: str, tensor: Tensor) -> None:
    # The dispatcher has no kernel for any other layout, and would call the operator's Python body again and again.
    if tensor.layout != torch.strided:
        raise TypeError(f"{rule}: {name} must be a dense tensor, got one of layout {tensor.layout}")


def _expect_shape(rule: str, name: str, tensor: Tensor, shape: tuple[int, ...], what: str) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{rule}: {name} must have {what} = {tuple(shape)}, got {tuple(tensor.shape)}")


def _expect_dtype(rule: str, name: str, tensor: Tensor, dtype: torch.dtype, what: str) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{rule}: {name} must have {what} = {dtype}, got {tensor.dtype}")


def _expect_device(rule: str, name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{rule}: {name} must be on q's device = {device}, got {tensor.device}")
