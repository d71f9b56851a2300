"""DeltaProduct: several delta steps a token, each with its own key, before the token reads.

    W_0 = diag(a_t) W_{t-1}        W_n = W_{n-1} + k_tn^T beta_tn (v_tn - k_tn W_{n-1})    for n = 1 ... N
    W_t = W_N        out_t = q_t W_t

Siems, Carstensen, Zela, Hutter, Pontil & Grazzi 2025, "DeltaProduct: Improving State-Tracking in Linear RNNs via
Householder Products" (arXiv 2502.10297), Eqs. 3-4; with a decay it is their Gated DeltaProduct. Their H is ours.
"""

from torch import Tensor
from torch.nn.functional import pad

from . import delta
from .arguments import PER_KEY, PER_TOKEN, Shape
from .fast_weights import fast_weights
from .rule import Results, Rule

PER_STEP: Shape = ("B", "H", "L", "N")
KEYS: Shape = (*PER_STEP, "Dk")
VALUES: Shape = (*PER_STEP, "Dv")


def step(memory: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None = None) -> Tensor:
    if decay is not None:
        memory = decay.unsqueeze(-1) * memory
    for k_n, v_n, beta_n in zip(k.unbind(2), v.unbind(2), beta.unsqueeze(-1).unbind(2), strict=True):
        memory = delta.step(memory, k_n, v_n, beta_n)
    return memory


def in_family(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None = None,
    *,
    state: Tensor | None,
    first: Tensor | None,
) -> Results:
    """Run the gated delta rule with N tokens for each token: memory fades at the first one, and the last one reads."""
    others = k.shape[3] - 1
    # Check first: later code only sees L N tokens, and cannot distinguish L from N.
    if others < 0 or not q.shape[2:3] + k.shape[3:4] == k.shape[2:4] == v.shape[2:4] == beta.shape[2:]:
        shapes = f"{tuple(k.shape)}, {tuple(v.shape)} and {tuple(beta.shape)}"
        raise ValueError(
            "delta_product_rule: k, v and beta must have shape (B, H, L, N, ...), with the L tokens of q and N of at "
            f"least 1, got {shapes}"
        )
    if first is not None and first.dim() != 2:
        raise ValueError(f"delta_product_rule: first must have shape (B, L), got {tuple(first.shape)}")
    # (..., L, Dk) -> (..., L N, Dk), and (..., L) -> (..., L N)
    queries = pad(q.unsqueeze(3), (0, 0, others, 0)).flatten(2, 3)
    if decay is not None:
        last = (0, others) if decay.dim() == 3 else (0, 0, 0, others)
        decay = pad(decay.unsqueeze(3), last, value=1).flatten(2, 3)
    if first is not None:
        first = pad(first.unsqueeze(2), (0, others)).flatten(1)
    out, memory = fast_weights(
        queries,
        k.flatten(2, 3),
        v.flatten(2, 3),
        decay=decay,
        rate=beta.flatten(2, 3),
        erases=True,
        first=first,
        state=state,
    )
    return out[:, :, others :: others + 1], memory


RULE = Rule("delta_product_rule", step, {"beta": (PER_STEP,)}, in_family, KEYS, VALUES)
WITH_DECAY = Rule(
    "delta_product_rule", step, {"beta": (PER_STEP,), "decay": (PER_TOKEN, PER_KEY)}, in_family, KEYS, VALUES
)


def delta_product_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    decay: Tensor | None = None,
    first: Tensor | None = None,
    backend: str = "auto",
) -> Results:
    """Multiply the memory by decay, write N times as the delta rule does, then read with q.

    Equivalent to: ``for t in range(L): state = decay[t][..., None] * state``;
    ``for n in range(N): state += k[t, n].outer(beta[t, n] * (v[t, n] - k[t, n] @ state))``; ``out[t] = q[t] @ state``.

    Args:
        k: (B, H, L, N, Dk), v: (B, H, L, N, Dv), beta: (B, H, L, N), usually in (0, 1) or (0, 2).
        decay: (B, H, L) or (B, H, L, Dk), the share that is kept; None keeps all. Other arguments are those of every
            rule: see :mod:`fairseq_fwp.ops`.
    """
    if decay is None:
        return RULE.run(q, k, v, beta, state=state, first=first, backend=backend)
    return WITH_DECAY.run(q, k, v, beta, decay, state=state, first=first, backend=backend)
