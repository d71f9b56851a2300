"""Laws of Transformer-XL: the memory, decoding with it, and the ablations."""

import copy
import io
from argparse import Namespace

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from pairwise import looped

from fairseq_fwp.models.decoder import initialize
from fairseq_fwp.models.fwp_xl_lm import FwpXlLanguageModel
from fairseq_fwp.modules.layers import Dropout

from .conftest import SMALL, configure, log_probs, make_dictionary, random_tokens
from .stream_laws import by_segments, check_beam_search, check_decoding, check_padding, check_rows_of_states

KINDS = {
    "relative": {},
    "untied": {"untie_biases": True},
    "clamped": {"clamp_len": 3},
    "same length": {"same_length": True},
    "shaw": {"decoder_positions": "shaw", "clamp_len": 5},
    "no recurrence": {"mem_len": 0},
    "shaw_biased": {"decoder_positions": "shaw_biased", "clamp_len": 5},
    "layerwise": {"decoder_positions": "layerwise", "mem_len": 0},
    "absolute": {"decoder_positions": "absolute", "mem_len": 0},
    "pre-norm": {"decoder_normalize_before": True},
    "adaptive": {"div_val": 2, "adaptive_softmax_cutoff": "10,30"},
}
RECURRENT = [kind for kind, flags in KINDS.items() if "mem_len" not in flags]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def build(build_model):
    """A function build(kind, **flags) -> a model with a memory of 6 tokens, if its kind has one."""
    return lambda kind, **flags: build_model("fwp_xl_lm", **{"mem_len": 6, **KINDS[kind], **flags})


def test_distances_beyond_the_clamp_count_as_it(build):
    tokens, found = random_tokens(2, 5), {}
    for clamp in (-1, 1, 2, 3):
        torch.manual_seed(1)
        found[clamp] = log_probs(build("relative", clamp_len=clamp).eval(), tokens)
    for clamp in (1, 2, 3):
        assert [torch.equal(found[clamp][:, t], found[-1][:, t]) for t in range(5)] == [t <= clamp for t in range(5)]


@pytest.mark.parametrize("kind", RECURRENT)
@looped("lengths", [[5, 4], [2, 6, 1], [1] * 9], ids=str)
def test_a_memory_of_the_whole_past_is_attention_over_the_concatenation(build, kind, lengths):
    """This holds through several layers: the memory has the inputs of each."""
    model, tokens = build(kind, mem_len=8), random_tokens(2, 9)
    torch.testing.assert_close(by_segments(model, tokens, lengths)[0], log_probs(model, tokens))


def test_segments_are_invisible_with_same_length(build):
    """A token sees mem_len tokens in any segmentation, so a longer memory is not needed."""
    model, tokens = build("same length"), random_tokens(2, 20)
    expected = log_probs(model, tokens)
    for length in (1, 3, 7):
        torch.testing.assert_close(by_segments(model, tokens, length)[0], expected)


@looped("mem_len", [1, 3])
def test_a_short_memory_is_the_end_of_the_layers_inputs(build, mem_len):
    model, tokens = build("relative", mem_len=mem_len), random_tokens(2, 6)
    layers, seen = model.decoder.layers, []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    _, memory = by_segments(model, tokens[:, :5], 5)
    for kept, inputs in zip(memory.layers, seen, strict=True):
        assert torch.equal(kept.hidden, inputs[:, -mem_len:])
    _, longer = by_segments(model, tokens, [5, 1])
    for before, after in zip(memory.layers, longer.layers, strict=True):
        assert torch.equal(after.hidden[:, :-1], before.hidden[:, 1:])


def test_without_recurrence_nothing_is_remembered(build, kind):
    model, tokens = build(kind, mem_len=0, same_length=False), random_tokens(2, 9)
    scores, state = by_segments(model, tokens, [5, 4])
    torch.testing.assert_close(scores[:, 5:], log_probs(model, tokens[:, 5:]))
    assert state.positions.tolist() == [0, 0]
    assert all(part is None or part.numel() == 0 for layer in state.layers for part in layer)


@looped("pieces", [[1] * 15, [6, 1, 8], [15]], ids=str)
@looped("carried", [False, True])
def test_decoding_is_reading_the_stream_in_segments(build, kind, pieces, carried):
    check_decoding(build(kind, tokens_per_sample=4), pieces, carried)


def test_decoding_memory_is_bounded(build, kind):
    model, tokens, kept, lengths = build(kind, tokens_per_sample=4), random_tokens(2, 25), {}, []
    for t in range(1, 26):
        model(tokens[:, :t], incremental_state=kept)
        ((state, _),) = kept.values()
        lengths.append(state.layers[0].keys.shape[2])
    assert max(lengths) == model.decoder.mem_len + 4


def test_reordered_beams_go_on_from_their_own_past(build, kind):
    model, tokens, kept = build(kind, tokens_per_sample=4), random_tokens(3, 7), {}
    model(tokens[:, :6], incremental_state=kept)
    order = torch.tensor([2, 2, 0])
    model.decoder.reorder_incremental_state_scripting(kept, order)
    step = log_probs(model, tokens[order], incremental_state=kept)
    torch.testing.assert_close(step, by_segments(model, tokens[order], 4)[0][:, -1:])


def test_carried_memories_are_reordered_and_reset(build, kind):
    model = build(kind)
    check_rows_of_states(model)
    assert model.decoder.carries_state == (model.decoder.mem_len > 0)


@looped("beam", [1, 4])
def test_beam_search_scores_equal_rescoring(build, kind, beam):
    check_beam_search(build(kind, tokens_per_sample=4), beam)


def test_padding_changes_no_score_here_or_later(build, kind):
    """Padding also changes nothing in the memory."""
    check_padding(build(kind))


def test_the_past_does_not_depend_on_the_future(build, kind):
    model, tokens = build(kind), random_tokens(2, 9)
    changed = tokens.clone()
    changed[:, 5:] ^= 1  # in the same cluster: for other numbers of rows, the order of multiplication differs
    ours, theirs = model(tokens)[0], model(changed)[0]
    assert torch.equal(ours[:, :5], theirs[:, :5]) and not torch.equal(ours[:, 5:], theirs[:, 5:])


def test_gradients_stop_at_a_detached_memory(build):
    """The paper's SG: no gradient reaches the memory, but the projections of its keys and values get one."""
    model, tokens = build("relative"), random_tokens(2, 8)
    state = model(tokens[:, :4])[1]["state"]
    assert all(layer.hidden.requires_grad for layer in state.layers)
    words = model.decoder.embed_tokens.weight
    for given, flows in ((state, True), (state.detach(), False)):
        out, _ = model(tokens[:, 4:5], state=given)
        (grad,) = torch.autograd.grad(out.square().sum(), words, retain_graph=True)
        assert (grad[tokens[0, 0]].abs().sum() > 0) == (flows or tokens[0, 0] in tokens[:, 4])


@looped("flags", [{"mem_len": 16}, {"same_length": True}, {"mem_len": 9, "clamp_len": 4}], ids=str)
@pytest.mark.parametrize("kind", ["relative", "shaw"])
def test_evaluation_with_another_memory_loads_the_same_weights(build, kind, flags):
    if kind == "shaw":
        flags = {**flags, "clamp_len": 5}
    trained, evaluated, tokens = build(kind), build(kind, **flags), random_tokens(2, 20)
    evaluated.load_state_dict(trained.state_dict())
    assert not torch.allclose(by_segments(trained, tokens, 5)[0], by_segments(evaluated, tokens, 5)[0])


def test_biases_are_one_pair_or_one_for_each_layer(build):
    sizes = {name: sum(parameter.numel() for parameter in build(name).parameters()) for name in ("relative", "untied")}
    assert sizes["untied"] - sizes["relative"] == 2 * 16  # of 2 layers, one more u and v
    tied = build("relative").decoder.layers
    assert tied[0].self_attn.positions.content_bias is tied[1].self_attn.positions.content_bias
    assert tied[0].self_attn.positions.position_bias is tied[1].self_attn.positions.position_bias


def test_it_is_trained_saved_and_resumed_with_its_memory(build, kind):
    """The next losses are the same to the last bit; every parameter has a gradient."""

    def train(model, optimizer, state, segments):
        losses = []
        for segment in segments:
            out = model(segment[:, :-1], state=state)
            state = out[1]["state"].detach()
            loss = -model.get_normalized_probs(out, log_probs=True).gather(2, segment[:, 1:, None]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, state

    model, segments = build(kind, dropout=0.0).train(), random_tokens(6, 2, 7)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    _, state = train(model, optimizer, None, segments[:3])
    assert all(parameter.grad is not None for parameter in model.parameters())
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    expected, _ = train(model, optimizer, state, segments[3:])
    file.seek(0)
    resumed = build(kind, dropout=0.0).train()
    weights, moments = torch.load(file, weights_only=True)
    resumed.load_state_dict(weights)
    optimizer = torch.optim.Adam(resumed.parameters(), lr=1e-2)
    optimizer.load_state_dict(moments)
    assert train(resumed, optimizer, state, segments[3:])[0] == expected


def test_half_of_the_loss(build):
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


def test_dropouts(build):
    """It is on embeddings, on R in every layer, after each block and on the features, as in the public code."""
    model = build("relative", dropout=0.25, activation_dropout=0.125)
    calls = []
    for module in model.modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(lambda module, *_: calls.append(module.p))
    model(random_tokens(1, 3))
    assert calls == [0.25] + [0.25, 0.25, 0.125, 0.25] * 2 + [0.25]
    assert build("shaw", attention_dropout=0.5).decoder.layers[0].self_attn.dropout == 0.5


def test_a_new_model_is_initialised():
    task = Namespace(target_dictionary=make_dictionary(400))
    decoder = FwpXlLanguageModel.build_model(configure("fwp_xl_lm", **SMALL), task).decoder
    for parameter in (decoder.embed_tokens.weight, *decoder.layers[0].self_attn.positions.parameters()):
        assert parameter.std() > 0.005 and parameter.abs().max() < 0.15


def test_initialisation_is_the_public_codes():
    task = Namespace(target_dictionary=make_dictionary(400))
    flags = {**SMALL, "decoder_embed_dim": 64, "decoder_layers": 8}
    for positions, adaptive in (
        ("relative", {"div_val": 2, "adaptive_softmax_cutoff": "200"}),
        ("shaw_biased", {}),
        ("layerwise", {}),
    ):
        config = configure(
            "fwp_xl_lm", **flags, decoder_positions=positions, mem_len=0, clamp_len=9, untie_biases=True, **adaptive
        )
        decoder = FwpXlLanguageModel.build_model(config, task).decoder
        for parameter in decoder.parameters():
            torch.nn.init.normal_(parameter)
        decoder.apply(initialize)
        drawn = {name: parameter for name, parameter in decoder.named_parameters() if parameter.dim() > 1}
        small = {
            name: drawn.pop(name)
            for name in list(drawn)
            if name.startswith(("embed_tokens.proj", "adaptive_softmax.proj"))
        }
        for group, std in ((drawn, 0.02), (small, 0.01)):
            for name, parameter in group.items():
                assert parameter.std().item() == pytest.approx(std, rel=0.25), name
        assert (len(small) == 3) == bool(adaptive)
        table = decoder.embed_tokens.tables[0] if adaptive else decoder.embed_tokens
        assert table.weight[decoder.padding_idx].abs().max() == 0


@looped("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_model(build, kind, dtype):
    model = build(kind).float()
    model.apply(initialize)
    tokens = random_tokens(2, 12)
    half = copy.deepcopy(model).to(dtype)
    assert half(tokens)[0].dtype == torch.float32
    torch.testing.assert_close(by_segments(half, tokens, 5)[0], by_segments(model, tokens, 5)[0], rtol=0, atol=0.05)


def test_a_memory_is_used(build_model):
    """The target is the first token of the previous segment, one of eight: this segment does not determine it."""
    model = build_model("fwp_xl_lm", mem_len=4, dropout=0.0).float().train()
    model.apply(initialize)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        past = torch.cat([torch.randint(4, 12, (32, 1)), torch.randint(12, 20, (32, 3))], 1)
        state = model(past)[1]["state"].detach()
        scores = log_probs(model, torch.randint(12, 20, (32, 2)), state=state)
        loss = torch.nn.functional.nll_loss(scores[:, -1], past[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5 < torch.tensor(8.0).log()


REFUSED = {
    "--mem-len must be at least 0, got -1": {"mem_len": -1},
    "--mem-len must be at least 1 with --same-length, got 0": {"mem_len": 0, "same_length": True},
    "--mem-len must be 0 with --decoder-positions absolute, got ": {"decoder_positions": "absolute"},
    "--mem-len must be 0 with --decoder-positions layerwise, got ": {"decoder_positions": "layerwise"},
    "--clamp-len must be at least 1 with --decoder-positions shaw_biased, got -1": {"decoder_positions": "shaw_biased"},
    "--decoder-embed-dim must be divisible by --decoder-attention-heads, got 16 and 3": {"decoder_attention_heads": 3},
    "--div-val must be at least 1, got 0": {"div_val": 0, "adaptive_softmax_cutoff": "10"},
    "--decoder-embed-dim must be at least 17, which is --div-val to the power of the number of cutoffs, got 16": {
        "div_val": 17,
        "adaptive_softmax_cutoff": "10",
    },
}


@looped("sentence", REFUSED)
def test_settings_that_cannot_be_are_refused(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build("relative", **REFUSED[sentence])


@pytest.mark.parametrize(
    ("kind", "flags", "unused"),
    [
        ("shaw", {"untie_biases": True}, ["--untie-biases"]),
        ("absolute", {"untie_biases": True, "clamp_len": 3}, ["--untie-biases", "--clamp-len"]),
        ("layerwise", {"untie_biases": True, "clamp_len": 3}, ["--untie-biases", "--clamp-len"]),
        ("relative", {"untie_biases": True, "clamp_len": 3}, []),
    ],
)
def test_flags_without_effect_are_named(build, caplog, kind, flags, unused):
    build(kind, **flags)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.split()[0] for message in warnings] == unused


@pytest.mark.parametrize(
    ("settings", "mem_len", "warned"),
    [({}, 4, True), ({"carry_state": False}, 4, True), ({"carry_state": True}, 4, False), ({}, 0, False)],
)
def test_a_memory_that_nothing_fills_is_named(caplog, settings, mem_len, warned):
    """It warns with the stock task, which would train a Transformer-XL without recurrence."""
    task = Namespace(target_dictionary=make_dictionary(50), args=Namespace(**settings))
    FwpXlLanguageModel.build_model(configure("xl_lm_wt103_medium", **SMALL, mem_len=mem_len), task)
    assert ("--carry-state" in caplog.text) == warned


def test_half_loss_refuses_a_criterion_that_counts_all_targets(build):
    model = build("relative", half_loss=True)
    output = model(random_tokens(2, 6))
    model.get_normalized_probs(output, log_probs=True)
    with pytest.raises(ValueError, match="--criterion must be adaptive_loss with --half-loss"):
        model.train().get_normalized_probs(output, log_probs=True)
