"""What the pretrained projections and the gates of a rule become: Mao 2022, Sec. 3.

D: embedding dimension, H: heads, d: size of a head, m: features of a head.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from fairseq_fwp.modules.attention import FastWeightAttention
from fairseq_fwp.modules.update_rules import MambaDecay

# Mao 2022, footnote 3: a write strength of about 0.007, which is sigmoid(-5).
WRITE_STRENGTH_BIAS = -5.0

# Mao 2022, footnote 4.
SUM_VALUE_SCALE = 1 / 512

# Tokens that heads of gated_delta and kda remember, evenly spaced in the logarithm: recipes/decay_finetune/RESULTS.md.
SPANS = (16, 512)

# Projections of queries and keys (H m, D + 1) and of values (H d, D + 1); the last column is the bias.
Projections = tuple[Tensor, Tensor, Tensor]


def scale_by_decay(attention: FastWeightAttention, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Scale W_v by 1 - sigmoid(b_z) in every dimension: sums then have the size of one value (Mao 2022, Sec. 3)."""
    return q, k, v * (1 - attention.gate_biases["value_decay"].sigmoid()).to(v).unsqueeze(1)


def scale_unnormalized(attention: FastWeightAttention, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Scale W_v down, because nothing divides the sum (Mao 2022, footnote 4)."""
    return q, k, v if attention.memory.normalization else v * SUM_VALUE_SCALE


def write_little(attention: FastWeightAttention, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Set the write strength; values stay the same (Mao 2022, footnote 3)."""
    nn.init.constant_(attention.gate_biases["beta"], WRITE_STRENGTH_BIAS)
    return q, k, v


def spread_spans(attention: FastWeightAttention, q: Tensor, k: Tensor, v: Tensor, longest: int) -> Projections:
    """Set decays: feature i of m remembers s = longest^((i + 1/2) / m) tokens (decay s / (1 + s)), values `longest`.

    Features with the largest singular values forget first. Keys are scaled by the root of the forgotten share 1 / (1 +
    s). Sums of terms of either sign then have the size of one term for every span. Scores of either sign lack the mean
    of the values, which softmax has. The last feature is replaced by that mean, over about sqrt(longest) tokens.
    """
    heads, size = attention.num_heads, attention.key_dim
    spans = longest ** ((torch.arange(size) + 0.5) / size)
    spans[-1] = longest**0.5
    attention.gate_biases["key_decay"].copy_(spans.log().repeat(heads))
    nn.init.constant_(attention.gate_biases["value_decay"], math.log(longest))
    root = (1 + spans).rsqrt().to(k)
    q, k = q.unflatten(0, (heads, size)).clone(), k.unflatten(0, (heads, size)) * root.unsqueeze(1)
    for x in (q, k):
        x[:, -1] = 0
        x[:, -1, -1] = root[-1]  # the bias: q . k = 1 / (1 + s), which sums to one over the decays of that feature
    return q.flatten(0, 1), k.flatten(0, 1), v


def write_little_and_remember(attention: FastWeightAttention, q: Tensor, k: Tensor, v: Tensor) -> Projections:
    """Set rates as delta's, as keys do not have length one here either; heads remember 16 to 512 tokens (`SPANS`)."""
    decay, heads = cast(MambaDecay, attention.gate_activations["decay"]), attention.num_heads
    shortest, longest = SPANS
    spans = shortest * (longest / shortest) ** ((torch.arange(heads) + 0.5) / heads)
    decay.log_rate.zero_()
    decay.bias.copy_(-spans.log().unsqueeze(1).expand_as(decay.bias))  # exp(-softplus(-log s)) = s / (1 + s)
    return write_little(attention, q, k, v)


class Initialisation(NamedTuple):
    """An initialisation: start(attention, q, k, v) sets the gates and returns the converted projections.

    bias: the attention needs one; by_singular_values: features always come from the singular value decomposition.
    """

    start: Callable[..., Projections] = lambda attention, q, k, v: (q, k, v)
    bias: bool = False
    by_singular_values: bool = False


INITIALISATIONS = {
    "sum": Initialisation(scale_unnormalized),
    "delta": Initialisation(write_little, bias=True),
    "decay": Initialisation(scale_by_decay),
    "fwm": Initialisation(write_little, bias=True),
    "delta_product": Initialisation(write_little, bias=True),
    "gated_delta": Initialisation(write_little_and_remember, bias=True),
    "kda": Initialisation(write_little_and_remember, bias=True),
}


def rule_initialisation(rule: str, spans: int | None = None) -> Initialisation:
    """Return the initialisation of a rule; rules that are not in the paper keep all projections."""
    if spans is not None:
        return Initialisation(partial(spread_spans, longest=spans), True, by_singular_values=True)
    return INITIALISATIONS.get(rule, Initialisation())
