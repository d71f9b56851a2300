"""Laws of the language models with a fast weight layer: streams, decoding, fine-tuning, and the variants."""

import copy
import io
import logging
import math
from argparse import Namespace

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from models.conftest import SMALL, configure, log_probs, make_dictionary, random_tokens
from models.stream_laws import by_segments, check_beam_search, check_decoding, check_padding, check_rows_of_states
from pairwise import looped

from fairseq_fwp.fast_weight_layer import GRADIENTS_AT
from fairseq_fwp.fast_weight_layer.layer import PACE, STEP_SIZE
from fairseq_fwp.fast_weight_layer.model import BASES, FwpFwlLanguageModel, FwpFwlLanguageModelConfig
from fairseq_fwp.models.decoder import initialize
from fairseq_fwp.models.presets import FWL_PRESETS
from fairseq_fwp.options import plain

XL = {"fwl_base": "fwp_xl_lm", "mem_len": 6}
LOCAL = {"decoder_update_rule": "softmax", "attention_window": 3}
KINDS = {
    "local": LOCAL,
    "Transformer-XL": XL,
    "softmax": {"decoder_update_rule": "softmax"},
    "delta": {"sum_normalization": True, "no_token_positional_embeddings": True},
    "hybrid": {"softmax_layers": "1", "sum_normalization": True},
    "adaptive": {**LOCAL, "adaptive_softmax_cutoff": "10,30"},
    "projected": {**XL, "div_val": 2, "adaptive_softmax_cutoff": "10,30"},
    "first": {**LOCAL, "fwl_fast_weights": "first"},
    "second": {**XL, "fwl_fast_weights": "second"},
    "softmax bias": {**LOCAL, "fwl_fast_weights": "softmax-bias", "adaptive_softmax_cutoff": "10,30"},
    "test-time only": {**XL, "fwl_step_size": 0.05, "fwl_decay": 1.0},
    "none": {**LOCAL, "fwl_fast_weights": "none"},
    "mapped": {**XL, "fwl_map_inputs": True},
    "carried": {**XL, "fwl_gradients_at": "carried"},
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def build(build_model):
    """A function build(kind, **flags) -> a model with segments of 4 tokens; small steps, as gradients are large."""

    def build(kind, **flags):
        model = build_model("fwp_fwl_lm", **{"tokens_per_sample": 4, "dropout": 0.0, **KINDS[kind], **flags})
        sizes = model.decoder.fast_weight_layer.log_step_sizes
        if sizes is not None:
            with torch.no_grad():
                sizes.copy_(torch.linspace(1, 5, len(sizes)).log() / PACE)
        return model

    return build


@looped("pieces", [[1] * 11, [6, 1, 4], [11]], ids=str)
@looped("carried", [False, True])
def test_decoding_is_reading_the_stream_in_segments(build, kind, pieces, carried):
    """Token by token it gives the same as in one pass."""
    check_decoding(build(kind), pieces, carried)


def test_reading_teaches(build, kind):
    """The layer learns: with steps of zero, scores differ after the first token."""
    model, tokens = build(kind), random_tokens(2, 8)
    scores, _ = by_segments(model, tokens, 4)
    layer = model.decoder.fast_weight_layer
    layer.log_step_sizes, layer.fixed_step_size = None, 0.0
    slow, _ = by_segments(model, tokens, 4)
    torch.testing.assert_close(scores[:, 0], slow[:, 0])
    if kind == "none":
        assert torch.equal(scores, slow)
    else:
        assert (scores[:, 1:] - slow[:, 1:]).abs().amax((0, 2)).min() > 1e-6


def test_gradients_at_carried_weights_are_others_after_a_segment(build):
    """They agree in the first segment and at the start of the second, which has learned only from the first."""
    (model, other), tokens = (build(kind) for kind in ("carried", "Transformer-XL")), random_tokens(2, 8)
    other.load_state_dict(model.state_dict())
    ours, theirs = (by_segments(either, tokens, 4)[0] for either in (model, other))
    torch.testing.assert_close(ours[:, :5], theirs[:, :5])
    assert (ours[:, 5:] - theirs[:, 5:]).abs().amax((0, 2)).min() > 1e-6


def test_the_past_does_not_depend_on_the_future(build, kind):
    model, tokens = build(kind, tokens_per_sample=9), random_tokens(2, 9)
    changed = tokens.clone()
    changed[:, 5:] ^= 1
    ours, theirs = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(ours[:, :5], theirs[:, :5], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(ours[:, 5:], theirs[:, 5:])


@looped("beam", [1, 3])
def test_beam_search_scores_equal_rescoring(build, kind, beam):
    """Each beam continues from its own learned weights, over several segments."""
    check_beam_search(build(kind), beam)


def test_padding_changes_no_score_here_or_later(build, kind):
    check_padding(build(kind))


def test_carried_states_are_reordered_and_reset(build, kind):
    model = build(kind)
    check_rows_of_states(model)
    assert model.decoder.carries_state == (kind not in ("softmax", "hybrid"))


@looped("last", [1, 3])
def test_features_of_the_last_tokens_alone(build, kind, last):
    model, tokens = build(kind), random_tokens(2, 4)
    decoder = model.decoder
    torch.testing.assert_close(
        decoder.extract_features(tokens, last=last)[0], decoder.extract_features(tokens)[0][:, -last:]
    )


def test_it_is_trained_saved_and_resumed_with_its_state(build, kind):
    """With fairseq's adaptive loss, the next losses are the same to the last bit; every parameter has a gradient."""

    def train(model, optimizer, state, segments):
        criterion, losses = AdaptiveLoss(Namespace(target_dictionary=model.decoder.dictionary), False), []
        for segment in segments:
            out = model(segment[:, :-1], state=state)
            state = out[1]["state"].detach()
            model.forward = lambda out=out, **kwargs: out
            loss, size, _ = criterion(model, {
                "net_input": {}, "target": segment[:, 1:].contiguous(), "ntokens": 8, "nsentences": 2,
            })  # fmt: skip
            del model.forward
            optimizer.zero_grad()
            (loss / size).backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, state

    model, segments = build(kind).train(), random_tokens(6, 2, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    _, state = train(model, optimizer, None, segments[:3])
    assert all(parameter.grad is not None for parameter in model.parameters())
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), state], file)
    expected, _ = train(model, optimizer, state, segments[3:])
    file.seek(0)
    weights, moments, state = torch.load(file, weights_only=True)
    resumed = build(kind).train()
    resumed.load_state_dict(weights)
    optimizer = torch.optim.Adam(resumed.parameters(), lr=1e-3)
    optimizer.load_state_dict(moments)
    assert train(resumed, optimizer, state, segments[3:])[0] == expected


@looped("base", ["fwp_lm", "fwp_xl_lm"])
@looped("norms", [{}, {"decoder_normalize_before": True}], ids=["post-norm", "pre-norm"])
@looped("mapped", [False, True])
def test_fine_tuning_starts_from_a_model_without_the_layer(build_model, base, norms, mapped):
    """As with --finetune-from-model, a new layer changes nothing, up to the epsilon of normalisations."""
    flags = {"fwl_base": base, "fwl_fast_weights": "none", "fwl_map_inputs": mapped, **norms}
    below, above = build_model(base, **norms), build_model("fwp_fwl_lm", **flags)
    above.decoder.fast_weight_layer.apply(initialize)
    weights, tokens = below.state_dict(), random_tokens(2, 7)
    last = "layer_norm" if norms else "layers.1.final_layer_norm"
    for part in ("weight", "bias"):
        weights[f"decoder.{last}.{part}"].normal_(1, 0.3)
    above.load_state_dict({name: value.clone() for name, value in weights.items()}, strict=True)
    torch.testing.assert_close(log_probs(above, tokens), log_probs(below, tokens), rtol=1e-4, atol=1e-4)
    for name, value in weights.items():
        assert torch.equal(above.state_dict()[name], value) != name.startswith(f"decoder.{last}")
    damaged = above.state_dict()
    del damaged["decoder.fast_weight_layer.first.bias"]
    with pytest.raises(RuntimeError, match=r"first\.bias"):
        above.load_state_dict(damaged, strict=True)


def test_a_layer_that_starts_at_random_leaves_the_model_below_as_it_is(build_model):
    below, above = build_model("fwp_xl_lm"), build_model("fwp_fwl_lm", fwl_base="fwp_xl_lm", fwl_random_start=True)
    weights = below.state_dict()
    weights["decoder.layers.1.final_layer_norm.weight"].normal_(1, 0.3)
    above.load_state_dict({name: value.clone() for name, value in weights.items()}, strict=True)
    assert all(torch.equal(above.state_dict()[name], value) for name, value in weights.items())


def test_a_base_without_a_last_normalisation_keeps_all_its_weights(build_model):
    norms = {"decoder_normalize_before": True, "no_decoder_final_norm": True}
    below, above = build_model("fwp_lm", **norms), build_model("fwp_fwl_lm", **norms)
    weights = below.state_dict()
    above.load_state_dict({name: value.clone() for name, value in weights.items()}, strict=True)
    assert all(torch.equal(above.state_dict()[name], value) for name, value in weights.items())


def test_fine_tuning_makes_the_weights_of_a_layer_fast(build):
    """All weights of a layer without fast weights are used; only steps and decays may be missing."""
    slow, fast = build("none"), build("local")
    start = {name: getattr(fast.decoder.fast_weight_layer, name).clone() for name in ("log_step_sizes", "decay_logits")}
    fast.load_state_dict(slow.state_dict(), strict=True)
    for name, value in slow.state_dict().items():
        assert torch.equal(fast.state_dict()[name], value)
    for name, value in start.items():
        assert torch.equal(getattr(fast.decoder.fast_weight_layer, name), value)
    damaged = slow.state_dict()
    del damaged["decoder.fast_weight_layer.norm.bias"]
    with pytest.raises(RuntimeError, match=r"norm\.bias"):
        fast.load_state_dict(damaged, strict=True)


def test_learned_steps_are_left_out_where_there_are_none_to_learn(build, caplog):
    """A layer that no longer learns, or learns with one step size for all weights, drops its step sizes."""
    trained, tokens = build("local"), random_tokens(2, 4)
    trained.decoder.fast_weight_layer.log_step_sizes.data.fill_(math.log(0.05 / STEP_SIZE) / PACE)
    slow, fixed = build("none"), build("local", fwl_step_size=0.05, fwl_decay=1.0)
    with caplog.at_level(logging.INFO):
        for model in (slow, fixed):
            model.load_state_dict(trained.state_dict(), strict=True)
    assert caplog.text.count("log_step_sizes is dropped") == caplog.text.count("decay_logits is dropped") == 2
    torch.testing.assert_close(log_probs(fixed, tokens), log_probs(trained, tokens))
    trained.decoder.fast_weight_layer.log_step_sizes.data.fill_(-1e9)
    torch.testing.assert_close(log_probs(slow, tokens), log_probs(trained, tokens))


@looped("base", BASES)
def test_a_base_fits_its_own_name_alone(base):
    other = next(name for name in BASES if name != base)
    saved = {**plain(configure(base, **SMALL)), "_name": base}

    def differences(**flags):
        given = plain(configure("fwp_fwl_lm", **{**SMALL, **flags}))
        return FwpFwlLanguageModel.differences(saved, given)

    assert differences(fwl_base=base) == {}
    assert differences(fwl_base=other) == {"fwl_base": (base, other)}
    assert differences(fwl_base=base, decoder_layers=3) == {"decoder_layers": (2, 3)}


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("gradients_at", GRADIENTS_AT)
def test_gradients_at_carried_weights_ask_for_a_state(carry, gradients_at, caplog):
    task = Namespace(target_dictionary=make_dictionary(50), args=Namespace(carry_state=carry))
    flags = {**SMALL, **LOCAL, "fwl_gradients_at": gradients_at}
    FwpFwlLanguageModel.build_model(configure("fwp_fwl_lm", **flags), task)
    assert ("--fwl-gradients-at carried has no effect" in caplog.text) == (gradients_at == "carried" and not carry)


def test_a_layer_trained_without_fast_weights_takes_them_on_at_test_time(build):
    trained, evaluated = build("none"), build("local", fwl_step_size=0.05, fwl_decay=1.0)
    evaluated.load_state_dict(trained.state_dict(), strict=True)
    tokens = random_tokens(1, 4)
    assert not torch.allclose(log_probs(trained, tokens), log_probs(evaluated, tokens))


def test_dropout_leaves_the_keys_of_the_layer_alone(build_model):
    below, above = (build_model(arch, dropout=0.5, **flags).train() for arch, flags in (
        ("fwp_xl_lm", {"mem_len": 6}), ("fwp_fwl_lm", XL),
    ))  # fmt: skip
    read = []
    above.decoder.fast_weight_layer.register_forward_pre_hook(lambda layer, inputs: read.append(inputs[0]))
    tokens = random_tokens(2, 7)
    above(tokens)
    assert below(tokens)[0].eq(0).any() and not read[0].eq(0).any()


@looped(("kind", "below"), [("Transformer-XL", "FwpXlDecoder"), ("local", "FwpDecoder")])
def test_dropout_can_be_retained_by_the_name_of_the_decoder_below(build, kind, below):
    for name, retained in ((below, True), ("DecoderLayer", False)):
        model = build(kind)
        model.decoder.dropout.make_generation_fast_(retain_dropout=True, retain_dropout_modules=[name])
        assert model.decoder.dropout.retained == retained


def test_half_of_the_loss_below_it(build):
    model = build("Transformer-XL", half_loss=True).train()
    target = random_tokens(2, 4)
    assert model.get_targets({"target": target}, None)[:, :2].eq(model.decoder.padding_idx).all()
    assert torch.equal(build("local").train().get_targets({"target": target}, None), target)


def test_unused_options_are_named():
    def unused(**flags):
        return FwpFwlLanguageModel.unused_flags(FwpFwlLanguageModelConfig(**flags))

    assert unused(decoder_update_rule="softmax", attention_window=4) == []
    assert unused(decoder_update_rule="softmax", mem_len=3) == ["mem_len"]
    assert unused(fwl_base="fwp_xl_lm", mem_len=3) == []
    assert unused(fwl_base="fwp_xl_lm", attention_window=4, mem_len=3) == ["attention_window"]
    assert unused(softmax_layers="1", attention_window=4) == []
    assert unused(fwl_base="fwp_xl_lm", softmax_layers="1") == ["softmax_layers"]


def test_the_state_is_counted(build, kind):
    """It is the number of elements in the state after a segment and a carried one."""

    def numbers(value):
        if isinstance(value, torch.Tensor):
            return value.numel() if value.is_floating_point() else 0
        values = value.values() if isinstance(value, dict) else value
        return sum(map(numbers, values)) if value is not None else 0

    model = build(kind)
    layer = model.decoder.fast_weight_layer
    _, state = by_segments(model, random_tokens(1, 8), 4)
    assert numbers(state.layer) == layer.state_size(4, carried=True)
    below = type(model.decoder).__bases__[1].state_size(model.decoder, 4, True)
    assert model.decoder.state_size(4, True) == layer.state_size(4, True) + below
    _, state = by_segments(model, random_tokens(1, 4), 4)
    assert numbers(state.layer) == layer.state_size(4)


@pytest.mark.parametrize("arch", FWL_PRESETS)
def test_presets_have_the_papers_sizes(arch):
    """Clark et al. 2022, Sec. 3: 121 M parameters (119 M with the layer), and Transformer-XL large (see its test)."""
    with torch.device("meta"):
        task = Namespace(target_dictionary=make_dictionary(267_735))
        model = FwpFwlLanguageModel.build_model(configure(arch), task)
    layer = sum(parameter.numel() for parameter in model.decoder.fast_weight_layer.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    dim = 1024 if "xl" in arch else 768
    assert layer == 8 * dim * dim + 7 * dim + 12
    assert round((count - layer) / 1e6) == (285 if "xl" in arch else 114)


@pytest.mark.parametrize(("kind", "backend"), [("delta", {"fwp_backend": "auto"}), ("projected", {})])
def test_it_is_a_layer_on_any_decoder(build, build_model, kind, backend):
    """The features are those of the base, and a checkpoint has the base's names, before those of the layer."""
    model, tokens = build(kind), random_tokens(2, 4)
    decoder, flags = model.decoder, {"tokens_per_sample": 4, **KINDS[kind], **backend}
    below = build_model(flags.pop("fwl_base", "fwp_lm"), **flags)
    weights = {name: value for name, value in model.state_dict().items() if "fast_weight_layer" not in name}
    below.load_state_dict(weights)
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
