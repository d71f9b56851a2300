"""The delta update rule: write the difference between a value and the value that its key retrieves.

    W_t = W_{t-1} + k_t^T beta_t (v_t - k_t W_{t-1})        out_t = q_t W_t

Schlag, Irie & Schmidhuber 2021, "Linear Transformers Are Secretly Fast Weight Programmers" (arXiv 2102.11174), Eqs.
24-25. The rule is by Widrow & Hoff (1960). Their W is ours transposed. With keys of length one, a beta up to 2
gives the transition negative eigenvalues (Grazzi et al. 2025, arXiv 2411.12537).
"""

from typing import Any

from torch import Tensor

from .arguments import PER_TOKEN, outer, retrieve
from .fast_weights import fast_weights
from .rule import Results, Rule


def step(memory: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return memory + outer(k, beta * (v - retrieve(k, memory)))


def in_family(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **rest: Any) -> Results:
    return fast_weights(q, k, v, rate=beta, erases=True, **rest)


RULE = Rule("delta_rule", step, {"beta": (PER_TOKEN,)}, in_family)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    first: Tensor | None = None,
    backend: str = "auto",
) -> Results:
    """Write beta times the difference between v and the value that k retrieves, then read with q.

    Equivalent to: ``for t in range(L): state = state + k[t].outer(beta[t] * (v[t] - k[t] @ state))``,
    ``out[t] = q[t] @ state``.

    Args:
        beta: (B, H, L), usually in (0, 1) or (0, 2). Other arguments are those of every rule: see
            :mod:`fairseq_fwp.ops`.
    """
    return RULE.run(q, k, v, beta, state=state, first=first, backend=backend)
