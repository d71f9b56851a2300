"""From a layer's projection to what its rule reads: map, normalisation and gates, in one kernel on CUDA.

There, what surrounds a rule would otherwise cost more than the rule: about fifteen kernels, and twice as many for the
gradients. On other devices and for what the kernel does not know, the layer computes the same with PyTorch, which is
the definition (``modules/attention/fast_weight.py``).
"""

import itertools
from typing import NamedTuple

from torch import Tensor

from .arguments import DTYPES, state_dtype
from .kernels import self_check
from .kernels.backend import GREATEST_SIZE
from .operator import declare, suits_kernel

DEVICE = "cuda"
NAME, INSTEAD = "map_projection", "PyTorch computes the same"  # for the check before the first use
MOST_PARTS = 4  # kMostParts and kMostRandomNumbers of cuda_ext/cuda/projection.h
MOST_RANDOM_NUMBERS = 8192
ACTIVATIONS = ("none", "sigmoid", "silu")  # Activation there

_compute = declare(
    NAME,
    "(Tensor projected, Tensor? random, str map, str norm, bool adds, int[] sizes, float[] numbers) -> Tensor[]",
)


class Part(NamedTuple):
    """Columns of a projection (steps, heads, width), their activation, and the factor of a sigmoid."""

    steps: int
    heads: int
    width: int
    activation: str = "none"
    factor: float = 1.0


class Layout(NamedTuple):
    """What the columns of a projection become: queries, `steps` keys a token, then other parts.

    map: phi of queries and keys, from `width` numbers to `features`; scale, offset: of FAVOR+;
    norm: "sum", "length" or "none"; adds: whether the epsilon is added to the sum, or to the square of the length, of
    which it is a lower bound otherwise; query_factor: of normalised queries.
    """

    heads: int
    steps: int
    width: int
    features: int
    map: str
    norm: str = "none"
    adds: bool = False
    epsilon: float = 0.0
    query_factor: float = 1.0
    scale: float = 1.0
    offset: float = 0.0
    parts: tuple[Part, ...] = ()

    def fits(self, random_numbers: int = 0) -> bool:
        """Return whether the kernel takes these sizes."""
        greatest = GREATEST_SIZE["cuda"]
        few = len(self.parts) <= MOST_PARTS and random_numbers <= MOST_RANDOM_NUMBERS
        return few and self.width <= greatest and self.features <= greatest


def has_kernel(x: Tensor) -> bool:
    """Return whether `map_projection` takes this projection."""
    if not suits_kernel(x, DEVICE, DTYPES):
        return False
    return not (DEVICE in self_check.CHECKED and self_check.warn_of_fault(NAME, str(x.device), instead=INSTEAD))


def map_projection(projected: Tensor, layout: Layout, random: Tensor | None = None) -> list[Tensor]:
    """Return queries (B, L, 1, H, Dk), keys (B, L, steps, H, Dk) and the parts (B, L, steps, heads, width).

    projected: (B, L, W); random: the matrix of FAVOR+. Parts without an activation are not copied. Sigmoids are in
    float32 at least, all else is in projected's dtype, rounded once.
    """
    of_parts = [(ACTIVATIONS.index(part.activation), *part[:3]) for part in layout.parts]
    sizes = [*layout[:4], *itertools.chain(*of_parts)]
    numbers = [
        layout.epsilon,
        layout.query_factor,
        layout.scale,
        layout.offset,
        *(part.factor for part in layout.parts),
    ]
    random = None if random is None else random.to(state_dtype(projected.dtype))
    found: list[Tensor] = _compute(projected, random, layout.map, layout.norm, layout.adds, sizes, numbers)
    return found
