"""Float32 where half precision is not enough: feature maps, logits and sums of losses."""

from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32 if its dtype has 16 bits, and x itself otherwise."""
    return x.float() if x.dtype.itemsize < 4 else x
