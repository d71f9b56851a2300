"""Unusual numbers and strides, and strategies that choose them."""

import math

import torch
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
VALUES = ("zero", "denormal", "huge", "infinite", "minus infinite", "nan")
LAYOUTS = ("contiguous", "second last", "last first", "sliced", "offset")

dtypes, layouts, values = st.sampled_from(DTYPES), st.sampled_from(LAYOUTS), st.sampled_from(VALUES)
seeds = st.integers(0, 2**31)


def special(value, dtype):
    """Return a number of that kind, if the dtype has one."""
    finfo = torch.finfo(dtype)
    return {
        "zero": 0.0,
        "denormal": finfo.smallest_normal / 8,
        "huge": min(1e30, finfo.max),
        "infinite": math.inf,
        "minus infinite": -math.inf,
        "nan": math.nan,
    }[value]


def arrange(x, layout):
    """Return the same numbers with other strides, surrounded by NaN."""
    if layout == "contiguous" or x.dim() == 0:
        return x
    if layout == "second last":  # as in attention: heads and tokens transposed
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x
    if layout == "last first":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "offset":
        arranged = x.new_full((x.numel() + 3,), math.nan)[3:].view(x.shape)
    else:
        arranged = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), math.nan)[..., 1::2]
    return arranged.copy_(x)


def equal(one, other):
    """Compare all bits, except those of a NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
