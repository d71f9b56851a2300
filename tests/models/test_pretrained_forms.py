"""Parts that only pretrained models have: biases, learned positions, output layers."""

import pytest
import torch
from pairwise import looped

from fairseq_fwp.modules.update_rules import UPDATE_RULES

from .conftest import log_probs, random_tokens


def incremental(model, tokens):
    state = {}
    return torch.cat([log_probs(model, tokens[:, :end], incremental_state=state) for end in range(1, 8)], 1)


@pytest.mark.parametrize("rule", ["softmax", *UPDATE_RULES])
def test_biases_of_the_attention(build_model, rule):
    normalized = rule in ("delta", "fwm")
    flags = {"decoder_update_rule": rule, "sum_normalization": normalized, "decoder_layers": 1}
    model, tokens = build_model("fwp_lm", attention_bias=True, **flags), random_tokens(2, 7)
    expected = log_probs(model, tokens)
    torch.testing.assert_close(incremental(model, tokens), expected)
    attention = model.decoder.layers[0].self_attn
    biases = {name for name, _ in attention.named_parameters() if "bias" in name and "norm" not in name}
    gates = UPDATE_RULES[rule].gates if rule != "softmax" else ()
    learned = {f"gate_activations.{gate.name}.bias" for gate in gates if gate.learned}
    given = {f"gate_biases.{gate.name}" for gate in gates}
    assert biases == {"in_proj.bias" if rule == "softmax" else "bias", "out_proj.bias"} | learned | given
    for name in biases:  # each of them has an effect; a bias of keys has none in softmax
        parameter = attention.get_parameter(name)
        change = torch.randn_like(parameter)
        with torch.no_grad():
            parameter += change
        assert (log_probs(model, tokens) - expected).abs().max() > 1e-3
        with torch.no_grad():
            parameter -= change
    plain = build_model("fwp_lm", **flags).decoder.layers[0].self_attn
    assert {name for name, _ in plain.named_parameters() if "bias" in name} == learned | {
        f"gate_biases.{gate.name}" for gate in gates if gate.bias
    }


def test_new_biases_start_at_zero(build_model):
    """Gates to which the rule gives no bias start as without biases."""
    attention = build_model("fwp_lm", decoder_update_rule="gated", attention_bias=True).decoder.layers[0].self_attn
    attention.__init__(16, 4, attention.feature_map, "gated", bias=True)
    assert attention.bias.eq(0).all() and attention.gate_biases["gate"].eq(0).all()


def test_learned_positions(build_model):
    model = build_model("softmax_lm_wt103", decoder_learned_pos=True, tokens_per_sample=7)
    tokens = random_tokens(2, 7)
    whole = log_probs(model, tokens)
    torch.testing.assert_close(incremental(model, tokens), whole)
    assert model.max_decoder_positions() == 7 and build_model("softmax_lm_wt103").max_decoder_positions() > 7
    table = model.decoder.embed_positions.table.weight
    with torch.no_grad():
        table[4] += 1
    differs = (log_probs(model, tokens) != whole).any(-1)
    assert not differs[:, :4].any() and differs[:, 4:].all()
    with pytest.raises(ValueError, match=r"must have at most 7 tokens, .*, got 8"):
        model(random_tokens(2, 8))
    with pytest.raises(ValueError, match="must be off with --decoder-learned-pos"):
        build_model("softmax_lm_wt103", decoder_learned_pos=True, positions_from_end=True)


@looped("div_val", [1, 2])
@looped("cutoffs", [None, "10,30"])
def test_an_output_layer_without_biases(build_model, cutoffs, div_val):
    model = build_model("sum_lm_wt103", output_layer="tied", adaptive_softmax_cutoff=cutoffs, div_val=div_val)
    scores = log_probs(model, random_tokens(2, 7))
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(2, 7, dtype=torch.float64))
    softmax = model.decoder.adaptive_softmax
    assert not [name for name, _ in softmax.named_parameters() if name.endswith("bias")]
    softmax.bias[5] = -torch.inf
    assert log_probs(model, random_tokens(2, 7))[..., 5].eq(-torch.inf).all()
    assert "decoder.adaptive_softmax.bias" in model.state_dict()
    with_biases = build_model("sum_lm_wt103", adaptive_softmax_cutoff=cutoffs, div_val=div_val)
    count = [sum(x.numel() for x in made.parameters()) for made in (model, with_biases)]
    clusters = 2 if cutoffs else 0
    assert count[1] - count[0] == 50 + clusters + (16 * 16 if div_val == 2 else 0)  # and the projection of the head


def test_an_output_layer_of_its_own(build_model):
    model, tokens = build_model("sum_lm_wt103", output_layer="untied", adaptive_softmax_cutoff=""), random_tokens(2, 7)
    features = model(tokens)[0]
    expected = (features @ model.decoder.adaptive_softmax.words.weight.T).log_softmax(-1)
    torch.testing.assert_close(log_probs(model, tokens), expected)
    for flags in ({"adaptive_softmax_cutoff": "10,30"}, {"adaptive_softmax_cutoff": "", "div_val": 2}):
        with pytest.raises(ValueError, match=r"--output-layer untied must be left out with .*: choose biased or tied"):
            build_model("sum_lm_wt103", output_layer="untied", **flags)


@looped("div_val", [1, 2])
def test_dropout_of_the_adaptive_softmax(build_model, div_val):
    flags = {"output_layer": "tied", "adaptive_softmax_cutoff": "10,30", "dropout": 0.0, "div_val": div_val}
    model = build_model("sum_lm_wt103", adaptive_softmax_dropout=0.5, **flags)
    tokens = random_tokens(2, 7)
    features, softmax = model(tokens)[0], model.decoder.adaptive_softmax
    first, second = (softmax(features, tokens)[0] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True) if one is not None)
    model.train()
    first, second = (softmax(features, tokens)[0] for _ in range(2))
    assert not torch.equal(first[0], second[0])
    assert softmax.get_log_prob(features, None).shape == (2, 7, 50)
