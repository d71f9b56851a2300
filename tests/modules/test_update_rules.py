"""Gates as in the papers, keys of length one, and rates up to 2."""

import math
import pickle

import pytest
import torch
from attentions import rule_inputs
from pairwise import looped

from fairseq_fwp import ops
from fairseq_fwp.modules.attention import FastWeightAttention
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import (
    UPDATE_RULES,
    Gate,
    MambaDecay,
    UpdateRule,
    gla_decay,
    rwkv7_decay,
    unit_length,
)

X = torch.linspace(-6, 6, 25, dtype=torch.float64)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@looped(
    ("activation", "formula"),
    [
        (gla_decay, lambda x: sigmoid(x) ** (1 / 16)),
        (rwkv7_decay, lambda x: math.exp(-sigmoid(x) / math.sqrt(math.e))),
    ],
)
def test_a_decay_is_the_papers(activation, formula):
    expected = torch.tensor([formula(x) for x in X.tolist()], dtype=torch.float64)
    torch.testing.assert_close(activation(X), expected, rtol=1e-12, atol=0)


def test_a_mamba_decay_is_the_papers():
    decay = MambaDecay(2, 3).double()
    x = torch.randn(4, 5, 2, 3, dtype=torch.float64)
    for head in range(2):
        for i in range(3):
            rate, bias = decay.log_rate[head, 0].exp().item(), decay.bias[head, i].item()
            expected = [math.exp(-rate * math.log1p(math.exp(value + bias))) for value in x[..., head, i].flatten()]
            torch.testing.assert_close(decay(x)[..., head, i].flatten().tolist(), expected, rtol=1e-12, atol=0)


def test_a_mamba_decay_starts_in_its_ranges():
    decay = MambaDecay(1000, 4)
    rate, step = decay.log_rate.detach().exp(), torch.nn.functional.softplus(decay.bias.detach())
    assert 1 <= rate.min() < 1.2
    assert 15.8 < rate.max() <= 16.0001
    assert abs(rate.mean() - 8.5) < 0.5
    logs = step.log10()
    assert -3.0001 <= logs.min() < -2.98
    assert -1.02 < logs.max() <= -0.9999
    assert abs(logs.mean() + 2) < 0.05


def test_a_unit_length_is_one():
    x = torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(unit_length(x) * x.square().sum(-1, keepdim=True).sqrt(), x)


def build(rule, feature_map="identity", **options):
    return FastWeightAttention(16, 2, FEATURE_MAPS[feature_map](8), rule, **options)


@looped("feature_map", ["identity", "elu", "dpfp"])
def test_l2_normalization_divides_keys_and_queries_by_their_lengths(feature_map):
    layer = build("delta", feature_map, l2_normalization=True)
    plain = build("delta", feature_map)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 16)
    q, k, v, _ = rule_inputs(layer, x)
    bare_q, bare_k, bare_v, _ = rule_inputs(plain, x)
    for found, bare in ((q, bare_q), (k, bare_k)):
        torch.testing.assert_close(found, bare / bare.square().sum(-1, keepdim=True).sqrt())
    assert torch.equal(v, bare_v)


def test_l2_normalization_of_a_zero_in_half_precision_is_zero():
    """A padded token may be zero, and its output must be a number."""
    layer = build("delta", l2_normalization=True).half()
    x = torch.randn(1, 3, 16).half()
    x[:, 0] = 0
    for y in rule_inputs(layer, x, torch.tensor([[True, False, False]]))[:3]:
        assert y.isfinite().all()


DOUBLING = [name for name, rule in UPDATE_RULES.items() if any(gate.doubles for gate in rule.gates)]


@looped("rule", UPDATE_RULES)
def test_negative_eigenvalues_double_the_rates_of_deltas_family(rule):
    if rule not in DOUBLING:
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


def test_the_family_of_delta_has_rates_to_double():
    assert DOUBLING == ["delta", "gated_delta", "kda", "delta_product"]


def test_a_rule_from_outside_need_not_know_documents(monkeypatch):
    """A rule written before these fields existed trains as before."""

    def keep_all(q, k, v, state=None, *, backend="auto"):
        return UPDATE_RULES["sum"].operator(q, k, v, state, backend=backend)

    x = torch.randn(2, 5, 16)
    expected = build("sum", "elu")
    monkeypatch.setitem(UPDATE_RULES, "keep_all", UPDATE_RULES["sum"]._replace(operator=keep_all))
    layer = build("keep_all", "elu")
    layer.load_state_dict(expected.state_dict())
    state = layer(x)[1]
    torch.testing.assert_close(layer(x, state)[0], expected(x, state)[0])


def test_a_layer_with_a_rule_from_outside_is_pickled_by_its_name(monkeypatch):
    rule = ops.Rule("halving_rule", lambda memory, k, v: memory / 2 + ops.outer(k, v))
    monkeypatch.setitem(UPDATE_RULES, "halving", UpdateRule(rule, (), forgets=lambda: ()))
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


@looped(
    ("entry", "message"),
    [
        (LEAKY, "must be an UpdateRule, got Rule"),
        (UpdateRule(LEAKY, Gate("keep")), "gates must be a tuple such as"),
        (UpdateRule(LEAKY), "gates must be those of leaky_rule, in their order: keep, got none"),
        (UpdateRule(LEAKY, (Gate("kept"),)), "gates must be those of leaky_rule, in their order: keep, got kept"),
        (UpdateRule(ops.delta_rule), "gates must be those of delta_rule, in their order: beta, got none"),
    ],
)
def test_an_entry_of_the_table_that_cannot_be_a_layer_is_refused(monkeypatch, entry, message):
    monkeypatch.setitem(UPDATE_RULES, "leaky", entry)
    with pytest.raises(ValueError, match=rf"UPDATE_RULES\['leaky'\].*{message}"):
        build("leaky")
