"""The gated delta rule: the memory fades, and then the delta rule writes.

    W'  = diag(a_t) W_{t-1}        W_t = W' + k_t^T beta_t (v_t - k_t W')        out_t = q_t W_t

With one number a token, Yang, Kautz & Hatamizadeh 2025, "Gated Delta Networks" (arXiv 2412.06464), Eq. 10. With one for
each dimension of the key, Kimi Team 2025, "Kimi Linear" (arXiv 2510.26692), Eq. 1 (Kimi Delta Attention). a is the
share that is kept, not its logarithm.
"""

from typing import Any

from torch import Tensor

from . import delta
from .arguments import PER_KEY, PER_TOKEN
from .fast_weights import fast_weights
from .rule import Results, Rule


def step(memory: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    return delta.step(decay.unsqueeze(-1) * memory, k, v, beta)


def in_family(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, **rest: Any) -> Results:
    return fast_weights(q, k, v, decay=decay, rate=beta, erases=True, **rest)


RULE = Rule("gated_delta_rule", step, {"decay": (PER_TOKEN, PER_KEY), "beta": (PER_TOKEN,)}, in_family)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    first: Tensor | None = None,
    backend: str = "auto",
) -> Results:
    """Multiply the memory by decay, write as the delta rule does, then read with q.

    Equivalent to: ``for t in range(L): state = decay[t][..., None] * state``,
    ``state = state + k[t].outer(beta[t] * (v[t] - k[t] @ state))``, ``out[t] = q[t] @ state``.

    Args:
        decay: (B, H, L) or (B, H, L, Dk), the share that is kept, usually in (0, 1).
        beta: (B, H, L), usually in (0, 1) or (0, 2). Other arguments are those of every rule: see
            :mod:`fairseq_fwp.ops`.
    """
    return RULE.run(q, k, v, decay, beta, state=state, first=first, backend=backend)
