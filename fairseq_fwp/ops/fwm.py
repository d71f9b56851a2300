"""The update rule of the Fast Weight Memory: the delta rule, then a memory with a norm above one is scaled to norm one.

    Z_t = W_{t-1} + k_t^T beta_t (v_t - k_t W_{t-1})        W_t = Z_t / max(1, ||Z_t||_F)        out_t = q_t W_t

Schlag, Munkhdalai & Schmidhuber 2021, "Learning Associative Inference Using Fast Weight Memory" (arXiv 2011.07831),
in the form used for comparison by Schlag, Irie & Schmidhuber 2021 (arXiv 2102.11174, Sec. 6.1.2). The Frobenius norm is
taken for each sequence and head. Their W is ours transposed. Their new value beta v + (1 - beta) v_old minus v_old is
our write beta (v - v_old). Two cases are not defined by the equation:

    - The first write to an empty memory is k^T beta v, and is never rescaled, as in the authors' code. A memory
      is empty if it is exactly zero, so a state of zeros, no state and left padding agree.
    - A token whose key or beta is exactly zero is padding: it neither writes nor rescales.

A norm over the whole memory is not linear in it, so this rule does not belong to the family and has no kernel.
"""

import torch
from torch import Tensor

from . import delta
from .arguments import PER_TOKEN
from .rule import Results, Rule


def step(memory: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    written = delta.step(memory, k, v, beta)
    square = (written * written).sum((-2, -1), keepdim=True)
    # The sum of magnitudes is zero only for zeros; a sum of squares may underflow.
    filled = memory.detach().abs().sum((-2, -1), keepdim=True) != 0
    writes = ((k != 0).any(-1, keepdim=True) & (beta != 0)).unsqueeze(-1)
    # Selected before the root, whose derivative at zero is infinite.
    return written / torch.where(writes & filled & (square > 1), square, 1.0).sqrt()


RULE = Rule("fwm_rule", step, {"beta": (PER_TOKEN,)})


def fwm_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    first: Tensor | None = None,
    backend: str = "auto",
) -> Results:
    """Write as the delta rule does, scale a memory above norm one back to one, then read with q.

    Equivalent to: ``for t in range(L): state = state + k[t].outer(beta[t] * (v[t] - k[t] @ state))``,
    ``state = state / max(1, state.norm())``, ``out[t] = q[t] @ state``. The first write to an empty (exactly zero)
    memory is not rescaled. A token with a key or beta of exactly zero does not change the memory. If the norm is
    exactly one, or the memory is empty, the gradient is that of the unscaled write.

    Args:
        beta: (B, H, L), usually in (0, 1).
        backend: "auto" or "reference"; "kernel" is refused. Other arguments are those of every rule: see
            :mod:`fairseq_fwp.ops`.
    """
    return RULE.run(q, k, v, beta, state=state, first=first, backend=backend)
