"""The language model: its equations, where its flags arrive, and what it keeps. Its laws are in models/test_laws.py."""

import copy
from argparse import Namespace

import pytest
import torch
from omegaconf import OmegaConf
from support.pairwise import looped
from support.small_models import (
    SMALL,
    build,
    build_model,
    by_steps,
    configure,
    log_probs,
    make_dictionary,
    random_tokens,
)

from fairseq_fwp.models.decoder import initialize
from fairseq_fwp.models.fwp_lm import FwpLanguageModel
from fairseq_fwp.modules.attention import DeltaRnn, FastWeightAttention, SoftmaxAttention
from fairseq_fwp.modules.attention.base import Marks
from fairseq_fwp.modules.positions import VaswaniPositions, sinusoids
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.patches.options import plain

FAVOR = {"decoder_feature_map": "favor"}
ATTENTION = {"attention_normalization": True}
# Others are in test_trained_model.py, as they change scores.
REACHED = [
    ({"decoder_key_dim": 5}, "key_dim", 5),
    ({"sum_normalization": True}, "key_normalizations.0.epsilon", 1e-6),
    ({"sum_normalization": True, "normalization_epsilon": 0.5}, "key_normalizations.0.epsilon", 0.5),
    ({"sum_normalization": True, "sum_normalization_epsilon": 0.25}, "key_normalizations.0.epsilon", 0.25),
    ({"sum_normalization": True, "add_normalization_epsilon": True}, "key_normalizations.0.add_epsilon", True),
    ({**ATTENTION, "normalization_epsilon": 0.5}, "memory.normalization.epsilon", 0.5),
    ({**ATTENTION, "sum_normalization_epsilon": 0.5}, "memory.normalization.epsilon", 1e-6),
    ({"scale_read_out": True}, "read_out_scale", 0.5),
    ({"norm_read_out": True}, "read_out_norm.normalized_shape", (4,)),
    ({"fwp_backend": "kernel"}, "memory.backend", "kernel"),
    ({**FAVOR, "favor_features": 3, "decoder_key_dim": 5}, "feature_map.projection.shape", (3, 5)),
    ({**FAVOR, "favor_offset": 0.125}, "feature_map.offset", 0.125),
    ({**FAVOR, "favor_redraw": 7}, "feature_map.redraw", 7),
    ({**FAVOR, "favor_softmax_scale": True, "decoder_key_dim": 16}, "feature_map.scale", 0.5),
    ({**FAVOR, "favor_relu": True, "decoder_key_dim": 5}, "feature_map.feature_dim", 5),
    ({"decoder_feature_map": "relu", "relu_features": 7}, "feature_map.feature_dim", 7),
]


@looped(("flags", "attribute", "value"), REACHED)
def test_flags_reach_the_layer(flags, attribute, value):
    found = build_model("fwp_lm", **flags).decoder.layers[0].self_attn
    for name in attribute.split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    assert found == value


def test_options_of_checkpoints():
    """Those that an earlier version did not have get their defaults. A number in --model-overrides is a layer."""
    config = plain(configure("fwp_lm", **SMALL)) | {"softmax_layers": 1}
    for name in ("decoder_key_dim", "norm_read_out", "favor_draw"):
        del config[name]
    config = OmegaConf.create(config)
    OmegaConf.set_struct(config, True)
    model = FwpLanguageModel.build_model(config, Namespace(target_dictionary=make_dictionary(50)))
    assert model.decoder.layers[0].self_attn.read_out_norm is None and "norm_read_out" not in config
    assert isinstance(model.decoder.layers[1].self_attn, SoftmaxAttention)


# Positions.


def test_positions_go_on_beyond_the_table():
    """fairseq's table starts with 1,024 rows; decoding goes beyond it as one forward pass does."""
    model, tokens = build_model("sum_lm_wt103", decoder_layers=1, max_target_positions=2000), random_tokens(1, 1030)
    expected = log_probs(copy.deepcopy(model), tokens)
    torch.testing.assert_close(by_steps(model, tokens, [1020, *[1] * 10]), expected)
    rotated = model.decoder.embed_positions(torch.tensor([[1500, 3]]))
    assert not torch.allclose(rotated[0, 0], rotated[0, 1])


def test_positions_from_the_end_of_a_sample():
    """Schlag et al. 2021's public code: the last token has position zero, and padding is not counted."""
    positions = VaswaniPositions(4, 6)
    expected = torch.tensor([[[3, 0.03, 3, 0.03], [0, 0, 1, 1]]], dtype=torch.float64)
    expected[0, 0] = torch.cat([expected[0, 0, :2].sin(), expected[0, 0, 2:].cos()])
    torch.testing.assert_close(positions(torch.tensor([[0, 3]])), expected)
    torch.testing.assert_close(positions(torch.tensor([[2, 5, 8]]), decoding=True), expected[:, [0, 1, 0]])
    model, seen = build_model("delta_lm_wt103", positions_from_end=True, tokens_per_sample=6), []
    model.decoder.embed_positions.register_forward_hook(lambda module, args, rows: seen.append(rows))
    model(random_tokens(2, 4))
    padded = random_tokens(2, 5)
    padded[0, 3:] = padded[1, :1] = model.decoder.padding_idx
    model(padded)
    expected = sinusoids(torch.arange(3, -1, -1, dtype=torch.float64), seen[0].shape[2])
    assert all(torch.equal(row, expected) for row in (*seen[0], seen[1][1, 1:]))
    assert torch.equal(seen[1][0, :3], expected[1:])


def test_learned_positions_are_added_and_end():
    model = build_model("softmax_lm_wt103", decoder_learned_pos=True, tokens_per_sample=7)
    tokens = random_tokens(2, 7)
    whole = log_probs(model, tokens)
    assert model.max_decoder_positions() == 7 and build_model("softmax_lm_wt103").max_decoder_positions() > 7
    with torch.no_grad():
        model.decoder.embed_positions.table.weight[4] += 1
    differs = (log_probs(model, tokens) != whole).any(-1)
    assert not differs[:, :4].any() and differs[:, 4:].all()
    with pytest.raises(ValueError, match=r"must have at most 7 tokens, .*, got 8"):
        model(random_tokens(2, 8))


def test_no_normalisation_after_the_last_block():
    flags = {"decoder_normalize_before": True}
    model, bare = build_model("sum_lm_wt103", **flags), build_model("sum_lm_wt103", **flags, no_decoder_final_norm=True)
    bare.load_state_dict({key: value for key, value in model.state_dict().items() if "decoder.layer_norm" not in key})
    tokens = random_tokens(2, 5)
    torch.testing.assert_close(model.decoder.layer_norm(bare(tokens)[0]), model(tokens)[0])


# Biases and initial weights.


@looped("rule", ["softmax", *UPDATE_RULES])
def test_biases_of_the_attention(rule):
    flags = {"decoder_update_rule": rule, "sum_normalization": rule in ("delta", "fwm"), "decoder_layers": 1}
    model, tokens = build_model("fwp_lm", attention_bias=True, **flags), random_tokens(2, 7)
    expected = log_probs(model, tokens)
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
    bare = build_model("fwp_lm", **flags).decoder.layers[0].self_attn
    assert {name for name, _ in bare.named_parameters() if "bias" in name} == learned | {
        f"gate_biases.{gate.name}" for gate in gates if gate.bias
    }


def test_new_biases_start_at_zero():
    """Gates to which the rule gives no bias start as without biases."""
    attention = build_model("fwp_lm", decoder_update_rule="gated", attention_bias=True).decoder.layers[0].self_attn
    attention.__init__(16, 4, attention.feature_map, "gated", bias=True)
    assert attention.bias.eq(0).all() and attention.gate_biases["gate"].eq(0).all()


def test_initialisation_is_the_documented_one():
    """A new model has it; `initialize` draws it again; learned maps keep their own."""
    task, flags = Namespace(target_dictionary=make_dictionary(2000)), {**SMALL, "decoder_embed_dim": 64}
    model = FwpLanguageModel.build_model(configure("delta_lm_wt103", **flags), task)
    for _ in range(2):
        assert model.decoder.embed_tokens.weight[2:].std().item() == pytest.approx(0.02, rel=0.05)
        assert model.decoder.embed_tokens.weight[model.decoder.padding_idx].abs().max() == 0
        for layer in model.decoder.layers:
            for linear in (layer.fc1, layer.fc2, layer.self_attn.in_proj, layer.self_attn.out_proj):
                assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
            assert layer.fc1.bias.abs().max() == 0
            assert layer.final_layer_norm.weight.mean().item() == pytest.approx(1, abs=0.02)
            assert 0.01 < layer.final_layer_norm.weight.std().item() < 0.03
        for parameter in model.parameters():
            torch.nn.init.uniform_(parameter)
        model.apply(initialize)
    model = build_model("sum_lm_wt103", decoder_feature_map="relu").float()
    model.apply(initialize)
    assert model.decoder.layers[0].self_attn.feature_map.linear.weight.std() > 0.1  # not N(0, 0.02)


# The output layer.


@looped("cutoffs", [None, "10,30"])
def test_temperature_divides_the_scores_of_words(cutoffs):
    model = build_model("delta_lm_wt103", adaptive_softmax_cutoff=cutoffs)
    tokens = random_tokens(2, 5)
    scores, extra = model(tokens, incremental_state={})
    tempered = model.get_normalized_probs((scores / 0.5, extra), log_probs=True)
    torch.testing.assert_close(tempered, (log_probs(model, tokens) / 0.5).log_softmax(-1))


def test_cutoffs_beyond_the_vocabulary_are_dropped_with_one_line(caplog):
    for cutoffs, kept in (("", []), ("20, 30", [20, 30]), ("20,50", [20]), ("20,51", [20])):
        assert build_model("fwp_lm", adaptive_softmax_cutoff=cutoffs).decoder.adaptive_softmax.bounds == [0, *kept, 50]
    caplog.clear()  # where fairseq has set the level before
    with caplog.at_level("INFO"):
        model = build_model("delta_lm_wt103", vocabulary=25_000)
    assert model.decoder.adaptive_softmax.bounds == [0, 20_000, 25_000]
    lines = [record.message for record in caplog.records if "dropped" in record.message]
    assert lines == ["adaptive softmax: dropped cutoffs 40000,200000, beyond the vocabulary of 25000 words"]


@looped("div_val", [1, 2])
@looped("cutoffs", [None, "10,30"])
def test_an_output_layer_without_biases(cutoffs, div_val):
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


def test_an_output_layer_of_its_own():
    model, tokens = build_model("sum_lm_wt103", output_layer="untied", adaptive_softmax_cutoff=""), random_tokens(2, 7)
    expected = (model(tokens)[0] @ model.decoder.adaptive_softmax.words.weight.T).log_softmax(-1)
    torch.testing.assert_close(log_probs(model, tokens), expected)


# Hybrids: some layers have softmax and the others fast weights.


@looped("shared", [{}, {"attention_window": 3, "attention_bias": True, "decoder_normalize_before": True}])
@looped("rule", ["delta", "delta_rnn"])
def test_a_hybrid_is_put_together_of_layers_of_two_models(shared, rule):
    """Layers 0 and 2 are as in a softmax model, 1 and 3 as in one with fast weights."""
    shared = {**shared, "decoder_layers": 4}
    softmax = build_model("fwp_lm", **shared, decoder_update_rule="softmax")
    fast = build_model("fwp_lm", **shared, decoder_update_rule=rule, sum_normalization=True)
    hybrid = build_model("fwp_lm", **shared, decoder_update_rule=rule, sum_normalization=True, softmax_layers="0,2")
    kinds = [type(layer.self_attn) for layer in hybrid.decoder.layers]
    assert kinds == [SoftmaxAttention, FastWeightAttention if rule == "delta" else DeltaRnn] * 2
    assert {hybrid.decoder.layers[index].self_attn.memory.window for index in (0, 2)} == {
        shared.get("attention_window")
    }
    sources, calls = [(fast if index % 2 else softmax).decoder.layers[index] for index in range(4)], []
    for layer, source in zip(hybrid.decoder.layers, sources, strict=True):
        layer.load_state_dict(source.state_dict())
        layer.register_forward_hook(lambda layer, given, out: calls.append((given[0], out[0])))
    tokens = random_tokens(2, 9)
    tokens[1, :3] = hybrid.decoder.padding_idx
    hybrid(tokens)
    x = calls[0][0]
    for source, (_given, out) in zip(sources, calls, strict=True):
        x, _state = source(x, None, Marks(tokens.eq(hybrid.decoder.padding_idx)))
        assert torch.equal(x, out)


def test_values_are_shared_from_the_first_layer_of_rwkv7():
    """Below it may be softmax; without that layer's values a later one would use its own."""
    model = build("RWKV-7", softmax_layers="0", decoder_layers=4)
    first, *others = (layer.self_attn for layer in model.decoder.layers[1:])
    assert first.value is None and all(other.value is not None for other in others)
    tokens = random_tokens(1, 4)
    before = log_probs(model, tokens)
    with torch.no_grad():
        others[-1].value[2].bias.fill_(-torch.inf)  # mixes nothing
    assert not torch.allclose(log_probs(model, tokens), before)
