"""Gated linear attention: the memory fades by one number a token, or by one for each dimension of the key.

    W_t = diag(a_t) W_{t-1} + k_t^T v_t        out_t = q_t W_t

Yang, Wang, Shen, Panda & Kim 2024, "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv
2312.06635), Eq. 4. With one number a token it is the memory of RetNet (Sun et al. 2023, arXiv 2307.08621, constant for
each head). It is also that of Mamba-2 (Dao & Gu 2024, arXiv 2405.21060). a is the share that is kept, not its
logarithm.
"""

from typing import Any

from torch import Tensor

from .arguments import PER_KEY, PER_TOKEN, outer
from .fast_weights import fast_weights
from .rule import Results, Rule


def step(memory: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    return decay.unsqueeze(-1) * memory + outer(k, v)


def in_family(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, **rest: Any) -> Results:
    return fast_weights(q, k, v, decay=decay, **rest)


RULE = Rule("gla_rule", step, {"decay": (PER_TOKEN, PER_KEY)}, in_family)


def gla_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    state: Tensor | None = None,
    *,
    first: Tensor | None = None,
    backend: str = "auto",
) -> Results:
    """Multiply the memory by decay, add k^T v, then read with q.

    Equivalent to: ``for t in range(L): state = decay[t][..., None] * state + k[t].outer(v[t])``,
    ``out[t] = q[t] @ state``.

    Args:
        decay: (B, H, L) or (B, H, L, Dk), the share that is kept, usually in (0, 1). Other arguments are those of every
            rule: see :mod:`fairseq_fwp.ops`.
    """
    return RULE.run(q, k, v, decay, state=state, first=first, backend=backend)
