"""Laws of hybrids: language models in which some layers have softmax and the others fast weights."""

import re
from argparse import Namespace

import pytest
import torch
from omegaconf import OmegaConf
from pairwise import looped

from fairseq_fwp.models.fwp_lm import FwpLanguageModel, FwpLanguageModelConfig
from fairseq_fwp.modules.attention import DeltaRnn, FastWeightAttention, LocalAttention, SoftmaxAttention
from fairseq_fwp.options import plain
from fairseq_fwp.patches.checkpoints import Saved

from .conftest import SMALL, configure, log_probs, make_dictionary, random_tokens
from .stream_laws import check_beam_search, check_decoding, check_padding, check_rows_of_states

HYBRIDS = {
    "the last": {"softmax_layers": "1", "sum_normalization": True},
    "the first": {"softmax_layers": "0", "decoder_update_rule": "gated_delta", "sum_normalization": True},
    "local": {"softmax_layers": "1", "attention_window": 3, "attention_normalization": True},
    "beside recurrence": {"softmax_layers": "0", "decoder_update_rule": "delta_rnn", "sum_normalization": True},
    "without positions": {"softmax_layers": "1", "sum_normalization": True, "no_token_positional_embeddings": True},
}


@pytest.fixture(params=HYBRIDS)
def model(request, build_model):
    return build_model("fwp_lm", **HYBRIDS[request.param])


def read_layers(model, tokens):
    """Return input and output of each layer."""
    calls = []
    hooks = [
        layer.register_forward_hook(lambda _, given, out: calls.append((given[0], out[0])))
        for layer in model.decoder.layers
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return calls


@looped("shared", [{}, {"attention_window": 3, "attention_bias": True, "decoder_normalize_before": True}])
@looped("rule", ["delta", "delta_rnn"])
def test_it_is_put_together_of_layers_of_two_models(build_model, shared, rule):
    """Layers 0 and 2 are as in a softmax model, 1 and 3 as in one with fast weights."""
    shared = {**shared, "decoder_layers": 4}
    softmax = build_model("fwp_lm", **shared, decoder_update_rule="softmax")
    fast = build_model("fwp_lm", **shared, decoder_update_rule=rule, sum_normalization=True)
    hybrid = build_model("fwp_lm", **shared, decoder_update_rule=rule, sum_normalization=True, softmax_layers="0,2")
    kinds = [type(layer.self_attn) for layer in hybrid.decoder.layers]
    of_softmax = LocalAttention if "attention_window" in shared else SoftmaxAttention
    assert kinds == [of_softmax, FastWeightAttention if rule == "delta" else DeltaRnn] * 2
    sources = [(fast if index % 2 else softmax).decoder.layers[index] for index in range(4)]
    for layer, source in zip(hybrid.decoder.layers, sources, strict=True):
        layer.load_state_dict(source.state_dict())
    tokens = random_tokens(2, 9)
    tokens[1, :3] = hybrid.decoder.padding_idx
    calls = read_layers(hybrid, tokens)
    x = calls[0][0]
    for source, (_given, out) in zip(sources, calls, strict=True):
        x, _state = source(x, None, tokens.eq(hybrid.decoder.padding_idx))
        assert torch.equal(x, out)


@looped("carried", [False, True])
def test_decoding_is_reading_the_whole(model, carried):
    check_decoding(model, [1, 1, 5, 1, 2], carried)


def test_prompts_of_different_lengths_and_beams(model):
    check_beam_search(model, beam=3)


def test_padding_changes_no_score(model):
    check_padding(model)


def test_rows_of_the_state_are_reordered_and_reset(model):
    check_rows_of_states(model)


def test_the_state_is_the_sum_of_those_of_its_layers(build_model):
    """For 9 tokens softmax has 2 D numbers a token, at most those of a window, and fast weights H Dk Dv."""
    model = build_model("fwp_lm", softmax_layers="1")
    _, extra = model(random_tokens(1, 9))
    fast, softmax = extra["state"].layers
    assert model.decoder.state_size(9) == fast.weights.numel() + softmax.keys.numel() + softmax.values.numel()
    assert model.decoder.state_size(9) == 4 * 4 * 4 + 2 * 9 * 16
    local = build_model("fwp_lm", softmax_layers="1", attention_window=3)
    assert local.decoder.state_size(9) == local.decoder.state_size(9, carried=True) == 4 * 4 * 4 + 2 * 3 * 16


def test_its_state_has_a_bound_and_takes_documents_where_that_of_every_layer_does(build_model):
    def promises(**flags):
        decoder = build_model("fwp_lm", **flags).decoder
        return decoder.carries_state, decoder.packs_documents

    assert promises() == (True, True)
    assert promises(softmax_layers="1") == promises(softmax_layers="0,1") == (False, False)
    assert promises(softmax_layers="1", attention_window=3) == (True, False)


@looped("layers", ["", "2", "-1", "0,0", "1,0", "0,", "0, 1", "00", "first", "0-1"])
def test_what_are_no_layers_is_refused(build_model, layers):
    sentence = "--softmax-layers must be ascending numbers from 0 to 1, separated by commas, got "
    with pytest.raises(ValueError, match=f"^{re.escape(sentence + repr(layers))}$"):
        build_model("fwp_lm", softmax_layers=layers)


@looped("window", [None, 3])
def test_a_model_of_softmax_has_no_layers_of_it(build_model, window):
    with pytest.raises(
        ValueError, match=r"^--softmax-layers must be left out with --decoder-update-rule softmax, got "
    ):
        build_model("softmax_lm_wt103", softmax_layers="1", attention_window=window)


@looped(
    ("flags", "unused"),
    [
        ({"softmax_layers": "1", "attention_window": 3, "attention_dropout": 0.5, "sum_normalization": True}, []),
        ({"softmax_layers": "0", "dpfp_nu": 2}, ["dpfp_nu"]),
        (
            {"decoder_layers": 2, "softmax_layers": "0,1", "sum_normalization": True, "attention_dropout": 0.5},
            ["sum_normalization"],
        ),
    ],
)
def test_options_are_used_that_any_layer_looks_at(flags, unused):
    assert FwpLanguageModel.unused_flags(FwpLanguageModelConfig(**flags)) == unused


def test_dropout_of_attention_weights_is_that_of_the_layers_of_softmax(build_model):
    model = build_model("fwp_lm", softmax_layers="1", dropout=0.0, attention_dropout=0.5).train()
    first, second = (read_layers(model, tokens) for tokens in [random_tokens(2, 9)] * 2)
    assert torch.equal(first[0][1], second[0][1]) and not torch.allclose(first[1][1], second[1][1])


def test_a_checkpoint_of_other_layers_is_named(build_model):
    weights = build_model("fwp_lm").state_dict()
    weights.saved = Saved("some.pt", plain(configure("fwp_lm", **SMALL)), overridden=False)
    given = {**SMALL, "softmax_layers": "1"}
    sentence = (
        "some.pt holds a model with no --softmax-layers, but this model has --softmax-layers 1, which its weights"
    )
    with pytest.raises(ValueError, match=f"^{sentence}"):
        build_model("fwp_lm", **given).load_state_dict(weights, model_cfg=configure("fwp_lm", **given))


def test_a_number_in_model_overrides_is_a_layer():
    """Options of a checkpoint may have another type."""
    config = OmegaConf.create(plain(configure("fwp_lm", **SMALL)) | {"softmax_layers": 1})
    model = FwpLanguageModel.build_model(config, Namespace(target_dictionary=make_dictionary(50)))
    assert isinstance(model.decoder.layers[1].self_attn, SoftmaxAttention)


def test_gradients_reach_every_layer(build_model):
    model = build_model("fwp_lm", softmax_layers="1").train()
    log_probs(model, random_tokens(2, 9))[..., 5].sum().backward()
    assert all(parameter.grad.any() for parameter in model.decoder.layers.parameters())
