"""Gates as in the papers, keys of length one, and rates up to 2."""

import math
import pickle

import pytest
import torch
from support.attentions import rule_inputs
from support.pairwise import looped

from fairseq_fwp import ops
from fairseq_fwp.modules.attention import FastWeightAttention
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import (
    UPDATE_RULES,
    Gate,
    MambaDecay,
    Normalizer,
    UpdateRule,
    gla_decay,
    rwkv7_decay,
)

X = torch.linspace(-6, 6, 25, dtype=torch.float64)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_decays_are_the_papers():
    """Those of Mamba are in the equations of tests/checkpoints/convert/test_fla.py."""
    for decay, formula in (
        (gla_decay, lambda x: sigmoid(x) ** (1 / 16)),
        (rwkv7_decay, lambda x: math.exp(-sigmoid(x) / math.sqrt(math.e))),
    ):
        expected = torch.tensor([formula(x) for x in X.tolist()], dtype=torch.float64)
        torch.testing.assert_close(decay(X), expected, rtol=1e-12, atol=0)


def test_a_mamba_decay_starts_in_its_ranges():
    decay = MambaDecay(1000, 4)
    rate, step = decay.log_rate.detach().exp(), torch.nn.functional.softplus(decay.bias.detach())
    assert 1 <= rate.min() < 1.2 and 15.8 < rate.max() <= 16.0001 and abs(rate.mean() - 8.5) < 0.5
    logs = step.log10()
    assert -3.0001 <= logs.min() < -2.98 and -1.02 < logs.max() <= -0.9999 and abs(logs.mean() + 2) < 0.05


def build(rule, feature_map="identity", **options):
    return FastWeightAttention(16, 2, FEATURE_MAPS[feature_map](8), rule, **options)


def test_l2_normalization_in_half_precision():
    """Keys and queries have length one. A padded token may be zero, and its output must be a number."""
    layer = build("delta", l2_normalization=True).half()
    x = torch.randn(1, 3, 16).half()
    x[:, 0] = 0
    q, k, v, _ = rule_inputs(layer, x, torch.tensor([[True, False, False]]))
    assert all(y.isfinite().all() for y in (q, k, v))
    for y in (q, k):
        torch.testing.assert_close(y[:, :, 1:].float().norm(dim=-1), torch.ones(1, 2, 2), rtol=0, atol=2e-3)


@looped("rule", UPDATE_RULES)
def test_negative_eigenvalues_double_the_rates_of_deltas_family(rule):
    if rule not in ("delta", "gated_delta", "kda", "delta_product"):
        with pytest.raises(ValueError, match=f"must be off for the update rule {rule}, got on"):
            build(rule, negative_eigenvalues=True)
        return
    layer, plain = build(rule, negative_eigenvalues=True), build(rule)
    plain.load_state_dict(layer.state_dict())
    x = 3 * torch.randn(4, 9, 16)
    *_, gates = rule_inputs(layer, x)
    *_, bare = rule_inputs(plain, x)
    for gate, found, usual in zip(layer.rule.gates, gates, bare, strict=True):
        torch.testing.assert_close(found, 2 * usual if gate.name == "beta" else usual)


def test_a_layer_with_a_rule_from_outside_is_pickled_by_its_name(monkeypatch):
    rule = ops.Rule("halving_rule", lambda memory, k, v: memory / 2 + ops.outer(k, v))
    monkeypatch.setitem(UPDATE_RULES, "halving", UpdateRule(rule, (), Normalizer(lambda: ())))
    layer, x = build("halving"), torch.randn(2, 5, 16)
    file = pickle.dumps(layer)
    same = pickle.loads(file)
    assert same.rule is layer.rule and torch.equal(same(x)[0], layer(x)[0])
    monkeypatch.delitem(UPDATE_RULES, "halving")
    with pytest.raises(ValueError, match=r"update rule must be one of .* got 'halving': if a plug-in has it"):
        pickle.loads(file)


LEAKY = ops.Rule(
    "leaky_rule", lambda m, k, v, keep: keep.unsqueeze(-1) * m + ops.outer(k, v), {"keep": (ops.PER_TOKEN,)}
)


REFUSED = [
    (LEAKY, "must be an UpdateRule, got Rule"),
    (UpdateRule(LEAKY, Gate("keep")), "gates must be a tuple such as"),
    (UpdateRule(LEAKY), "gates must be those of leaky_rule, in their order: keep, got none"),
    (UpdateRule(LEAKY, (Gate("kept"),)), "gates must be those of leaky_rule, in their order: keep, got kept"),
    (UpdateRule(ops.delta_rule), "gates must be those of delta_rule, in their order: beta, got none"),
    (UpdateRule("leaky"), "operation must be an ops.Rule, got 'leaky'"),
    (UpdateRule(ops.mlstm_rule, (Gate("beta"),)), "operation must be an ops.Rule, got <function mlstm_rule"),
    (UpdateRule(LEAKY, (Gate("keep"),), True), "normalizer must be a Normalizer or None, got True"),
]


@looped(("entry", "message"), REFUSED)
def test_an_entry_of_the_table_that_cannot_be_a_layer_is_refused(monkeypatch, entry, message):
    monkeypatch.setitem(UPDATE_RULES, "leaky", entry)
    with pytest.raises(ValueError, match=rf"UPDATE_RULES\['leaky'\].*{message}"):
        build("leaky")


def test_a_gate_of_no_size_is_refused():
    for option, size in (("size", "dk"), ("size", lambda dk, dv: dk), ("rank", "Dx"), ("rank", 1.5)):
        with pytest.raises(ValueError, match=f"the {option} of the gate 'keep' must be 'Dk', 'Dv', an integer or None"):
            Gate("keep", **{option: size})
