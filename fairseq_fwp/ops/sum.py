"""The sum update rule: linear attention as a fast weight programmer with purely additive writes.

    W_t = W_{t-1} + k_t^T v_t        out_t = q_t W_t

Katharopoulos, Vyas, Pappas & Fleuret 2020, "Transformers are RNNs" (arXiv 2006.16236), Eqs. 16-20; Schlag, Irie &
Schmidhuber 2021, "Linear Transformers Are Secretly Fast Weight Programmers" (arXiv 2102.11174), Eq. 17. Their W is
ours transposed.
"""

from torch import Tensor

from .arguments import outer
from .fast_weights import fast_weights
from .rule import Results, Rule


def step(memory: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return memory + outer(k, v)


RULE = Rule("sum_rule", step, family=fast_weights)


def sum_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    *,
    first: Tensor | None = None,
    backend: str = "auto",
) -> Results:
    """Add k^T v to the memory, then read it with q.

    Equivalent to: ``for t in range(L): state = state + k[t].outer(v[t]); out[t] = q[t] @ state``.
    Arguments, results and errors are those of every rule: see :mod:`fairseq_fwp.ops`.
    """
    return RULE.run(q, k, v, state=state, first=first, backend=backend)
