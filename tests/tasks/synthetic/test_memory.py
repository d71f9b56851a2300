"""Memories that are read backwards from the query, or through the matrix, agree with the papers' equations."""

import pytest
import torch
import torch.nn.functional as F
from support.attentions import memories
from support.pairwise import looped
from torch import nn

from fairseq_fwp.modules.attention.normalization import AttentionNormalization, SumNormalization
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.tasks.synthetic.memory import WRITE_STRENGTHS, FastWeightMemory, SoftmaxMemory

B, L, Q, S, D = 2, 7, 3, 5, 4
NORMALIZATIONS = [
    {},
    {"sum_normalization": SumNormalization()},
    {"attention_normalization": AttentionNormalization()},
]


def inputs(memory, length=L):
    """Return q, k, values and the logits of the gates, in float64 with gradients."""
    sizes = {name: projection.out_features for name, projection in memory.gate_projections(1).items()}
    q, k, *logits = (
        torch.randn(B, n, size).double().requires_grad_()
        for n, size in [(Q, D), *((length, n) for n in [D, *sizes.values()])]
    )
    return q, k, torch.randint(S, (B, length)), dict(zip(sizes, logits, strict=True))


def make(rule, map_name="elu", **settings):
    return FastWeightMemory(FEATURE_MAPS[map_name](D).double(), rule, S, backend="reference", **settings)


def by_equation(rule, q, k, values, gates, norm):
    """Read the last memory. q, k are mapped; gates are activated, (B, L, size) each."""
    if norm.get("sum_normalization"):
        q, k = (x / x.sum(-1, keepdim=True) for x in (q, k))
    normalized = bool(norm.get("attention_normalization"))
    k, one_hot, *gates = (x.unsqueeze(1) for x in (k, F.one_hot(values, S).double(), *gates))
    *_, (w, z) = memories(rule, k, one_hot, gates, normalized)
    return q @ w[:, 0] / (q @ z[:, 0].unsqueeze(-1) if normalized else 1)


def refusal_of(rule, map_name, norm):
    """Return the error of a combination, or None."""
    if norm and not FEATURE_MAPS[map_name].positive:
        return "features must not be negative"
    if UPDATE_RULES[rule].steps > 1:
        return "must have one key per token for associations"
    normalizer = UPDATE_RULES[rule].normalizer
    if "attention_normalization" in norm and (normalizer is None or normalizer.output_only):
        return f"`attention_normalization` must be left out for the update rule {rule}, where it is not"
    return None


@looped("norm", NORMALIZATIONS)
@looped("map_name", FEATURE_MAPS)
@looped("rule", UPDATE_RULES)
def test_every_combination_is_the_papers_equations(rule, map_name, norm):
    refusal = refusal_of(rule, map_name, norm)
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            make(rule, map_name, **norm)
        return
    memory = make(rule, map_name, **norm)
    q, k, values, gates = inputs(memory)
    if map_name in ("dpfp", "relu"):  # a vector that maps to zero has no sum to divide by
        q, k = ((x.abs() + 0.1).detach().requires_grad_() for x in (q, k))
        if map_name == "relu":
            nn.init.uniform_(memory.feature_map.linear.weight, 0.1, 1)
    activated = [memory._activate(gate, gates[gate.name]).reshape(B, L, -1) for gate in UPDATE_RULES[rule].gates]
    expected = by_equation(rule, memory.feature_map(q), memory.feature_map(k), values, activated, norm)
    torch.testing.assert_close(memory(q, k, values, gates), expected, rtol=1e-9, atol=1e-9)


@looped("length", [1, L])
@looped("norm", NORMALIZATIONS)
@looped("rule", [name for name, rule in UPDATE_RULES.items() if rule.operation in WRITE_STRENGTHS])
def test_reading_backwards_is_reading_the_matrix(rule, norm, length, monkeypatch):
    """The kernels give the same numbers and gradients."""
    memory = make(rule, **norm)
    q, k, values, gates = inputs(memory, length)
    cotangent = torch.randn(B, Q, S).double()
    backwards = torch.autograd.grad((memory(q, k, values, gates) * cotangent).sum(), [q, k, *gates.values()])
    memory.memory.backend = "auto"
    by_kernel = torch.autograd.grad((memory(q, k, values, gates) * cotangent).sum(), [q, k, *gates.values()])
    with monkeypatch.context() as patch:
        patch.delitem(WRITE_STRENGTHS, memory.memory.rule.operation)
        matrix = torch.autograd.grad((memory(q, k, values, gates) * cotangent).sum(), [q, k, *gates.values()])
    torch.testing.assert_close(backwards, matrix)
    torch.testing.assert_close(by_kernel, matrix)


def test_softmax_memory_is_its_definition():
    memory = SoftmaxMemory(S)
    assert not memory.gate_projections(3)
    q, k, values, _ = inputs(make("sum"))
    expected = (q @ k.mT / D**0.5).softmax(-1) @ F.one_hot(values, S).double()
    torch.testing.assert_close(memory(q, k, values, {}), expected)


def test_layer_normalisation_of_the_read_out():
    memory, plain = make("fwm", "tanh", norm_read_out=True), make("fwm", "tanh")
    q, k, values, gates = inputs(memory)
    read = plain(q, k, values, gates)
    centred = read - read.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(memory(q, k, values, gates), expected)


def test_gates_have_the_biases_of_their_rule():
    delta, decay = (make(rule).gate_projections(3) for rule in ("delta", "decay"))
    assert delta["beta"].bias is None and decay["key_decay"].bias.requires_grad
    assert decay["key_decay"].bias.shape == (D,) and decay["value_decay"].bias.shape == (S,)
