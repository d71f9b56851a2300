"""Every rule against the equation of its paper, in the paper's convention, computed here with plain matrices.

W of the operators is (Dk, Dv) and read by q W. What differs in a paper is said at its formula: transposed states,
logarithms of decays, where the memory fades, and a scale of the query. A formula returns the memory after one token.
"""

import numpy as np
import pytest
from support.pairwise import looped
from support.subjects import RULES, WITH_KERNEL, kernel_or_auto, sample_inputs


def sum_rule(w, k, v):
    """Schlag et al. 2021, Eq. 17: W_t = W_{t-1} + v k^T, y = W q, with W (Dv, Dk)."""
    return w + np.outer(v, k)


def delta_rule(w, k, v, beta):
    """Schlag et al. 2021, Eqs. 23-25: the old value W k is mixed with the new one and replaced."""
    old = w @ k
    new = beta * v + (1 - beta) * old
    return w + np.outer(new, k) - np.outer(old, k)


def gated_rule(s, k, v, gate):
    """Peng et al. 2021 in Mao's form, Eq. 5: S = g S + (1 - g) v k^T."""
    return gate * s + (1 - gate) * np.outer(v, k)


def decay_rule(s, k, v, f, z):
    """Mao 2022, Eq. 7: S = (z f^T) * S + v k^T, element-wise."""
    return np.outer(z, f) * s + np.outer(v, k)


def retention(s, k, v, decay):
    """Sun et al. 2023, Eq. 5, and Dao & Gu 2024, Eq. 16, whose decay is exp(A dt): the logarithm is what they carry."""
    return np.exp(np.log(decay)) * s + k[:, None] @ v[None]


def gla_rule(s, k, v, alpha):
    """Yang et al. 2024, Eq. 3: S = (alpha^T 1) * S + k^T v, o = q S."""
    return np.outer(alpha, np.ones_like(v)) * s + np.outer(k, v)


def gated_delta_rule(s, k, v, alpha, beta):
    """Yang et al. 2025, Eq. 10: S = S (alpha (I - beta k k^T)) + beta v k^T, with S (Dv, Dk)."""
    return s @ (alpha * (np.eye(len(k)) - beta * np.outer(k, k))) + beta * np.outer(v, k)


def kimi_delta_attention(s, k, v, alpha, beta):
    """Kimi Team 2025, Eq. 1: S = (I - beta k k^T) Diag(alpha) S + beta k v^T: it fades first, then is corrected."""
    return (np.eye(len(k)) - beta * np.outer(k, k)) @ np.diag(alpha) @ s + beta * np.outer(k, v)


def gated_delta_product_rule(h, k, v, decay, beta):
    """Siems et al. 2025, Eqs. 3-4: H = A H + B with A the product of the steps' I - beta k k^T, and B their writes."""
    a, b = np.eye(k.shape[1]), np.zeros_like(h)
    for k_n, v_n, beta_n in zip(k, v, beta, strict=True):
        reflection = np.eye(len(k_n)) - beta_n * np.outer(k_n, k_n)
        a, b = reflection @ a, reflection @ b + beta_n * np.outer(k_n, v_n)
    return a @ np.diag(np.broadcast_to(decay, len(h))) @ h + b


def rwkv7_rule(s, k, v, w, kappa, a):
    """Peng et al. 2025, Eq. 17: S = S (diag(w) - kappa^T (a * kappa)) + v^T k with S (Dv, Dk), read by r S^T."""
    return s @ (np.diag(w) - np.outer(kappa, a * kappa)) + np.outer(v, k)


def dplr_rule(s, k, v, w, y, x):
    """S = (Diag(w) - x y^T) S + k v^T."""
    return (np.diag(np.broadcast_to(w, k.shape)) - np.outer(x, y)) @ s + np.outer(k, v)


def gdn2_rule(s, k, v, a, b, w):
    """Hatamizadeh et al. 2026: S = (I - k (b * k)^T) Diag(a) S + k (w * v)^T."""
    fades = np.diag(np.broadcast_to(a, k.shape))
    return (np.eye(len(k)) - np.outer(k, b * k)) @ fades @ s + np.outer(k, w * v)


FORMULAS = {
    "sum": sum_rule,
    "gated": gated_rule,
    "gla": retention,
    "gla_by_key": gla_rule,
    "decay": decay_rule,
    "delta": delta_rule,
    "gated_delta": gated_delta_rule,
    "gated_delta_by_key": kimi_delta_attention,
    "delta_product": lambda h, k, v, beta: gated_delta_product_rule(h, k, v, 1, beta),
    "gated_delta_product": gated_delta_product_rule,
    "gated_delta_product_by_key": gated_delta_product_rule,
    "rwkv7": rwkv7_rule,
    "dplr": dplr_rule,
    "dplr_by_key": dplr_rule,
    "gdn2": gdn2_rule,
    "gdn2_by_key": gdn2_rule,
}
BY_VALUE = (sum_rule, delta_rule, gated_rule, decay_rule, gated_delta_rule, rwkv7_rule)  # states (Dv, Dk)


@pytest.mark.parametrize("rule", WITH_KERNEL)
@looped("beta", lambda rule: (1, 2) if "beta" in RULES[rule].gates else (1,))
def test_equals_the_formula(rule, beta):
    """beta up to 2: with negative eigenvalues."""
    inputs, formula = sample_inputs(rule, (1, 2, 40, 6, 5), seed=3), FORMULAS[rule]
    inputs |= {name: beta * x for name, x in inputs.items() if name == "beta"}
    for function in (RULES[rule].reference, kernel_or_auto(rule)):
        out, final = function(**inputs)
        for head in range(2):
            tokens = {name: x[0, head].numpy() for name, x in inputs.items()}
            queries, state = tokens.pop("q"), tokens.pop("state")
            for t, q in enumerate(queries):
                of_token = {name: x[t] for name, x in tokens.items()}
                k, v, gates = of_token.pop("k"), of_token.pop("v"), of_token.values()
                state = formula(state.T, k, v, *gates).T if formula in BY_VALUE else formula(state, k, v, *gates)
                np.testing.assert_allclose(out[0, head, t].numpy(), q @ state, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(final[0, head].numpy(), state, rtol=1e-9, atol=1e-9)
