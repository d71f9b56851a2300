"""The model of the synthetic retrieval task: its projections, architectures and refusals; its criterion."""

import pytest
import torch
import torch.nn.functional as F
from fairseq import metrics
from fairseq.models import ARCH_MODEL_REGISTRY
from support.pairwise import looped
from support.small_models import build_retrieval as build

from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.tasks.synthetic.model import (
    RETRIEVAL_PRESETS,
    FwpAssociativeRetrieval,
    SquaredErrorCriterion,
    squared_errors,
)

S = 6


def inputs(length=5, queries=2):
    return torch.randint(S, (3, length)), torch.randint(S, (3, length)), torch.randint(S, (3, queries))


# Rules that the paper, or its public code, does not read by attention normalisation.
NORMALIZED = {rule: ["sum_normalization"] for rule in ("delta", "gla", "gated_delta", "kda", "rwkv7")}
NORMALIZED |= {"softmax": [], "fwm": ["norm_read_out"]}


@looped("arch", RETRIEVAL_PRESETS)
def test_architectures_have_the_papers_sizes(arch):
    """Names say the rule and map; sizes are those of the paper or its public code, and so is the normalisation."""
    assert ARCH_MODEL_REGISTRY[arch] is FwpAssociativeRetrieval
    preset = RETRIEVAL_PRESETS[arch]
    rule, feature_map = preset["update_rule"], preset.get("feature_map", "")
    number = str(preset.get("dpfp_nu") or preset.get("favor_features") or "")
    assert arch == "_".join(filter(None, [rule, feature_map + number, "retrieval"]))
    model = build(arch)
    assert model.embedding.weight.shape == (S, 13)  # 1.1 for each of the keys and values
    assert model.key_proj.weight.shape == (64, 13 + S) and model.query_proj.weight.shape == (64, 13)
    assert model(*inputs()).shape == (3, 2, S)
    expected = NORMALIZED.get(rule, ["attention_normalization"])
    if arch == "sum_tanh_retrieval":  # its features may be negative
        expected = []
    assert [flag for flag in preset if "norm" in flag] == expected and all(preset[flag] is True for flag in expected)


@looped("rule", ["sum", "delta", "decay"])
def test_projections_are_of_concatenated_embeddings(rule):
    """k = W_K [e(k); v], and gates too, without one-hot vectors and concatenations."""
    model = build(update_rule=rule).double()
    keys, values, queries = inputs()
    written = torch.cat([model.embedding(keys), F.one_hot(values, S).double()], -1)
    expected = model.memory(
        model.query_proj(model.embedding(queries)),
        model.key_proj(written),
        values,
        {name: projection(written) for name, projection in model.gate_projs.items()},
    )
    torch.testing.assert_close(model(keys, values, queries), expected)


@looped("feature_map", FEATURE_MAPS)
@looped("rule", [*(name for name, rule in UPDATE_RULES.items() if rule.steps == 1), "softmax"])
def test_every_combination_learns(rule, feature_map):
    """All parameters get gradients."""
    model = build(update_rule=rule, feature_map=feature_map, key_dim=8)
    model(*inputs()).square().sum().backward()
    unused = {"memory.feature_map.linear.weight", "memory.feature_map.linear.bias"} if rule == "softmax" else set()
    for name, parameter in model.named_parameters():
        assert name in unused or (parameter.grad is not None and parameter.grad.isfinite().all()), name
        assert name in unused or parameter.grad.any(), name


def test_a_query_retrieves_its_value_whatever_the_other_queries_are():
    model = build(update_rule="delta", sum_normalization=True).double()
    keys, values, queries = inputs(queries=4)
    together = model(keys, values, queries)
    apart = torch.cat([model(keys, values, queries[:, [i]]) for i in range(4)], 1)
    torch.testing.assert_close(together, apart)


UNUSED = [
    ({"update_rule": "softmax", "feature_map": "dpfp", "dpfp_nu": 2}, ["dpfp-nu", "feature-map"]),
    ({"feature_map": "relu", "dpfp_nu": 2, "relu_features": 3}, ["dpfp-nu"]),
    ({"feature_map": "favor", "favor_features": 8}, []),
]


@looped("flags, unused", UNUSED)
def test_options_without_effect_are_named(flags, unused, caplog):
    caplog.clear()
    build(**flags)
    assert [message.split()[0] for message in caplog.messages] == [f"--{flag}" for flag in unused]


REFUSED = [
    ({"key_dim": 0}, "--key-dim must be at least 1, got 0"),
    ({"embed_dim": 0}, "--embed-dim must be at least 1, got 0"),
    ({"feature_map": "nonsense"}, "the feature map must be one of elu, .*, got 'nonsense'"),
    ({"update_rule": "nonsense"}, "the update rule must be one of sum, .*, got 'nonsense'"),
    ({"feature_map": "tanh", "sum_normalization": True}, "features must not be negative"),
]


@looped("flags, message", REFUSED)
def test_refusals(flags, message):
    with pytest.raises(ValueError, match=message):
        build(**flags)


def test_errors_are_those_of_one_hot_vectors():
    retrieved = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    target = torch.randint(7, (3, 4))
    expected = ((F.one_hot(target, 7) - retrieved) ** 2 / 2).sum(-1)
    found = squared_errors(retrieved, target)
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn(3, 4).double()
    grads = [torch.autograd.grad((x * cotangent).sum(), retrieved)[0] for x in (found, expected)]
    torch.testing.assert_close(*grads)


def test_queries_that_are_not_asked_count_nothing():
    retrieved = torch.randn(2, 3, 5)
    sample = {"net_input": {"x": retrieved}, "target": torch.tensor([[1, -1, 0], [4, 2, -1]])}
    loss, asked, log = SquaredErrorCriterion(None)(lambda x: x, sample)
    rows, columns = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 2, 0, 1])
    expected = squared_errors(retrieved[rows, columns].unsqueeze(0), torch.tensor([[1, 0, 4, 2]])).sum()
    assert asked == log["sample_size"] == 4
    assert loss.item() == log["loss"].item() == pytest.approx(expected.item())


def test_the_mean_is_over_queries_of_all_processes():
    logs = [{"loss": 3.0, "sample_size": 4}, {"loss": 1.0, "sample_size": 1}]
    with metrics.aggregate(new_root=True) as log:
        SquaredErrorCriterion.reduce_metrics(logs)
    assert log.get_smoothed_values()["loss"] == pytest.approx(4 / 5)
