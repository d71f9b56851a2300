"""Update rules as a layer needs them: the operator, and the gates to be projected for it.

A new rule is one file in `ops/` and one line in `UPDATE_RULES`. Shapes: B batch, H heads, L tokens, Dk size of a mapped
key, Dv size of a value.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_fwp import ops
from fairseq_fwp.modules.look_up import look_up


class Gate(NamedTuple):
    """Numbers in (0, 1) that the layer projects for every token and head: sigmoid(x W + bias).

    size: of a head's gate, from Dk and Dv; None: one number, and the rule takes (B, H, L) in place of (B, H, L, size).
    bias: its initial values, from their number; None: no bias, so that the gate starts near 1/2.
    at_padding: what a padded token gets, so that it leaves the memory alone; None: the gate does not matter there.
    activation: another function in the place of the sigmoid.
    """

    name: str
    size: Callable[[int, int], int] | None = None
    bias: Callable[[int], Tensor] | None = None
    at_padding: float | None = None
    activation: Callable[[Tensor], Tensor] = torch.sigmoid


class UpdateRule(NamedTuple):
    """operator(q, k, v, *gates, state, backend=...) -> (out, state), with one tensor per gate.

    retrieves: it writes the difference to what the key retrieves, to which attention normalisation applies as well.
    forgets: attention normalisation forgets with it: gates -> gates for the very rule on values (B, H, L, 1) of one,
        whose memory is the normaliser. None: the normaliser is the plain sum of the keys.
    """

    operator: Callable[..., tuple[Tensor, Tensor]]
    gates: tuple[Gate, ...] = ()
    retrieves: bool = False
    forgets: Callable[..., tuple[Tensor, ...]] | None = None


def uniform_gate_bias(number: int) -> Tensor:
    """Biases (number,) under which a sigmoid gate starts uniform in (1/n, 1 - 1/n), n = max(number, 3).

    Uniform gate initialisation: Gu et al. 2020, arXiv 1910.09890, Sec. 3.1; Mao 2022, arXiv 2210.04243, Sec. 3.
    """
    lowest = 1 / max(number, 3)
    return torch.logit(torch.empty(number).uniform_(lowest, 1 - lowest))


UPDATE_RULES = {
    "sum": UpdateRule(ops.sum_rule),
    "gated": UpdateRule(
        # Mao 2022, Eq. 5: the gate has no bias, and gates the normaliser too.
        ops.gated_rule,
        (Gate("gate", at_padding=1),),
        forgets=lambda gate: (gate,),
    ),
    "delta": UpdateRule(ops.delta_rule, (Gate("beta"),), retrieves=True),
    "decay": UpdateRule(
        ops.decay_rule,
        (
            Gate("key_decay", lambda dk, dv: dk, uniform_gate_bias, at_padding=1),
            Gate("value_decay", lambda dk, dv: dv, uniform_gate_bias, at_padding=1),
        ),
        # The paper normalises no decaying memory; the rule itself on values of one is what is left of the keys.
        forgets=lambda key_decay, value_decay: (key_decay, torch.ones_like(value_decay[..., :1])),
    ),
    "fwm": UpdateRule(ops.fwm_rule, (Gate("beta"),), retrieves=True),
}


def find_rule(name: str) -> UpdateRule:
    """The rule of that name. Raises ValueError for one that is not in UPDATE_RULES."""
    return look_up("update rule", name, UPDATE_RULES)
