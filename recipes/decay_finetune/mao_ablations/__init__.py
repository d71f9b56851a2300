"""Update rules that Mao 2022 (arXiv 2210.04243) tried and rejected, for rows of rows.yaml: a plug-in for --user-dir.

They are not in the package because two of them diverge in the paper. The divisor of the first one may be zero or
negative: for this reason fwp_lm refuses attention normalisation with a map of either sign.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairseq_fwp.checkpoints.linearize.initialisation import INITIALISATIONS, Initialisation, Projections
from fairseq_fwp.modules.update_rules import UPDATE_RULES, Normalizer, UpdateRule, uniform_gate_bias
from fairseq_fwp.ops import Rule, decay_rule, outer, sum_rule


class DividedSum(Rule):
    """Compute S_t q_t / z_t q_t (Eq. 4) for features of either sign (Sec. 4.1.2); z is one more column of S, for ones.

    q, k (B, H, L, Dk), v (B, H, L, Dv), state (B, H, Dk, Dv + 1) -> out (B, H, L, Dv) and the new state.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *state: Tensor | None, **options: Any) -> Any:
        out, after = super().__call__(q, k, torch.cat([v, torch.ones_like(v[..., :1])], dim=-1), *state, **options)
        return out[..., :-1] / out[..., -1:], after


def gated_write(memory: Tensor, k: Tensor, v: Tensor, key_decay: Tensor, value_decay: Tensor) -> Tensor:
    """Gate the write too: S_t = G_t * S_{t-1} + (1 - G_t) * v_t k_t (Sec. 3; Schlag & Schmidhuber 2017)."""
    kept = outer(key_decay, value_decay)
    return kept * memory + (1 - kept) * outer(k, v)


def difference(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, z: Tensor, *, state: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the same by kernels: G_t * v_t k_t is the outer product of (z v) and (f k), under the decay rule."""
    written, memory = decay_rule(q, k, v, f, z, state, first=first)
    left_out, of_memory = decay_rule(q, f * k, z * v, f, z, first=first)
    return written - left_out, memory - of_memory


def uniform(number: int) -> Tensor:
    """Return biases with which a gate without a sigmoid starts as the decay rule's."""
    return uniform_gate_bias(number).sigmoid()


def scale_by_plain_decay(attention: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Scale W_v by 1 - b_z, as the decay rule scales it by 1 - sigmoid(b_z)."""
    return q, k, v * (1 - attention.gate_biases["value_decay"]).to(v).unsqueeze(1)


UPDATE_RULES["divided_sum"] = UpdateRule(
    DividedSum("divided_sum", sum_rule.step, as_fast_weights=sum_rule.as_fast_weights)
)
UPDATE_RULES["decay_gated_write"] = UPDATE_RULES["decay"]._replace(
    operation=Rule("decay_with_gated_write", gated_write, decay_rule.gates, difference), normalizer=Normalizer()
)
# Footnote 1.
UPDATE_RULES["decay_no_sigmoid"] = UpdateRule(
    decay_rule,
    tuple(replace(gate, bias=uniform, activation=torch.nn.Identity()) for gate in UPDATE_RULES["decay"].gates),
)
INITIALISATIONS["decay_no_sigmoid"] = Initialisation(scale_by_plain_decay)
# What the paper had to change (footnotes 3 and 4, Sec. 3): delta that writes half of a value at first, and sums of
# values whose W_v is as in softmax.
UPDATE_RULES["delta_half"], INITIALISATIONS["delta_half"] = UPDATE_RULES["delta"], Initialisation(bias=True)
UPDATE_RULES["sum_unscaled"], UPDATE_RULES["decay_unscaled"] = UPDATE_RULES["sum"], UPDATE_RULES["decay"]
