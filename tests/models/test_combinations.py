"""Every combination of the tables is built, trained, resumed and decoded, or refused with one sentence."""

import io
import itertools
from argparse import Namespace

import pytest
import torch
from pairwise import looped

from fairseq_fwp.models.fwp_lm import FwpLanguageModel, FwpLanguageModelConfig
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

from .conftest import SMALL, configure, make_dictionary

NORMALIZATIONS = {
    "neither": {},
    "sum": {"sum_normalization": True},
    "attention": {"attention_normalization": True},
    "both": {"sum_normalization": True, "attention_normalization": True},
    "read-out": {"attention_normalization": True, "attention_normalization_read_out_only": True},
}
COMBINATIONS = [
    kind
    for kind in itertools.product(UPDATE_RULES, FEATURE_MAPS, NORMALIZATIONS)
    if kind[0] in ("sum", "gated", "decay", "delta", "fwm") or kind[1] in ("dpfp", "identity")
]


def refusal_of(rule, feature_map, normalization):
    """Return the error of a combination, or None."""
    attention = normalization in ("attention", "both", "read-out")
    if attention and not UPDATE_RULES[rule].normalizes:
        return f"--attention-normalization must be left out for the update rule {rule}, where it is not defined"
    if attention and UPDATE_RULES[rule].normalizer and normalization != "read-out":
        return "it erases and forgets, so only its output can be normalised"
    if normalization != "neither" and not FEATURE_MAPS[feature_map].positive:
        return "features must not be negative for sum and attention normalisation"
    return None


def build(rule, feature_map, normalization):
    config = configure(
        "fwp_lm",
        **{**SMALL, "decoder_layers": 1},
        **NORMALIZATIONS[normalization],
        decoder_update_rule=rule,
        decoder_feature_map=feature_map,
        dropout=0.0,
    )
    return FwpLanguageModel.build_model(config, Namespace(target_dictionary=make_dictionary(20)))


def train(model, optimizer, batches):
    losses = []
    for tokens in batches:
        loss = torch.nn.functional.nll_loss(
            model.get_normalized_probs(model(tokens[:, :-1]), log_probs=True).transpose(1, 2), tokens[:, 1:]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


@looped("combination", COMBINATIONS, ids="-".join)
def test_trains_resumes_and_decodes_or_is_refused(combination):
    refusal = refusal_of(*combination)
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            build(*combination)
        return
    model = build(*combination)
    optimizer = adam(model)
    batches = torch.randint(4, 20, (4, 2, 9))
    train(model, optimizer, batches[:2])
    assert all(parameter.grad is not None for parameter in model.parameters())

    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    expected = train(model, optimizer, batches[2:])
    file.seek(0)
    resumed = build(*combination)
    saved_model, saved_optimizer = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved_model)
    optimizer = adam(resumed)
    optimizer.load_state_dict(saved_optimizer)
    assert train(resumed, optimizer, batches[2:]) == expected
    assert all(torch.tensor(expected).isfinite())

    resumed.eval()
    tokens, state = batches[0], {}
    whole = resumed.get_normalized_probs(resumed(tokens), log_probs=True)
    steps = [
        resumed.get_normalized_probs(resumed(tokens[:, : t + 1], incremental_state=state), log_probs=True)
        for t in range(tokens.shape[1])
    ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", ["sum", "delta", "gated_delta", "kda"])
def test_an_option_that_a_rule_needs_is_not_unused(rule):
    options = {"attention_normalization": True, "attention_normalization_read_out_only": True}
    cfg = FwpLanguageModelConfig(decoder_update_rule=rule, decoder_feature_map="elu", **options)
    expected = ["attention_normalization_read_out_only"] if rule == "sum" else []
    assert FwpLanguageModel.unused_flags(cfg) == expected
