"""Laws of every language model; those of translation are in test_fwp_transformer.py."""

from argparse import Namespace

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.sequence_generator import SequenceGenerator
from support.pairwise import looped
from support.small_models import (
    FAST_WEIGHT_LAYERS,
    LANGUAGE_MODELS,
    MODELS,
    TRANSFORMER_XL,
    build,
    by_segments,
    by_steps,
    check_half_precision,
    check_resumed,
    log_probs,
    numbers_in,
    random_tokens,
)

from fairseq_fwp.modules.dropout import Dropout
from fairseq_fwp.modules.update_rules import UPDATE_RULES

TABLES = {"decoder": LANGUAGE_MODELS, "Transformer-XL": TRANSFORMER_XL, "fast weight layer": FAST_WEIGHT_LAYERS}


def every_model(test):
    """One case a table."""
    return pytest.mark.parametrize("table", TABLES)(looped("kind", lambda table: TABLES[table])(test))


# Positions depend on where a segment ends, so that the last one must be whole.
BY_SEGMENT = ("positions from the end",)
# Segments of any lengths are the whole text; Transformer-XL needs a memory of all of it.
INVISIBLE = [
    *(kind for kind in LANGUAGE_MODELS if kind not in BY_SEGMENT),
    *(kind for kind, (_, flags) in TRANSFORMER_XL.items() if flags["mem_len"]),
]
GROWING = {"softmax", "clusters of softmax", "learned positions", "softmax last", "softmax first"}
GROWING |= {"rotary", "rotary last", "softmax and recurrence", "no recurrence", "layerwise", "absolute"}
GROWING |= {"layer on softmax", "layer on hybrid"}
LOCAL = {"local", "local last", "rotary in a window", "hybrid"}


@pytest.mark.parametrize("kind", MODELS)
@looped("pieces, carried", [([3, 1, 1, 2, 9], True), ([6, 1, 9], False)])
def test_decoding_is_reading_by_segments(kind, pieces, carried):
    """It holds in any pieces, over ends of segments, from a state and from none."""
    model, tokens = build(kind), random_tokens(2, 16)
    state = by_segments(model, random_tokens(2, 8))[1] if carried else None
    expected, _ = by_segments(model, tokens, state=state)
    torch.testing.assert_close(by_steps(model, tokens, pieces, state=state), expected)


@looped("kind", INVISIBLE)
@looped("lengths", [[2, 6, 1], [1] * 9])
def test_segments_are_the_whole(kind, lengths):
    """For Transformer-XL this says, through several layers, that the memory has the inputs of each."""
    memory = {"mem_len": 8} if kind in TRANSFORMER_XL else {}
    model, tokens = build(kind, **memory), random_tokens(2, 9)
    torch.testing.assert_close(by_segments(model, tokens, lengths)[0], log_probs(model, tokens))


@every_model
def test_rows_go_on_from_their_own_past(kind):
    """Rows of a state are reordered and reset, and those of decoding are reordered; one row began with padding."""
    model, tokens, order = build(kind), random_tokens(3, 12), torch.tensor([1, 2, 1])
    if kind not in BY_SEGMENT:
        tokens[1, :2] = model.decoder.padding_idx
    expected, _ = by_segments(model, tokens)
    (_, state), more = by_segments(model, tokens[:, :8]), tokens[:, 8:]
    torch.testing.assert_close(log_probs(model, more[order], state=state.reorder(order)), expected[order, 8:])
    scores = log_probs(model, more, state=state.reset(torch.tensor([False, True, False])))
    torch.testing.assert_close(scores, torch.stack([expected[0, 8:], log_probs(model, more)[1], expected[2, 8:]]))
    kept = {}
    model(tokens[:, :8], incremental_state=kept)
    model.decoder.reorder_incremental_state_scripting(kept, order)
    torch.testing.assert_close(log_probs(model, tokens[order], incremental_state=kept), expected[order, 8:])
    assert model.decoder.carries_state == (kind not in GROWING)


# A kind of every state: decoding and its reordered rows are laws of all kinds above.
SEARCHED = ("delta", "delta_rnn", "softmax", "local", "softmax last", "relative", "same length", "shaw", "absolute")
SEARCHED += ("layer on local", "layer on Transformer-XL", "layer on adaptive", "layer on hybrid")


@looped("kind", SEARCHED)
@looped("beam", [1, 3])
def test_beam_search_scores_equal_rescoring(kind, beam):
    """It holds with prompts of two lengths in the batch."""
    model, prompts = build(kind), random_tokens(2, 3)
    dictionary = model.decoder.dictionary
    prompts[1, 2] = dictionary.pad()
    settings = {"beam_size": beam, "max_len_b": 11, "normalize_scores": False, "eos": dictionary.eos()}
    generator = SequenceGenerator([model], dictionary, **settings)
    sample = {"net_input": {"src_tokens": prompts, "src_lengths": torch.tensor([3, 2])}}
    for prompt, hypotheses in zip(prompts, generator.generate([model], sample, prefix_tokens=prompts), strict=True):
        given = prompt[prompt.ne(dictionary.pad())]
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            assert torch.equal(tokens[: len(given)], given)
            inputs = torch.cat([tokens.new_tensor([dictionary.eos()]), tokens[:-1]]).unsqueeze(0)
            rescored = by_segments(model, inputs)[0][0].gather(1, tokens.unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(hypothesis["positional_scores"].double(), rescored, rtol=1e-5, atol=1e-5)


@every_model
def test_padding_changes_no_score_here_or_later(kind):
    """It is on the left, on the right and between tokens, and a row has nothing else."""
    model = build(kind, tokens_per_sample=16)
    before, more = random_tokens(5, 2), random_tokens(5, 3)
    places = [torch.arange(9)[3:], torch.arange(4), torch.tensor([0, 1, 4, 5, 8]), torch.tensor([8]), torch.arange(0)]
    batch = torch.full((5, 9), model.decoder.padding_idx)
    for row, place in enumerate(places):
        batch[row, place] = random_tokens(len(place))
    scores, _ = by_segments(model, torch.cat([before, batch, more], 1), [2, 9, 3])
    for row, place in enumerate(places):
        tokens = torch.cat([before[row], batch[row, place], more[row]]).unsqueeze(0)
        lengths = [length for length in (2, len(place), 3) if length]
        expected = by_segments(model, tokens, lengths)[0][0]
        kept = torch.cat([torch.arange(2), 2 + place, torch.arange(11, 14)])
        if not len(place) and kind in FAST_WEIGHT_LAYERS:  # an empty segment ends the one before it, too
            kept, expected = kept[:2], expected[:2]
        torch.testing.assert_close(scores[row, kept], expected)


@every_model
def test_packed_documents_have_the_scores_and_the_state_of_each_alone(kind):
    """Attention, convolutions, token shifts and the values of the first layer see no other document, nor padding.

    Features may be those of the last tokens only.
    """
    model, tokens = build(kind, tokens_per_sample=16), random_tokens(2, 9)
    whole, last = (model.decoder.extract_features(tokens, last=count)[0] for count in (None, 2))
    torch.testing.assert_close(last, whole[:, -2:])
    packs = kind in LANGUAGE_MODELS and kind not in {*GROWING, *BY_SEGMENT, *LOCAL}
    assert model.decoder.packs_documents == packs
    if not packs:
        return
    documents = [random_tokens(1, length) for length in (3, 1, 5)]
    expected, states = zip(*(by_segments(model, tokens, 16) for tokens in documents), strict=True)
    packed, first = torch.full((1, 11), model.decoder.padding_idx), torch.zeros(1, 11, dtype=torch.bool)
    places = torch.tensor([1, 2, 4, 5, 6, 7, 8, 9, 10])  # a padded token before, and one in a document
    packed[:, places], first[0, [5, 6]] = torch.cat(documents, 1), True
    out = model(packed, first=first)
    scores, state = model.get_normalized_probs(out, log_probs=True), out[1]["state"]
    torch.testing.assert_close(scores[:, places], torch.cat(expected, 1))
    more = random_tokens(1, 3)
    torch.testing.assert_close(log_probs(model, more, state=state), log_probs(model, more, state=states[-1]))
    features = model.decoder.extract_features(packed, last=2, first=first)[0]
    torch.testing.assert_close(features, out[0][:, -2:])


@every_model
def test_what_decoding_keeps_has_a_bound_where_a_state_can_be_carried(kind):
    """With or without a memory, Transformer-XL keeps no more than it and a segment. A window counts as its tokens."""
    model, tokens, kept, sizes = build(kind), random_tokens(1, 16), {}, []
    for end in range(1, 17):
        model(tokens[:, :end], incremental_state=kept)
        sizes.append(numbers_in(kept))
    assert (max(sizes[:12]) == max(sizes)) == (kind in TRANSFORMER_XL or kind not in GROWING)
    if kind in LOCAL:
        assert model.decoder.state_size(2, carried=True) == model.decoder.state_size(16)
    elif kind in LANGUAGE_MODELS:
        assert model.decoder.state_size(16) == numbers_in(kept)


@looped("kind", ["delta", "sum", "local"])
def test_no_tensor_grows_faster_than_the_sequence(kind, largest_tensor):
    model, largest = build(kind, fwp_backend="auto", max_target_positions=8192), {}
    for length in (1024, 4096):
        with largest_tensor() as mode:
            model(random_tokens(1, length))[0].sum().backward()
        largest[length] = mode.largest
    assert largest[4096] <= 4 * largest[1024] < 1024**2


@every_model
def test_the_past_does_not_depend_on_the_future(kind):
    model, tokens = build(kind, tokens_per_sample=16), random_tokens(2, 9)
    changed = tokens.clone()
    changed[:, 5:] ^= 1  # in the same cluster: for other numbers of rows, the order of multiplication differs
    ours, theirs = model(tokens)[0], model(changed)[0]
    rounding = 1e-12 if kind in FAST_WEIGHT_LAYERS else 0
    torch.testing.assert_close(ours[:, :5], theirs[:, :5], rtol=rounding, atol=rounding)
    assert not torch.allclose(ours[:, 5:], theirs[:, 5:])


@every_model
def test_it_is_trained_saved_and_resumed_with_its_state(kind):
    """The next losses are the same to the last bit, with dropout; every parameter has a gradient."""
    updates = 6 if kind in FAST_WEIGHT_LAYERS else 4  # its decays have a gradient from the third segment on
    check_resumed(lambda: build(kind), random_tokens(updates, 2, 5))


@looped("kind", [*LANGUAGE_MODELS, *TRANSFORMER_XL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float32(kind, dtype):
    """Errors are small next to what attention contributes; the loss of a large batch does not overflow float16."""
    model, tokens = build(kind, tokens_per_sample=16), random_tokens(2, 12)
    # DPFP divides by features close to zero.
    share = 0.01 if dtype == torch.float16 else 0.5 if "dpfp" in kind else 0.05
    half = check_half_precision(model, dtype, lambda model: by_segments(model, tokens)[0], share)
    features, extra = half(tokens)
    assert features.dtype == log_probs(half, tokens).dtype == torch.float32
    for layer in extra["state"].layers if kind in UPDATE_RULES else ():
        assert all(part is None or part.dtype == torch.float32 for part in layer)
    if dtype == torch.float16 and kind in ("delta", "clusters", "adaptive inputs", "relative", "adaptive"):
        logits, targets = half.decoder.adaptive_softmax(features.repeat(1500, 1, 1), tokens.repeat(1500, 1))
        loss = torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="sum")
        assert loss.isfinite() and loss > 65504  # the largest number


@looped("kind", MODELS)
def test_fairseqs_criteria_agree(kind):
    """The loss by clusters is that of the whole distribution, on targets with every word."""
    model, target = build(kind, tokens_per_sample=64), torch.arange(4, 50).unsqueeze(0)
    task = Namespace(target_dictionary=model.decoder.dictionary)
    sample = {
        "net_input": {"src_tokens": target.flip(1), "src_lengths": torch.tensor([46])},
        "target": target, "ntokens": 46, "nsentences": 1,
    }  # fmt: skip
    losses = [criterion(task, False)(model, sample)[0].item() for criterion in (AdaptiveLoss, CrossEntropyCriterion)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


# Where dropout is, in the order of a forward pass: of a model with dropout 0.25, activation dropout 0.125.
DROPOUTS = {
    "delta": ({"final_dropout": 0.5}, [0.25] + [0.25, 0.125, 0.25] * 2 + [0.5]),
    "softmax": ({}, [0.25] + [0.25, 0.125, 0.25] * 2 + [0.0]),
    "relative": ({}, [0.25] + [0.25, 0.25, 0.125, 0.25] * 2 + [0.25]),  # R of every layer, and the features
}


@looped("kind", DROPOUTS)
def test_dropout_is_where_the_paper_has_it(kind):
    flags, expected = DROPOUTS[kind]
    model, calls = build(kind, dropout=0.25, activation_dropout=0.125, **flags), []
    for module in model.modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(lambda module, *_: calls.append(module.p))
    model(random_tokens(1, 3))
    assert calls == expected


NO_DROPOUT = {"dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0}


ACTING = [("softmax", flag) for flag in (*NO_DROPOUT, "final_dropout")]
ACTING += [(kind, "attention_dropout") for kind in ("local", "relative", "shaw")]
ACTING += [(kind, "adaptive_softmax_dropout") for kind in ("clusters", "adaptive inputs")]


@looped("kind, flag", ACTING)
def test_each_dropout_acts_in_training_and_only_there(kind, flag):
    """In evaluation scores are those of the same weights without it; --retain-dropout keeps it."""
    model, plain = build(kind, **{**NO_DROPOUT, flag: 0.5}), build(kind, **NO_DROPOUT)
    plain.load_state_dict(model.state_dict())
    tokens = random_tokens(2, 9)

    def loss(model):
        logits, targets = model.decoder.adaptive_softmax(model(tokens)[0], tokens)
        pairs = zip(logits, targets, strict=True)
        return sum(torch.nn.functional.cross_entropy(*pair) for pair in pairs if pair[0] is not None)

    assert torch.equal(loss(model), loss(plain))
    assert not torch.allclose(loss(model.train()), loss(model))
    model.eval().make_generation_fast_(retain_dropout=True)
    if "attention" not in flag and "softmax" not in flag:
        assert not torch.allclose(loss(model), loss(model))


@looped("kind", ["delta", "relative"])
def test_it_learns_what_needs_its_memory(kind):
    """The target is a token of an earlier segment, one of eight: without a memory the loss is at least log 8."""
    model = build(kind, decoder_embed_dim=32, dropout=0.0).float().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        past = torch.cat([torch.randint(4, 12, (32, 1)), torch.randint(12, 20, (32, 3))], 1)
        state = model(past)[1]["state"]
        scores = log_probs(model, torch.randint(12, 20, (32, 2)), state=state)
        loss = torch.nn.functional.nll_loss(scores[:, -1], past[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5 < torch.tensor(8.0).log()
