"""The update rules, one definition each: the step of a token, its equation, and how it is a case of ``fast_weights``.

All are called as described in :mod:`fairseq_fwp.ops`. W is the memory (Dk, Dv), transposed in most of the papers. Every
rule reads with out_t = q_t W_t. Decays are the share that is kept, usually in (0, 1), not logarithms.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .arguments import (
    PER_KEY,
    PER_TOKEN,
    PER_VALUE,
    SHARED_KEY,
    Results,
    Shape,
    at_least_float32,
    for_heads,
    outer,
    retrieve,
    state_dtype,
)
from .fast_weights import Terms, fast_weights
from .rule import Rule

RULES: list[Rule] = []  # in the order of this page


def rule(
    as_fast_weights: Terms | Callable[..., Results] | None = None,
    key: Shape = SHARED_KEY,
    value: Shape = PER_VALUE,
    **gates: tuple[Shape, ...],
) -> Callable[[Callable[..., Tensor]], Rule]:
    """Turn a step into the rule of its name. Arguments as of `Rule`."""

    def decorate(step: Callable[..., Tensor]) -> Rule:
        RULES.append(Rule(step.__name__, step, gates, as_fast_weights, key, value))
        return RULES[-1]

    return decorate


@rule(as_fast_weights={})
def sum_rule(memory: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Add k^T v to the memory, then read it with q: linear attention.

        W_t = W_{t-1} + k_t^T v_t

    Equivalent to: ``for t in range(L): state = state + k[t].outer(v[t]); out[t] = q[t] @ state``.

    Katharopoulos, Vyas, Pappas & Fleuret 2020, "Transformers are RNNs" (arXiv 2006.16236), Eqs. 16-20; Schlag, Irie &
    Schmidhuber 2021, "Linear Transformers Are Secretly Fast Weight Programmers" (arXiv 2102.11174), Eq. 17.
    """
    return memory + outer(k, v)


def _expect_factors(q: Tensor, *factors: tuple[Tensor, tuple[int, ...]]) -> None:
    """Refuse gates whose product would broadcast or change its dtype, which the operator would not see."""
    if any(x.shape != shape or x.dtype not in (q.dtype, state_dtype(q.dtype)) for x, shape in factors):
        raise ValueError("gates must have the shapes and the dtype of their rule")


def _gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, **options: Any) -> Results:
    return fast_weights(q, k, v, decay=gate, rate=torch.rsub(at_least_float32(gate), 1), **options)


@rule(gate=(PER_TOKEN,), as_fast_weights=_gated)
def gated_rule(memory: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Multiply the memory by gate (B, H, L), add (1 - gate) k^T v, then read with q.

        W_t = g_t W_{t-1} + (1 - g_t) k_t^T v_t

    Equivalent to: ``for t in range(L): state = gate[t] * state + (1 - gate[t]) * k[t].outer(v[t])``,
    ``out[t] = q[t] @ state``.

    Peng, Pappas, Yogatama, Schwartz, Smith & Kong 2021, "Random Feature Attention" (arXiv 2103.02143), in the form of
    Mao 2022 (arXiv 2210.04243), Eq. 5. Schlag, Irie & Schmidhuber 2021, Eq. 52, write 1 - beta for g.
    """
    return gate.unsqueeze(-1) * memory + outer((1 - gate) * k, v)


@rule(decay=(PER_TOKEN, PER_KEY), as_fast_weights={"decay": "decay"})
def gla_rule(memory: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """Multiply the memory by decay, (B, H, L) or (B, H, L, Dk), add k^T v, then read with q: gated linear attention.

        W_t = diag(a_t) W_{t-1} + k_t^T v_t

    Equivalent to: ``for t in range(L): state = decay[t][..., None] * state + k[t].outer(v[t])``,
    ``out[t] = q[t] @ state``.

    Yang, Wang, Shen, Panda & Kim 2024, "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv
    2312.06635), Eq. 4. With one number a token it is the memory of RetNet (Sun et al. 2023, arXiv 2307.08621, constant
    for each head). It is also that of Mamba-2 (Dao & Gu 2024, arXiv 2405.21060).
    """
    return decay.unsqueeze(-1) * memory + outer(k, v)


@rule(
    key_decay=(PER_KEY,),
    value_decay=(PER_VALUE,),
    as_fast_weights={"decay": "key_decay", "value_decay": "value_decay"},
)
def decay_rule(memory: Tensor, k: Tensor, v: Tensor, key_decay: Tensor, value_decay: Tensor) -> Tensor:
    """Multiply the memory by key_decay (B, H, L, Dk) and value_decay (B, H, L, Dv), add k^T v, then read with q.

        W_t = (f_t^T z_t) * W_{t-1} + k_t^T v_t        (* element-wise, f key_decay, z value_decay)

    Equivalent to: ``for t in range(L): state = key_decay[t].outer(value_decay[t]) * state + k[t].outer(v[t])``,
    ``out[t] = q[t] @ state``.

    Mao 2022, "Fine-Tuning Pre-trained Transformers into Decaying Fast Weights" (arXiv 2210.04243), Eq. 7. Our decays
    are the values of the paper's sigmoids.
    """
    return outer(key_decay, value_decay) * memory + outer(k, v)


@rule(beta=(PER_TOKEN,), as_fast_weights={"rate": "beta", "erases": True})
def delta_rule(memory: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Write beta (B, H, L) times the difference between v and the value that k retrieves, then read with q.

        W_t = W_{t-1} + k_t^T beta_t (v_t - k_t W_{t-1})

    Equivalent to: ``for t in range(L): state = state + k[t].outer(beta[t] * (v[t] - k[t] @ state))``,
    ``out[t] = q[t] @ state``.

    Schlag, Irie & Schmidhuber 2021, "Linear Transformers Are Secretly Fast Weight Programmers" (arXiv 2102.11174), Eqs.
    24-25. The rule is by Widrow & Hoff (1960). beta is usually in (0, 1). With keys of length one, a beta up to 2
    gives the transition negative eigenvalues (Grazzi et al. 2025, arXiv 2411.12537).
    """
    return memory + outer(k, beta * (v - retrieve(k, memory)))


@rule(
    decay=(PER_TOKEN, PER_KEY),
    beta=(PER_TOKEN,),
    as_fast_weights={"decay": "decay", "rate": "beta", "erases": True},
)
def gated_delta_rule(memory: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Multiply the memory by decay, (B, H, L) or (B, H, L, Dk), write as the delta rule does, then read with q.

        W'  = diag(a_t) W_{t-1}        W_t = W' + k_t^T beta_t (v_t - k_t W')

    Equivalent to: ``for t in range(L): state = decay[t][..., None] * state``,
    ``state = state + k[t].outer(beta[t] * (v[t] - k[t] @ state))``, ``out[t] = q[t] @ state``.

    With one number a token, Yang, Kautz & Hatamizadeh 2025, "Gated Delta Networks" (arXiv 2412.06464), Eq. 10. With one
    for each dimension of the key, Kimi Team 2025, "Kimi Linear" (arXiv 2510.26692), Eq. 1 (Kimi Delta Attention).
    beta (B, H, L) is usually in (0, 1) or (0, 2).
    """
    faded = decay.unsqueeze(-1) * memory
    return faded + outer(k, beta * (v - retrieve(k, faded)))


PER_STEP: Shape = ("B", "H", "L", "N")
KEYS: Shape = ("B", "Hk", "L", "N", "Dk")
VALUES: Shape = ("B", "H", "L", "N", "Dv")


def _product(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor, state: Tensor | None, first: Tensor | None
) -> Results:
    """Run the gated delta rule with N tokens for each token: memory fades at the first one, and the last one reads."""
    others = k.shape[3] - 1
    # Check first: later code only sees L N tokens, and cannot distinguish L from N.
    if others < 0 or not q.shape[2:3] + k.shape[3:4] == k.shape[2:4] == v.shape[2:4] == beta.shape[2:]:
        shapes = f"{tuple(k.shape)}, {tuple(v.shape)} and {tuple(beta.shape)}"
        raise ValueError(
            f"k, v and beta must have shape (B, H, L, N, ...), with the L tokens of q and N of at least 1, got {shapes}"
        )
    if first is not None and first.dim() != 2:
        raise ValueError(f"first must have shape (B, L), got {tuple(first.shape)}")
    # (..., L, Dk) -> (..., L N, Dk), and (..., L) -> (..., L N)
    queries = pad(q.unsqueeze(3), (0, 0, others, 0)).flatten(2, 3)
    if decay is not None:
        last = (0, others) if decay.dim() == 3 else (0, 0, 0, others)
        decay = pad(decay.unsqueeze(3), last, value=1).flatten(2, 3)
    if first is not None:
        first = pad(first.unsqueeze(2), (0, others)).flatten(1)
    keys, values, rate = k.flatten(2, 3), v.flatten(2, 3), beta.flatten(2, 3)
    out, memory = fast_weights(queries, keys, values, decay=decay, rate=rate, erases=True, first=first, state=state)
    return out[:, :, others :: others + 1], memory


def _delta_product(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Tensor | None) -> Results:
    return _product(q, k, v, None, beta, **options)


@rule(beta=(PER_STEP,), as_fast_weights=_delta_product, key=KEYS, value=VALUES)
def delta_product_rule(memory: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Write N times as the delta rule does, then read with q.

        W_0 = W_{t-1}        W_n = W_{n-1} + k_tn^T beta_tn (v_tn - k_tn W_{n-1}), n = 1 ... N        W_t = W_N

    Equivalent to: ``for t in range(L): for n in range(N):``
    ``state += k[t, n].outer(beta[t, n] * (v[t, n] - k[t, n] @ state))``; then ``out[t] = q[t] @ state``.

    Siems, Carstensen, Zela, Hutter, Pontil & Grazzi 2025, "DeltaProduct: Improving State-Tracking in Linear RNNs via
    Householder Products" (arXiv 2502.10297), Eqs. 3-4.

    Args:
        k: (B, H, L, N, Dk), v: (B, H, L, N, Dv), beta: (B, H, L, N), usually in (0, 1) or (0, 2).
    """
    for k_n, v_n, beta_n in zip(k.unbind(2), v.unbind(2), beta.unsqueeze(-1).unbind(2), strict=True):
        memory = memory + outer(k_n, beta_n * (v_n - retrieve(k_n, memory)))
    return memory


@rule(decay=(PER_TOKEN, PER_KEY), beta=(PER_STEP,), as_fast_weights=_product, key=KEYS, value=VALUES)
def gated_delta_product_rule(memory: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Multiply the memory by decay, (B, H, L) or (B, H, L, Dk), then write as ``delta_product_rule``, and read with q.

        W_0 = diag(a_t) W_{t-1}        W_n = W_{n-1} + k_tn^T beta_tn (v_tn - k_tn W_{n-1})        W_t = W_N

    Equivalent to: ``state = decay[t][..., None] * state`` before the loop over n of ``delta_product_rule``.

    Siems et al. 2025 (arXiv 2502.10297), Gated DeltaProduct.
    """
    return delta_product_rule.step(decay.unsqueeze(-1) * memory, k, v, beta)


def _rwkv7(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, removal_key: Tensor, removal_rate: Tensor, **options: Any
) -> Results:
    _expect_factors(q, (removal_key, removal_key.shape), (removal_rate, removal_key.shape))
    key = at_least_float32(removal_key)
    return fast_weights(q, k, v, decay=decay, removal_key=key, removal=removal_rate * key, **options)


@rule(decay=(PER_KEY,), removal_key=(PER_KEY,), removal_rate=(PER_KEY,), as_fast_weights=_rwkv7)
def rwkv7_rule(
    memory: Tensor, k: Tensor, v: Tensor, decay: Tensor, removal_key: Tensor, removal_rate: Tensor
) -> Tensor:
    """Multiply the memory by decay, subtract what removal_key retrieved, add k^T v, then read with q.

        W_t = diag(w_t) W_{t-1} - (r_t * y_t)^T (y_t W_{t-1}) + k_t^T v_t

    Equivalent to: ``for t in range(L): removed = (removal_rate[t] * removal_key[t]).outer(removal_key[t] @ state)``,
    ``state = decay[t][..., None] * state - removed + k[t].outer(v[t])``, ``out[t] = q[t] @ state``.

    Peng et al. 2025, "RWKV-7 'Goose' with Expressive Dynamic State Evolution" (arXiv 2503.14456), Eqs. 17-18. w is
    their w, y the normalised removal key, r their in-context learning rate a, q the receptance and k the replacement
    key. The removed value is retrieved before the memory fades.

    Args:
        decay, removal_key, removal_rate: (B, H, L, Dk); keys of length one in the paper, rates of any size.
    """
    removed = outer(removal_rate * removal_key, retrieve(removal_key, memory))
    return decay.unsqueeze(-1) * memory - removed + outer(k, v)


@rule(
    decay=(PER_TOKEN, PER_KEY),
    removal_key=(PER_KEY,),
    removal=(PER_KEY,),
    as_fast_weights={"decay": "decay", "removal_key": "removal_key", "removal": "removal"},
)
def dplr_rule(memory: Tensor, k: Tensor, v: Tensor, decay: Tensor, removal_key: Tensor, removal: Tensor) -> Tensor:
    """Multiply the memory by decay, subtract under removal what removal_key retrieved, add k^T v, then read with q.

        W_t = diag(a_t) W_{t-1} - x_t^T (y_t W_{t-1}) + k_t^T v_t        (x removal, y removal_key)

    Equivalent to: ``for t in range(L): removed = removal[t].outer(removal_key[t] @ state)``,
    ``state = decay[t][..., None] * state - removed + k[t].outer(v[t])``, ``out[t] = q[t] @ state``.

    Any transition that is diagonal plus rank one: RWKV-7, Gated DeltaNet-2, Comba (Hu et al. 2025, arXiv 2506.02475)
    and preconditioned delta rules (arXiv 2604.21100) are cases of it.

    Args:
        decay: (B, H, L) or (B, H, L, Dk); removal_key, removal: (B, H, L, Dk), any numbers.
    """
    return decay.unsqueeze(-1) * memory - outer(removal, retrieve(removal_key, memory)) + outer(k, v)


def _gdn2(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor, **options: Any) -> Results:
    _expect_factors(q, (decay, decay.shape), (erase, (*v.shape[:3], k.shape[3])), (write, v.shape))
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError("gdn2_rule: q, k and v must have the same dtype")
    dtype, (q, k, v, decay) = v.dtype, map(at_least_float32, (q, k, v, decay))
    key = for_heads(k, v.shape[1])
    removal_key = erase * key * (decay if decay.dim() == 4 else decay.unsqueeze(-1))
    out, memory = fast_weights(q, k, write * v, decay=decay, removal_key=removal_key, removal=key, **options)
    return out.to(dtype), memory


@rule(decay=(PER_TOKEN, PER_KEY), erase=(PER_KEY,), write=(PER_VALUE,), as_fast_weights=_gdn2)
def gdn2_rule(memory: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor) -> Tensor:
    """Multiply the memory by decay, erase and write with a gate per dimension each, then read with q.

        W'  = diag(a_t) W_{t-1}        W_t = W' + k_t^T (w_t * v_t - (b_t * k_t) W')        (b erase, w write)

    Equivalent to: ``for t in range(L): state = decay[t][..., None] * state``,
    ``state = state + k[t].outer(write[t] * v[t] - (erase[t] * k[t]) @ state)``, ``out[t] = q[t] @ state``.

    Hatamizadeh, Choi & Kautz 2026, "Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention" (arXiv
    2605.22791). With erase = write = beta it is the gated delta rule.

    Args:
        decay: (B, H, L) or (B, H, L, Dk); erase: (B, H, L, Dk); write: (B, H, L, Dv), both usually in (0, 1).
    """
    faded = decay.unsqueeze(-1) * memory
    return faded + outer(k, write * v - retrieve(erase * k, faded))


@rule(beta=(PER_TOKEN,))
def fwm_rule(memory: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Write as the delta rule does, scale a memory above norm one back to one, then read with q.

        Z_t = W_{t-1} + k_t^T beta_t (v_t - k_t W_{t-1})        W_t = Z_t / max(1, ||Z_t||_F)

    Equivalent to: ``for t in range(L): state = state + k[t].outer(beta[t] * (v[t] - k[t] @ state))``,
    ``state = state / max(1, state.norm())``, ``out[t] = q[t] @ state``, for each sequence and head. beta is (B, H, L),
    usually in (0, 1). A norm is not linear in the memory, so there is no kernel, and ``backend="kernel"`` is refused.

    Schlag, Munkhdalai & Schmidhuber 2021, "Learning Associative Inference Using Fast Weight Memory" (arXiv 2011.07831),
    in the form used for comparison by Schlag, Irie & Schmidhuber 2021 (arXiv 2102.11174, Sec. 6.1.2). Their new value
    beta v + (1 - beta) v_old minus v_old is our write beta (v - v_old). The equation leaves three cases open:

    - The first write to an empty memory is k^T beta v, and is never rescaled, as in the authors' code. A memory
      is empty if it is exactly zero, so a state of zeros, no state and left padding agree.
    - A token whose key or beta is exactly zero is padding: it neither writes nor rescales.
    - If the norm is exactly one, or the memory is empty, the gradient is that of the unscaled write.
    """
    written = memory + outer(k, beta * (v - retrieve(k, memory)))
    square = (written * written).sum((-2, -1), keepdim=True)
    # The sum of magnitudes is zero only for zeros; a sum of squares may underflow.
    filled = memory.detach().abs().sum((-2, -1), keepdim=True) != 0
    writes = ((k != 0).any(-1, keepdim=True) & (beta != 0)).unsqueeze(-1)
    # Selected before the root, whose derivative at zero is infinite.
    return written / torch.where(writes & filled & (square > 1), square, 1.0).sqrt()
