"""What operators that run token by token share: their arguments, and the marks of tokens.

Shapes: B batch, L tokens, H heads.
"""

import torch
from torch import Tensor

from .arguments import expect_shape
from .kernels.backend import check_backend

FIRST, PADDING = 1, 2  # the bits of a mark: Mark of cuda_ext/rule.h


def without_padding(x: Tensor, marks: Tensor | None) -> Tensor:
    """Return x (B, L, H, ...) with zeros at padding: a NaN there would reach gradients through a selection."""
    return x if marks is None else x.masked_fill((marks & PADDING).bool()[..., None, None], 0)


def check_inputs(x: Tensor, backend: str, **others: Tensor | None) -> None:
    """Raise ValueError for a name of no backend, and TypeError for numbers that are not real or not on x's device."""
    check_backend(backend)
    if not x.is_floating_point():
        raise TypeError(f"x must be floating-point, got {x.dtype}")
    for name, part in others.items():
        if part is not None and not (part.is_floating_point() and part.device == x.device):
            raise TypeError(f"{name} must be floating-point on {x.device}, as x, got {part.dtype} on {part.device}")


def marks_of(first: Tensor | None, padding: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Return the marks (B, L) of tokens, uint8; None = none. Raises ValueError and TypeError for other masks."""
    marks = None
    for mask, bit in ((first, FIRST), (padding, PADDING)):
        if mask is not None:
            expect_shape("first, padding", mask, B=batch, L=length)
            if mask.dtype != torch.bool:
                raise TypeError(f"first and padding must be bool, got {mask.dtype}")
            mark = mask.contiguous().to(torch.uint8) * bit
            marks = mark if marks is None else marks + mark
    return marks
