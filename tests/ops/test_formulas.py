"""Every rule against the equation of its paper, in the paper's convention, computed here with plain matrices.

W of the operators is (Dk, Dv) and read by q W. What differs in a paper is said at its formula: transposed states,
logarithms of decays, where the memory fades, and a scale of the query.
"""

import numpy as np
import pytest
from subjects import RULES, kernel_or_auto, sample_inputs


def sum_rule(q, k, v, state):
    """Schlag et al. 2021, Eq. 17: W_t = W_{t-1} + v k^T, y = W q, with W (Dv, Dk)."""
    w = state.T
    for q_t, k_t, v_t in zip(q, k, v, strict=True):
        w = w + np.outer(v_t, k_t)
        yield w @ q_t, w.T


def delta_rule(q, k, v, beta, state):
    """Schlag et al. 2021, Eqs. 23-25: the old value W k is mixed with the new one and replaced."""
    w = state.T
    for q_t, k_t, v_t, b in zip(q, k, v, beta, strict=True):
        old = w @ k_t
        new = b * v_t + (1 - b) * old
        w = w + np.outer(new, k_t) - np.outer(old, k_t)
        yield w @ q_t, w.T


def gated_rule(q, k, v, gate, state):
    """Peng et al. 2021 in Mao's form, Eq. 5: S = g S + (1 - g) v k^T."""
    s = state.T
    for q_t, k_t, v_t, g in zip(q, k, v, gate, strict=True):
        s = g * s + (1 - g) * np.outer(v_t, k_t)
        yield s @ q_t, s.T


def decay_rule(q, k, v, key_decay, value_decay, state):
    """Mao 2022, Eq. 7: S = (z f^T) * S + v k^T, element-wise."""
    s = state.T
    for q_t, k_t, v_t, f, z in zip(q, k, v, key_decay, value_decay, strict=True):
        s = np.outer(z, f) * s + np.outer(v_t, k_t)
        yield s @ q_t, s.T


def retention(q, k, v, decay, state):
    """Sun et al. 2023, Eq. 5, and Dao & Gu 2024, Eq. 16, whose decay is exp(A dt): the logarithm is what they carry."""
    s = state
    for q_t, k_t, v_t, log_a in zip(q, k, v, np.log(decay), strict=True):
        s = np.exp(log_a) * s + k_t[:, None] @ v_t[None]
        yield q_t @ s, s


def gla_rule(q, k, v, decay, state):
    """Yang et al. 2024, Eq. 3: S = (alpha^T 1) * S + k^T v, o = q S."""
    s = state
    for q_t, k_t, v_t, alpha in zip(q, k, v, decay, strict=True):
        s = np.outer(alpha, np.ones_like(v_t)) * s + np.outer(k_t, v_t)
        yield q_t @ s, s


def gated_delta_rule(q, k, v, decay, beta, state):
    """Yang et al. 2025, Eq. 10: S = S (alpha (I - beta k k^T)) + beta v k^T, with S (Dv, Dk)."""
    s, eye = state.T, np.eye(k.shape[1])
    for q_t, k_t, v_t, alpha, b in zip(q, k, v, decay, beta, strict=True):
        s = s @ (alpha * (eye - b * np.outer(k_t, k_t))) + b * np.outer(v_t, k_t)
        yield s @ q_t, s.T


def kimi_delta_attention(q, k, v, decay, beta, state):
    """Kimi Team 2025, Eq. 1: S = (I - beta k k^T) Diag(alpha) S + beta k v^T: it fades first, then is corrected."""
    s, eye = state, np.eye(k.shape[1])
    for q_t, k_t, v_t, alpha, b in zip(q, k, v, decay, beta, strict=True):
        s = (eye - b * np.outer(k_t, k_t)) @ np.diag(alpha) @ s + b * np.outer(k_t, v_t)
        yield s.T @ q_t, s


def delta_product_rule(q, k, v, beta, state, decay=None):
    """Siems et al. 2025, Eqs. 3-4: H = A H + B with A the product of the steps' I - beta k k^T, and B their writes."""
    h, eye = state, np.eye(k.shape[2])
    for t in range(len(q)):
        a, b = eye, np.zeros_like(h)
        for k_n, v_n, beta_n in zip(k[t], v[t], beta[t], strict=True):
            reflection = eye - beta_n * np.outer(k_n, k_n)
            a, b = reflection @ a, reflection @ b + beta_n * np.outer(k_n, v_n)
        h = a @ ((1 if decay is None else decay[t]) * h) + b
        yield h.T @ q[t], h


def rwkv7_rule(q, k, v, decay, removal_key, removal_rate, state):
    """Peng et al. 2025, Eq. 17: S = S (diag(w) - kappa^T (a * kappa)) + v^T k with S (Dv, Dk), read by r S^T."""
    s = state.T
    for r, k_t, v_t, w, kappa, a in zip(q, k, v, decay, removal_key, removal_rate, strict=True):
        s = s @ (np.diag(w) - np.outer(kappa, a * kappa)) + np.outer(v_t, k_t)
        yield r @ s.T, s.T


FORMULAS = {
    "sum": sum_rule,
    "gated": gated_rule,
    "gla": retention,
    "gla_by_key": gla_rule,
    "decay": decay_rule,
    "delta": delta_rule,
    "gated_delta": gated_delta_rule,
    "gated_delta_by_key": kimi_delta_attention,
    "delta_product": delta_product_rule,
    "delta_product_with_decay": delta_product_rule,
    "rwkv7": rwkv7_rule,
}


def test_every_rule_of_the_family_has_a_formula():
    assert {*FORMULAS} == {name for name, rule in RULES.items() if rule.kernel}


@pytest.mark.parametrize(
    ("rule", "beta"), [(rule, beta) for rule in FORMULAS for beta in (1, 2) if beta == 1 or "beta" in RULES[rule].gates]
)
def test_equals_the_formula(rule, beta):
    """beta up to 2: with negative eigenvalues."""
    inputs = sample_inputs(rule, (1, 2, 40, 6, 5), seed=3)
    if "beta" in inputs:
        inputs["beta"] = beta * inputs["beta"]
    for function in (RULES[rule].reference, kernel_or_auto(rule)):
        out, state = function(**inputs)
        for head in range(2):
            of_head = {name: x[0, head].numpy() for name, x in inputs.items()}
            expected = list(FORMULAS[rule](**of_head))
            np.testing.assert_allclose(out[0, head].numpy(), [read for read, _ in expected], rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(state[0, head].numpy(), expected[-1][1], rtol=1e-9, atol=1e-9)
