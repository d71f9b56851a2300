"""The decay update rule: every element of the memory fades by the product of a rate of its key and one of its value.

    W_t = (f_t^T z_t) * W_{t-1} + k_t^T v_t        out_t = q_t W_t        (* element-wise, f key_decay, z value_decay)

Mao 2022, "Fine-Tuning Pre-trained Transformers into Decaying Fast Weights" (arXiv 2210.04243), Eq. 7; their S is our W
transposed, and our decays are the values of their sigmoids.
"""

from typing import Any

from torch import Tensor

from .arguments import PER_KEY, PER_VALUE, outer
from .fast_weights import fast_weights
from .rule import Results, Rule


def step(memory: Tensor, k: Tensor, v: Tensor, key_decay: Tensor, value_decay: Tensor) -> Tensor:
    return outer(key_decay, value_decay) * memory + outer(k, v)


def in_family(q: Tensor, k: Tensor, v: Tensor, key_decay: Tensor, value_decay: Tensor, **rest: Any) -> Results:
    if key_decay.dim() != 4:  # the operator takes a decay per head too
        raise ValueError(f"decay_rule: key_decay must have shape (B, H, L, Dk), got {tuple(key_decay.shape)}")
    return fast_weights(q, k, v, decay=key_decay, value_decay=value_decay, **rest)


RULE = Rule("decay_rule", step, {"key_decay": (PER_KEY,), "value_decay": (PER_VALUE,)}, in_family)


def decay_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_decay: Tensor,
    value_decay: Tensor,
    state: Tensor | None = None,
    *,
    first: Tensor | None = None,
    backend: str = "auto",
) -> Results:
    """Multiply the memory by key_decay and value_decay, add k^T v, then read with q.

    Equivalent to: ``for t in range(L): state = key_decay[t].outer(value_decay[t]) * state + k[t].outer(v[t])``,
    ``out[t] = q[t] @ state``.

    Args:
        key_decay: (B, H, L, Dk) and value_decay: (B, H, L, Dv), the share that is kept, usually in (0, 1). Other
            arguments are those of every rule: see :mod:`fairseq_fwp.ops`.
    """
    return RULE.run(q, k, v, key_decay, value_decay, state=state, first=first, backend=backend)
