"""Float32 where half precision is not enough: feature maps, logits and sums of losses."""

from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32 where its dtype is of 16 bits, and x itself otherwise."""
    return x.float() if x.dtype.itemsize < 4 else x
