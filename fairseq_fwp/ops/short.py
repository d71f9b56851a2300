"""Short sequences on a CPU, where scores of all pairs of tokens may cost less than updates of a large memory.

Shapes: q, k (B, H, L, Dk); v (B, H, L, Dv).
"""

import math

import torch
from torch import Tensor


def scores_are_cheaper(pairs: int, visits: int, sizes: tuple[int, int]) -> bool:
    """Return whether a number for each pair of tokens costs less than visits to memories of `sizes`, (Dk, Dv)."""
    return pairs * sum(sizes) < visits * math.prod(sizes)


class SumScores:
    """The sum rule from an empty memory, as attention: out_t = sum over i <= t of (q_t . k_i) v_i.

    It differs from `sum_rule` in the last bits: products of matrices add in another order.
    """

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.k = k
        self.scores = (q @ k.mT).tril()

    @staticmethod
    def suit(q: Tensor, v: Tensor) -> bool:
        """Return whether this is the fastest form for q and v, which are float32 or float64 on a CPU."""
        length = q.shape[2]
        return (
            q.device.type == "cpu"
            and q.dtype in (torch.float32, torch.float64)
            and not torch.is_autocast_enabled("cpu")  # which would round the scores
            and scores_are_cheaper(length * length, length, (q.shape[-1], v.shape[-1]))
        )

    def read(self, v: Tensor) -> Tensor:
        """Return the outputs (B, H, L, Dv)."""
        return self.scores @ v

    def read_ones(self) -> Tensor:
        """Return the outputs (B, H, L) for values of one: z_t . q_t, z the sum of the keys."""
        return self.scores.sum(-1)

    def state(self, v: Tensor) -> Tensor:
        """Return the memory (B, H, Dk, Dv) after the last token."""
        return self.k.mT @ v

    def state_of_ones(self) -> Tensor:
        """Return the memory (B, H, Dk) for values of one: the sum of the keys."""
        return self.k.sum(2)
