"""Adaptive embeddings and output layers against their definitions; masks of words without a probability."""

import pytest
import torch
import torch.nn.functional as F
from support.attentions import random
from support.pairwise import looped
from torch import nn

from fairseq_fwp.modules import adaptive_softmax
from fairseq_fwp.modules.adaptive_softmax import AdaptiveInput, AdaptiveSoftmax

VOCABULARY, DIM = 30, 5


# Embeddings.


@looped("cutoffs", [[], [10], [4, 20]])
def test_a_word_is_its_row_times_its_clusters_projection(cutoffs):
    embedding = AdaptiveInput(VOCABULARY, 32, cutoffs, 4).double()
    tokens = torch.randperm(VOCABULARY).view(5, 6)
    found, bounds = embedding(tokens), [0, *cutoffs, VOCABULARY]
    for place in ((0, 0), (2, 3), (4, 5)):
        word = tokens[place].item()
        cluster = sum(word >= bound for bound in bounds[1:-1])
        row = embedding.tables[cluster].weight[word - bounds[cluster]]
        torch.testing.assert_close(found[place], embedding.projections[cluster].weight @ row)
    assert [table.embedding_dim for table in embedding.tables] == [32, 8, 2][: len(bounds) - 1]


def test_every_word_but_padding_is_trained():
    """All words are trained, even those with the index of padding within their cluster."""
    embedding = AdaptiveInput(VOCABULARY, 32, [10, 20], 2, padding_idx=1)
    embedding(torch.arange(VOCABULARY).unsqueeze(0)).square().sum().backward()
    moved = torch.cat([table.weight.grad.abs().sum(1) > 0 for table in embedding.tables])
    assert moved.logical_not().nonzero().flatten().tolist() == [1]
    assert embedding(torch.tensor([[1]])).abs().max() == 0


def test_sizes_of_embeddings():
    """Projections start small. Sizes need not be divisible: they are rounded down."""
    for projection in AdaptiveInput(VOCABULARY, 256, [10], 2).projections:
        assert projection.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert [table.embedding_dim for table in AdaptiveInput(VOCABULARY, 37, [10, 20], 6).tables] == [37, 6, 1]
    power = "`embed_dim` must be at least 36, which is `div_val` to the power of the number of cutoffs, got 32"
    for div_val, sentence in ((0, "`div_val` must be at least 1, got 0"), (6, power)):
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            AdaptiveInput(VOCABULARY, 32, [10, 20], div_val)


def test_autocast():
    embedding = AdaptiveInput(VOCABULARY, 32, [10], 2)
    nn.init.normal_(embedding.projections[1].weight)
    tokens = torch.arange(VOCABULARY).unsqueeze(0)
    with torch.autocast("cpu", torch.bfloat16):
        found = embedding(tokens)
    torch.testing.assert_close(found, embedding(tokens), rtol=0.02, atol=0.1)


# Output layers.


def build(kind, cutoffs, padding_idx=None):
    """Return a softmax in float64, with large weights."""
    if kind == "tied":
        module = AdaptiveSoftmax(nn.Embedding(VOCABULARY, DIM, padding_idx), cutoffs).double()
    else:
        embedding = AdaptiveInput(VOCABULARY, 4 ** len(cutoffs) * DIM, cutoffs, 4, padding_idx)
        module = AdaptiveSoftmax(embedding).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


every_kind = looped("kind", ["tied", "projected"])
every_cutoffs = looped("cutoffs", [[], [10], [4, 9, 29]])


def random_features(softmax, *shape):
    return random(*shape, softmax.projections[0].out_features if softmax.projections is not None else DIM)


@every_kind
def test_clusters_are_a_product_of_two_softmaxes(kind):
    """With projections, as in the public code: features times the cluster's, the head's being its own."""
    softmax = build(kind, [10, 20])
    x = random_features(softmax, 1, 1)
    if kind == "tied":
        words, clusters = (x @ softmax.weight.T + softmax.bias)[0, 0].split(10), softmax.clusters(x)[0, 0]
    else:
        parts = [x[0, 0] @ projection.weight for projection in softmax.projections]
        tables = zip(parts, softmax.tables, softmax.bias.split(10), strict=True)
        words = [part @ table.weight.T + bias for part, table, bias in tables]
        clusters = parts[0] @ softmax.clusters.weight.T + softmax.clusters.bias
        assert [part.numel() for part in parts] == [80, 20, 5]
    head = torch.cat([words[0], clusters]).log_softmax(0)
    expected = torch.cat([head[:10], words[1].log_softmax(0) + head[10], words[2].log_softmax(0) + head[11]])
    torch.testing.assert_close(softmax.get_log_prob(x, None)[0, 0], expected)


@every_kind
@every_cutoffs
def test_loss_by_clusters_equals_the_log_probability(kind, cutoffs):
    softmax = build(kind, cutoffs)
    features, target = random_features(softmax, 4, 6), torch.randint(VOCABULARY, (4, 6))
    probabilities = softmax.get_log_prob(features, None).exp()
    assert probabilities.shape == (4, 6, VOCABULARY)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(4, 6, dtype=torch.float64))
    logits, targets = softmax(features, target)
    loss = sum(F.cross_entropy(x, y, reduction="sum") for x, y in zip(logits, targets, strict=True) if y is not None)
    for given in (None, target):
        scores = softmax.get_log_prob(features, given).gather(-1, target.unsqueeze(-1))
        torch.testing.assert_close(-scores.sum(), loss)
        torch.testing.assert_close(softmax.target_log_prob(features, target), scores.squeeze(-1))


@every_kind
@every_cutoffs
def test_gradients_of_losses_without_a_graph(kind, cutoffs, monkeypatch):
    """Blocks of rows with a smaller last one, and clusters without a target."""
    monkeypatch.setattr(adaptive_softmax, "BLOCK", 5)
    softmax = build(kind, cutoffs)
    features = random_features(softmax, 3, 4).requires_grad_()
    for target in (torch.randint(VOCABULARY, (3, 4)), torch.randint(4, (3, 4))):
        (expected,) = torch.autograd.grad(-softmax.target_log_prob(features, target).sum(), features)
        with torch.no_grad():
            found = softmax.loss_gradient(features, target)
        torch.testing.assert_close(found, expected)
        assert not found.requires_grad
    nothing = softmax.loss_gradient(features[:, :0], target[:, :0])
    assert nothing.shape == (3, 0, features.shape[2])


@every_kind
def test_clusters_without_tokens_and_with_padding(kind):
    """A cluster without tokens is left out; the index of padding is not a word of a tail, nor a cluster."""
    softmax = build(kind, [10, 20])
    logits, targets = softmax(random_features(softmax, 1, 2), torch.tensor([[3, 25]]))
    assert logits[1] is None and targets[1] is None and logits[2].shape == (1, 10)  # no padding index: no offset
    assert targets[0].tolist() == [3, 11] and targets[2].tolist() == [5]
    softmax = build(kind, [10, 20], padding_idx=1)
    logits, targets = softmax(random_features(softmax, 1, 3), torch.tensor([[3, 20, 21]]))
    assert targets[2].tolist() == [2, 3] and logits[2].shape == (2, 12)
    assert (logits[2][:, :2] == -torch.inf).all() and logits[2][:, 2:].isfinite().all()


def test_cutoffs_that_do_not_part_the_vocabulary_are_refused():
    wrong = [(cutoffs, None, "1 to below the vocabulary's 30 words") for cutoffs in ([0], [10, 10], [20, 10], [30])]
    for cutoffs, padding_idx, places in (*wrong, ([1], 1, "2 to")):
        with pytest.raises(ValueError, match=f"must be ascending, from {places}"):
            build("tied", cutoffs, padding_idx)


def test_tables_and_projections_are_shared_but_for_the_heads():
    embedding = AdaptiveInput(VOCABULARY, 32, [10, 20], 4)
    shared = set(embedding.parameters())
    own = {name for name, parameter in AdaptiveSoftmax(embedding).named_parameters() if parameter not in shared}
    assert own == {"bias", "clusters.weight", "clusters.bias", "projections.0.weight"}


OUTPUT_LAYERS = {
    "biased": lambda: AdaptiveSoftmax(nn.Embedding(VOCABULARY, DIM), [10, 20]),
    "tied": lambda: AdaptiveSoftmax(nn.Embedding(VOCABULARY, DIM), [], biased=False),
    "untied": lambda: AdaptiveSoftmax(nn.Embedding(VOCABULARY, DIM), biased=False, tied=False),
    "projected": lambda: AdaptiveSoftmax(AdaptiveInput(VOCABULARY, DIM, [10, 20], 2)),
    "projected, tied": lambda: AdaptiveSoftmax(AdaptiveInput(VOCABULARY, DIM, [10, 20], 2), biased=False),
}


@looped("kind", OUTPUT_LAYERS)
@looped("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_loaded_bias_of_minus_infinity_is_a_mask(kind, dtype):
    """The mask scores as that bias, to the last bit, and is not learned; saving gives the bias that was read."""
    absent, targets = [0, 1, 15, 29], torch.randint(2, 10, (3, 4))
    written, softmax = (OUTPUT_LAYERS[kind]().to(dtype) for _ in range(2))
    ordinary = {name: weight.clone() for name, weight in softmax.state_dict().items()}
    with torch.no_grad():
        written.bias[absent] = -torch.inf
    softmax.load_state_dict(written.state_dict())
    assert softmax.bias.isfinite().all()
    features = torch.randn(3, 4, DIM, dtype=dtype)
    for score in (
        lambda softmax, x: softmax.get_log_prob(x, None),
        lambda softmax, x: softmax.target_log_prob(x, targets),
        lambda softmax, x: softmax.loss_gradient(x, targets),
    ):
        assert torch.equal(score(softmax, features), score(written, features))
    found = softmax.get_log_prob(features, None).isneginf().any(0).any(0)
    assert found.nonzero().flatten().tolist() == absent
    saved, expected = softmax.state_dict(), written.state_dict()
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in saved)
    softmax.load_state_dict(ordinary)
    assert softmax.get_log_prob(features, None).isfinite().all()
