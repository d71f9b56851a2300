"""The gated update rule: one number per token sets how much of the memory is kept, and how much is written.

    W_t = g_t W_{t-1} + (1 - g_t) k_t^T v_t        out_t = q_t W_t

Peng, Pappas, Yogatama, Schwartz, Smith & Kong 2021, "Random Feature Attention" (arXiv 2103.02143), in the form of Mao
2022 (arXiv 2210.04243), Eq. 5. g is the share that is kept. Schlag, Irie & Schmidhuber 2021 (arXiv 2102.11174),
Eq. 52, write 1 - beta for g. Their W is ours transposed.
"""

from typing import Any

import torch
from torch import Tensor

from .arguments import PER_TOKEN, outer
from .fast_weights import fast_weights
from .rule import Results, Rule


def step(memory: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return gate.unsqueeze(-1) * memory + outer((1 - gate) * k, v)


def in_family(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, **rest: Any) -> Results:
    # In half precision, 1 - gate would lose digits of a small gate.
    wide = gate.float() if gate.dtype in (torch.bfloat16, torch.float16) else gate
    return fast_weights(q, k, v, decay=gate, rate=torch.rsub(wide, 1), **rest)


RULE = Rule("gated_rule", step, {"gate": (PER_TOKEN,)}, in_family)


def gated_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    state: Tensor | None = None,
    *,
    first: Tensor | None = None,
    backend: str = "auto",
) -> Results:
    """Multiply the memory by gate, add (1 - gate) k^T v, then read with q.

    Equivalent to: ``for t in range(L): state = gate[t] * state + (1 - gate[t]) * k[t].outer(v[t])``,
    ``out[t] = q[t] @ state``.

    Args:
        gate: (B, H, L), the share that is kept, usually in (0, 1). Other arguments are those of every rule: see
            :mod:`fairseq_fwp.ops`.
    """
    return RULE.run(q, k, v, gate, state=state, first=first, backend=backend)
