"""RWKV-7's update rule: the memory fades, the value under a removal key is removed, and a value is added.

    W_t = diag(w_t) W_{t-1} - (r_t * y_t)^T (y_t W_{t-1}) + k_t^T v_t        out_t = q_t W_t

Peng et al. 2025, "RWKV-7 'Goose' with Expressive Dynamic State Evolution" (arXiv 2503.14456), Eqs. 17-18. w is their w,
y the normalised removal key, r their in-context learning rate a, q the receptance and k the replacement key. Their S is
our W transposed. The removed value is retrieved before the memory fades. With other rates it covers Comba (Hu et al.
2025, arXiv 2506.02475) and other transitions of the form diagonal plus rank one.
"""

from typing import Any

from torch import Tensor

from .arguments import PER_KEY, outer, retrieve
from .fast_weights import fast_weights
from .rule import Results, Rule


def step(memory: Tensor, k: Tensor, v: Tensor, decay: Tensor, removal_key: Tensor, removal_rate: Tensor) -> Tensor:
    removed = outer(removal_rate * removal_key, retrieve(removal_key, memory))
    return decay.unsqueeze(-1) * memory - removed + outer(k, v)


def in_family(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, removal_key: Tensor, removal_rate: Tensor, **rest: Any
) -> Results:
    if decay.dim() != 4:  # the operator takes a decay per head too
        raise ValueError(f"rwkv7_rule: decay must have shape (B, H, L, Dk), got {tuple(decay.shape)}")
    return fast_weights(q, k, v, decay=decay, removal_key=removal_key, removal_rate=removal_rate, **rest)


RULE = Rule("rwkv7_rule", step, {"decay": (PER_KEY,), "removal_key": (PER_KEY,), "removal_rate": (PER_KEY,)}, in_family)


def rwkv7_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    removal_key: Tensor,
    removal_rate: Tensor,
    state: Tensor | None = None,
    *,
    first: Tensor | None = None,
    backend: str = "auto",
) -> Results:
    """Multiply the memory by decay, subtract what removal_key retrieved, add k^T v, then read with q.

    Equivalent to: ``for t in range(L): removed = (removal_rate[t] * removal_key[t]).outer(removal_key[t] @ state)``,
    ``state = decay[t][..., None] * state - removed + k[t].outer(v[t])``, ``out[t] = q[t] @ state``.

    Args:
        decay: (B, H, L, Dk), the share that is kept, usually in (0, 1); removal_key: (B, H, L, Dk), of length one in
            the paper; removal_rate: (B, H, L, Dk), any numbers. Other arguments are those of every rule: see
            :mod:`fairseq_fwp.ops`.
    """
    return RULE.run(q, k, v, decay, removal_key, removal_rate, state=state, first=first, backend=backend)
