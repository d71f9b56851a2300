"""Transformer-XL: its memory, its initialisation and half of the loss. Its laws are in models/test_laws.py."""

from argparse import Namespace

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from support.pairwise import looped
from support.small_models import (
    SMALL,
    TRANSFORMER_XL,
    build,
    by_segments,
    configure,
    log_probs,
    make_dictionary,
    random_tokens,
)

from fairseq_fwp.models.decoder import initialize
from fairseq_fwp.models.fwp_xl_lm import FwpXlLanguageModel


def test_distances_beyond_the_clamp_count_as_it():
    tokens, found = random_tokens(2, 5), {}
    for clamp in (-1, 1, 2, 3):
        torch.manual_seed(1)
        found[clamp] = log_probs(build("relative", clamp_len=clamp), tokens)
    for clamp in (1, 2, 3):
        assert [torch.equal(found[clamp][:, t], found[-1][:, t]) for t in range(5)] == [t <= clamp for t in range(5)]


def test_segments_are_invisible_with_same_length():
    """A token sees mem_len tokens in any segmentation, so a longer memory is not needed."""
    model, tokens = build("same length"), random_tokens(2, 20)
    expected = log_probs(model, tokens)
    for length in (1, 3, 7):
        torch.testing.assert_close(by_segments(model, tokens, length)[0], expected)


@looped("mem_len", [1, 3])
def test_a_short_memory_is_the_end_of_the_layers_inputs(mem_len):
    model, tokens, seen = build("relative", mem_len=mem_len), random_tokens(2, 6), []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    _, memory = by_segments(model, tokens[:, :5], 5)
    for kept, inputs in zip(memory.layers, seen, strict=True):
        assert torch.equal(kept.hidden, inputs[:, -mem_len:])
    _, longer = by_segments(model, tokens, [5, 1])
    for before, after in zip(memory.layers, longer.layers, strict=True):
        assert torch.equal(after.hidden[:, :-1], before.hidden[:, 1:])


@looped("kind", TRANSFORMER_XL)
def test_without_recurrence_nothing_is_remembered(kind):
    model, tokens = build(kind, mem_len=0, same_length=False, tokens_per_sample=16), random_tokens(2, 9)
    scores, state = by_segments(model, tokens, [5, 4])
    torch.testing.assert_close(scores[:, 5:], log_probs(model, tokens[:, 5:]))
    assert state.positions.tolist() == [0, 0]
    assert all(part is None or part.numel() == 0 for layer in state.layers for part in layer)


@looped("flags", [{"mem_len": 16}, {"same_length": True}, {"mem_len": 9, "clamp_len": 4}])
@looped("kind", ["relative", "shaw"])
def test_evaluation_with_another_memory_loads_the_same_weights(kind, flags):
    if kind == "shaw":
        flags = {**flags, "clamp_len": 5}
    trained, evaluated, tokens = build(kind), build(kind, **flags), random_tokens(2, 20)
    evaluated.load_state_dict(trained.state_dict())
    assert not torch.allclose(by_segments(trained, tokens, 5)[0], by_segments(evaluated, tokens, 5)[0])


def test_biases_are_one_pair_or_one_for_each_layer():
    for kind, tied in (("relative", True), ("untied", False)):
        first, second = (layer.self_attn.positions for layer in build(kind).decoder.layers)
        assert (first.content_bias is second.content_bias) == (first.position_bias is second.position_bias) == tied


def test_half_of_the_loss():
    """The criterion sees the second half of every segment in training, and all of it in evaluation."""
    model = build("relative", half_loss=True, dropout=0.0)
    criterion = AdaptiveLoss(Namespace(target_dictionary=model.decoder.dictionary), sentence_avg=False)
    tokens, target = random_tokens(2, 7), random_tokens(2, 7)
    sample = {
        "net_input": {"src_tokens": tokens, "src_lengths": torch.tensor([7, 7])},
        "target": target, "ntokens": 14, "nsentences": 2,
    }  # fmt: skip
    scores = -log_probs(model, tokens).gather(2, target.unsqueeze(2)).squeeze(2)
    kept = target.clone()
    assert criterion(model, sample)[0].item() == pytest.approx(scores.sum().item())
    loss, sample_size, _ = criterion(model.train(), sample)
    assert loss.item() == pytest.approx(scores[:, 3:].sum().item()) and sample_size == 8
    assert torch.equal(sample["target"], kept)
    with pytest.raises(ValueError, match="--criterion must be adaptive_loss with --half-loss"):  # it counts all targets
        model.get_normalized_probs(model(tokens), log_probs=True)


def test_initialisation_is_the_public_codes():
    """A new model has it, and `initialize` draws it again."""
    task = Namespace(target_dictionary=make_dictionary(400))
    flags = {**SMALL, "decoder_embed_dim": 64, "decoder_layers": 8, "mem_len": 0, "clamp_len": 9, "untie_biases": True}
    for positions, adaptive in (
        ("relative", {"div_val": 2, "adaptive_softmax_cutoff": "200"}),
        ("shaw_biased", {}),
        ("layerwise", {}),
    ):
        config = configure("fwp_xl_lm", **flags, decoder_positions=positions, **adaptive)
        decoder = FwpXlLanguageModel.build_model(config, task).decoder
        for _ in range(2):
            drawn = {name: parameter for name, parameter in decoder.named_parameters() if parameter.dim() > 1}
            small = [name for name in drawn if name.startswith(("embed_tokens.proj", "adaptive_softmax.proj"))]
            for name, parameter in drawn.items():
                expected = 0.01 if name in small else 0.02
                assert parameter.std().item() == pytest.approx(expected, rel=0.25), name
            assert (len(small) == 3) == bool(adaptive)
            table = decoder.embed_tokens.tables[0] if adaptive else decoder.embed_tokens
            assert table.weight[decoder.padding_idx].abs().max() == 0
            for parameter in decoder.parameters():
                torch.nn.init.normal_(parameter)
            decoder.apply(initialize)


@looped(
    ("settings", "mem_len", "warned"),
    [({}, 4, True), ({"carry_state": False}, 4, True), ({"carry_state": True}, 4, False), ({}, 0, False)],
)
def test_a_memory_that_nothing_fills_is_named(caplog, settings, mem_len, warned):
    """It warns with the stock task, which would train a Transformer-XL without recurrence."""
    caplog.clear()
    task = Namespace(target_dictionary=make_dictionary(50), args=Namespace(**settings))
    FwpXlLanguageModel.build_model(configure("xl_lm_wt103_medium", **SMALL, mem_len=mem_len), task)
    assert ("--carry-state" in caplog.text) == warned
