"""Update rules as a layer needs them: the operator, and the gates to be projected for it.

A new rule is one file in `ops/` and one line in `UPDATE_RULES`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_fwp import ops


class Gate(NamedTuple):
    """A per-token, per-head scalar that the layer projects from its input without a bias.

    activation: applied to the projection. The sigmoid of a zero-mean projection starts near 1/2.
    """

    name: str
    activation: Callable[[Tensor], Tensor]


class UpdateRule(NamedTuple):
    """operator(q, k, v, *gates, state, backend=...) -> (out, state), with one (B, H, L) tensor per gate."""

    operator: Callable[..., tuple[Tensor, Tensor]]
    gates: tuple[Gate, ...] = ()


UPDATE_RULES = {
    "sum": UpdateRule(ops.sum_rule),
    "delta": UpdateRule(ops.delta_rule, (Gate("beta", torch.sigmoid),)),
}
