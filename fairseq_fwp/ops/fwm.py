"""The update rule of the Fast Weight Memory: the delta rule, then a memory longer than one is scaled back to one.

    Z_t = W_{t-1} + k_t^T beta_t (v_t - k_t W_{t-1})        W_t = Z_t / max(1, ||Z_t||_F)        out_t = q_t W_t

Schlag, Munkhdalai & Schmidhuber 2021, "Learning Associative Inference Using Fast Weight Memory" (arXiv 2011.07831),
in the form that Schlag, Irie & Schmidhuber 2021 (arXiv 2102.11174, Sec. 6.1.2) compare with. The norm is Frobenius', of
each sequence and head. Their W is ours transposed, and their new value beta v + (1 - beta) v_old, less v_old, is our
write beta (v - v_old). Two cases that the equation leaves open:

    - The first write of an empty memory is k^T beta v, however long: it is not rescaled, as in the authors' code.
      Empty is a memory that is exactly zero, so a state of zeros, no state and left padding agree.
    - A token whose key or beta is exactly zero is padding: it neither writes nor rescales.

A norm over the whole memory is not linear in it, so this rule is not of the family and has no kernel.
"""

import torch
from torch import Tensor

from . import delta
from .arguments import PER_TOKEN
from .rule import Results, Rule


def step(memory: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    written = delta.step(memory, k, v, beta)
    square = (written * written).sum((-2, -1), keepdim=True)
    # The sum of magnitudes is zero only for zeros, where that of squares may underflow.
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
    """Read with q, after each corrective write of v under k at rate beta and a rescaling of what grew beyond norm one.

    Equivalent to: ``for t in range(L): state = state + k[t].outer(beta[t] * (v[t] - k[t] @ state))``,
    ``state = state / max(1, state.norm())``, ``out[t] = q[t] @ state``. The first write of an empty (exactly zero)
    memory is not rescaled. A token with a key or beta of exactly zero does not change the memory. Where the norm is
    exactly one, and where the memory is empty, the gradient is that of the unscaled write.

    Args:
        beta: (B, H, L), usually in (0, 1).
        backend: "auto" or "reference"; "kernel" is refused. All else is that of every rule: see
            :mod:`fairseq_fwp.ops`.
    """
    return RULE.run(q, k, v, beta, state=state, first=first, backend=backend)
