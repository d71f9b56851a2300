"""Language models with a fast weight layer: what it learns, fine-tuning, variants; laws are in models/test_laws.py."""

import copy
import logging
import math
from argparse import Namespace

import pytest
import torch
from support.pairwise import looped
from support.small_models import (
    FAST_WEIGHT_LAYERS,
    LOCAL,
    MODELS,
    SMALL,
    XL,
    build,
    build_model,
    by_segments,
    configure,
    log_probs,
    make_dictionary,
    numbers_in,
    random_tokens,
)

from fairseq_fwp.models.decoder import initialize
from fairseq_fwp.models.fast_weight_layer import GRADIENTS_AT
from fairseq_fwp.models.fast_weight_layer.layer import PACE, STEP_SIZE
from fairseq_fwp.models.fast_weight_layer.model import FwpFwlLanguageModel


def build_layer(kind, **flags):
    return build(f"layer on {kind}", dropout=0.0, **flags)


@looped("kind", FAST_WEIGHT_LAYERS)
def test_reading_teaches(kind):
    """The layer learns: with steps of zero, scores differ after the first token."""
    model, tokens = build(kind), random_tokens(2, 8)
    scores, _ = by_segments(model, tokens)
    layer = model.decoder.fast_weight_layer
    layer.log_step_sizes, layer.fixed_step_size = None, 0.0
    slow, _ = by_segments(model, tokens)
    torch.testing.assert_close(scores[:, 0], slow[:, 0])
    if kind.endswith("none"):
        assert torch.equal(scores, slow)
    else:
        assert (scores[:, 1:] - slow[:, 1:]).abs().amax((0, 2)).min() > 1e-6


def assert_all_equal(model, weights, but=()):
    """Compare all weights of a model of this name, except some that must differ."""
    found = model.state_dict()
    for name, value in weights.items():
        assert torch.equal(found[name], value) != name.startswith(but or "none"), name


def copied(weights):
    return {name: value.clone() for name, value in weights.items()}


@looped("base", ["fwp_lm", "fwp_xl_lm"])
@looped("norms", [{}, {"decoder_normalize_before": True}])
@looped("mapped", [False, True])
def test_fine_tuning_starts_from_a_model_without_the_layer(base, norms, mapped):
    """As with --finetune-from-model, a new layer changes nothing, up to the epsilon of normalisations."""
    flags = {"fwl_base": base, "fwl_fast_weights": "none", "fwl_map_inputs": mapped, **norms}
    below, above = build_model(base, **norms), build_model("fwp_fwl_lm", **flags)
    above.decoder.fast_weight_layer.apply(initialize)
    weights, tokens = below.state_dict(), random_tokens(2, 7)
    last = "layer_norm" if norms else "layers.1.final_layer_norm"
    for part in ("weight", "bias"):
        weights[f"decoder.{last}.{part}"].normal_(1, 0.3)
    above.load_state_dict(copied(weights), strict=True)
    torch.testing.assert_close(log_probs(above, tokens), log_probs(below, tokens), rtol=1e-4, atol=1e-4)
    assert_all_equal(above, weights, but=f"decoder.{last}")
    damaged = above.state_dict()
    del damaged["decoder.fast_weight_layer.first.bias"]
    with pytest.raises(RuntimeError, match=r"first\.bias"):
        above.load_state_dict(damaged, strict=True)


def test_a_base_keeps_its_weights_where_the_layer_starts_at_random_or_it_has_no_last_normalisation():
    norms = {"decoder_normalize_before": True, "no_decoder_final_norm": True}
    for base, shared, flags in (("fwp_xl_lm", {}, {"fwl_random_start": True}), ("fwp_lm", norms, {})):
        below, above = build_model(base, **shared), build_model("fwp_fwl_lm", fwl_base=base, **shared, **flags)
        weights = below.state_dict()
        for name in weights:
            if "final_layer_norm" in name:
                weights[name].normal_(1, 0.3)
        above.load_state_dict(copied(weights), strict=True)
        assert_all_equal(above, weights)


def test_fine_tuning_makes_the_weights_of_a_layer_fast():
    """All weights of a layer without fast weights are used; only steps and decays may be missing."""
    slow, fast = build_layer("local, none"), build_layer("local")
    start = {name: getattr(fast.decoder.fast_weight_layer, name).clone() for name in ("log_step_sizes", "decay_logits")}
    fast.load_state_dict(slow.state_dict(), strict=True)
    assert_all_equal(fast, slow.state_dict())
    assert_all_equal(fast.decoder.fast_weight_layer, start)
    damaged = slow.state_dict()
    del damaged["decoder.fast_weight_layer.norm.bias"]
    with pytest.raises(RuntimeError, match=r"norm\.bias"):
        fast.load_state_dict(damaged, strict=True)


def test_learned_steps_are_left_out_where_there_are_none_to_learn(caplog):
    """A layer that no longer learns, or learns with one step size for all weights, drops its step sizes."""
    trained, tokens = build_layer("local"), random_tokens(2, 12)
    trained.decoder.fast_weight_layer.log_step_sizes.data.fill_(math.log(0.05 / STEP_SIZE) / PACE)
    trained.decoder.fast_weight_layer.decay_logits.data.zero_()
    slow, fixed = build_layer("local, none"), build_layer("local", fwl_step_size=0.05, fwl_decay=0.5)
    with caplog.at_level(logging.INFO):
        for model in (slow, fixed):
            model.load_state_dict(trained.state_dict(), strict=True)
    assert caplog.text.count("log_step_sizes is dropped") == caplog.text.count("decay_logits is dropped") == 2
    torch.testing.assert_close(by_segments(fixed, tokens)[0], by_segments(trained, tokens)[0])
    trained.decoder.fast_weight_layer.log_step_sizes.data.fill_(-1e9)
    torch.testing.assert_close(log_probs(slow, tokens), log_probs(trained, tokens))
    fixed.load_state_dict(slow.state_dict(), strict=True)  # one trained without fast weights takes them on
    assert not torch.allclose(log_probs(slow, tokens), log_probs(fixed, tokens))


@looped("carry", [False, True])
@looped("gradients_at", GRADIENTS_AT)
def test_gradients_at_carried_weights_ask_for_a_state(carry, gradients_at, caplog):
    caplog.clear()
    task = Namespace(target_dictionary=make_dictionary(50), args=Namespace(carry_state=carry))
    flags = {**SMALL, **LOCAL, "fwl_gradients_at": gradients_at}
    FwpFwlLanguageModel.build_model(configure("fwp_fwl_lm", **flags), task)
    assert ("--fwl-gradients-at carried has no effect" in caplog.text) == (gradients_at == "carried" and not carry)


def test_dropout_leaves_the_keys_of_the_layer_as_they_are():
    flags = {"mem_len": 6, "dropout": 0.5}
    below, above = (build_model(arch, **{**more, **flags}) for arch, more in (("fwp_xl_lm", {}), ("fwp_fwl_lm", XL)))
    read, tokens = [], random_tokens(2, 7)
    above.decoder.fast_weight_layer.register_forward_pre_hook(lambda layer, inputs: read.append(inputs[0]))
    above.train()(tokens)
    assert below.train()(tokens)[0].eq(0).any() and not read[0].eq(0).any()


@looped(("kind", "below"), [("Transformer-XL", "FwpXlDecoder"), ("local", "FwpDecoder")])
def test_dropout_can_be_retained_by_the_name_of_the_decoder_below(kind, below):
    dropout = build_layer(kind).decoder.dropout
    for asked, names, retained in ((True, [below], True), (True, ["DecoderLayer"], False), (False, None, False)):
        dropout.make_generation_fast_(retain_dropout=asked, retain_dropout_modules=names)
        assert dropout.retained == retained


def test_half_of_the_loss_below_it():
    target, model = random_tokens(2, 4), build_layer("Transformer-XL", half_loss=True).train()
    assert model.get_targets({"target": target}, None)[:, :2].eq(model.decoder.padding_idx).all()
    assert torch.equal(build_layer("local").train().get_targets({"target": target}, None), target)


@looped("kind", FAST_WEIGHT_LAYERS)
def test_the_state_is_counted(kind):
    """It is the number of elements in the state after a segment and a carried one."""
    model = build(kind)
    layer = model.decoder.fast_weight_layer
    _, state = by_segments(model, random_tokens(1, 8))
    assert numbers_in(state.layers[-1]) == layer.state_size(4, carried=True)
    below = type(model.decoder).__bases__[1].state_size(model.decoder, 4, True)
    assert model.decoder.state_size(4, True) == layer.state_size(4, True) + below
    _, state = by_segments(model, random_tokens(1, 4))
    assert numbers_in(state.layers[-1]) == layer.state_size(4)


@looped(("kind", "backend"), [("layer on delta", {"fwp_backend": "auto"}), ("layer on projected", {})])
def test_it_is_a_layer_on_any_decoder(kind, backend):
    """The features are those of the base, and a checkpoint has the base's names, before those of the layer."""
    model, tokens = build(kind), random_tokens(2, 4)
    decoder, flags = model.decoder, {"tokens_per_sample": 4, **MODELS[kind][1], **backend}
    below = build_model(flags.pop("fwl_base", "fwp_lm"), **flags)
    below.load_state_dict({key: value for key, value in model.state_dict().items() if "fast_weight_layer" not in key})
    features, _ = below.decoder.extract_features(tokens)
    expected, _ = decoder.fast_weight_layer(features, tokens, decoder.adaptive_softmax)
    assert torch.equal(decoder.extract_features(tokens)[0], expected)
    layer = [f"decoder.fast_weight_layer.{name}" for name in decoder.fast_weight_layer.state_dict()]
    assert list(model.state_dict()) == [*below.state_dict(), *layer]
    assert [name for name, _ in model.named_parameters()][: -len(layer)] == [
        name for name, _ in below.named_parameters()
    ]
    other = copy.deepcopy(build(kind))
    assert other.load_state_dict(model.state_dict(), strict=True).unexpected_keys == []
    assert torch.equal(other(tokens)[0], model(tokens)[0])
