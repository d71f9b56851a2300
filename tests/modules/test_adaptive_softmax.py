import pytest
import torch
import torch.nn.functional as F
from pairwise import looped
from torch import nn

from fairseq_fwp.modules import adaptive_softmax
from fairseq_fwp.modules.adaptive_softmax import (
    AdaptiveInput,
    ProjectedAdaptiveSoftmax,
    TiedAdaptiveSoftmax,
    UntiedSoftmax,
)

VOCABULARY, DIM = 30, 5


@pytest.fixture(params=["tied", "projected"])
def build(request):
    """build(cutoffs, padding_idx=None): each kind of softmax, in float64, with large weights."""

    def build_softmax(cutoffs, padding_idx=None):
        if request.param == "tied":
            module = TiedAdaptiveSoftmax(nn.Embedding(VOCABULARY, DIM, padding_idx), cutoffs).double()
        else:
            embedding = AdaptiveInput(VOCABULARY, 4 ** len(cutoffs) * DIM, cutoffs, 4, padding_idx)
            module = ProjectedAdaptiveSoftmax(embedding).double()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5)
        return module

    return build_softmax


@pytest.fixture(params=[[], [10], [4, 9, 29]], ids=str)
def softmax(request, build):
    return build(request.param)


def random_features(softmax, *shape):
    size = softmax.projections[0].out_features if hasattr(softmax, "projections") else DIM
    return torch.randn(*shape, size, dtype=torch.float64)


def test_probabilities_sum_to_one(softmax):
    log_probs = softmax.get_log_prob(random_features(softmax, 2, 3), None)
    assert log_probs.shape == (2, 3, VOCABULARY)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 3, dtype=torch.float64))


def test_clusters_are_a_product_of_two_softmaxes():
    softmax = TiedAdaptiveSoftmax(nn.Embedding(VOCABULARY, DIM), [10, 20]).double()
    x = torch.randn(1, 1, DIM, dtype=torch.float64)
    words = (x @ softmax.weight.T + softmax.bias)[0, 0]
    head = torch.cat([words[:10], softmax.clusters(x)[0, 0]]).log_softmax(0)
    expected = torch.cat([head[:10], words[10:20].log_softmax(0) + head[10], words[20:].log_softmax(0) + head[11]])
    torch.testing.assert_close(softmax.get_log_prob(x, None)[0, 0], expected)


def test_loss_by_clusters_equals_the_log_probability(softmax):
    features = random_features(softmax, 4, 6)
    target = torch.randint(VOCABULARY, (4, 6))
    logits, targets = softmax(features, target)
    loss = sum(F.cross_entropy(x, y, reduction="sum") for x, y in zip(logits, targets, strict=True) if y is not None)
    for given in (None, target):
        scores = softmax.get_log_prob(features, given).gather(-1, target.unsqueeze(-1))
        torch.testing.assert_close(-scores.sum(), loss)
        torch.testing.assert_close(softmax.target_log_prob(features, target), scores.squeeze(-1))


def test_a_cluster_without_tokens_is_left_out(build):
    softmax = build([10, 20])
    logits, targets = softmax(random_features(softmax, 1, 2), torch.tensor([[3, 25]]))
    assert logits[1] is None and targets[1] is None and logits[2].shape == (1, 10)  # no padding index: no offset
    assert targets[0].tolist() == [3, 11] and targets[2].tolist() == [5]


@looped("cutoffs", [[0], [10, 10], [20, 10], [30]])
def test_cutoffs_that_do_not_part_the_vocabulary_are_refused(cutoffs):
    with pytest.raises(ValueError, match="must be ascending, from 1 to below the vocabulary's 30 words"):
        TiedAdaptiveSoftmax(nn.Embedding(VOCABULARY, DIM), cutoffs)


def test_the_index_of_padding_is_no_word_of_a_tail_nor_a_cluster(build):
    softmax = build([10, 20], padding_idx=1)
    logits, targets = softmax(random_features(softmax, 1, 3), torch.tensor([[3, 20, 21]]))
    assert targets[2].tolist() == [2, 3] and logits[2].shape == (2, 12)
    assert (logits[2][:, :2] == -torch.inf).all() and logits[2][:, 2:].isfinite().all()
    with pytest.raises(ValueError, match="must be ascending, from 2 to"):
        build([1], padding_idx=1)


def test_a_projected_softmax_is_the_public_codes():
    """Features times the cluster's projection times its embeddings; the head has a separate projection."""
    embedding = AdaptiveInput(VOCABULARY, 32, [10, 20], 4).double()
    softmax = ProjectedAdaptiveSoftmax(embedding).double()
    for parameter in softmax.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 1, 32, dtype=torch.float64)
    first, second, third = (x[0, 0] @ projection.weight for projection in softmax.projections)
    words = [
        features @ table.weight.T + bias
        for features, table, bias in zip((first, second, third), embedding.tables, softmax.bias.split(10), strict=True)
    ]
    head = torch.cat([words[0], first @ softmax.clusters.weight.T + softmax.clusters.bias]).log_softmax(0)
    expected = torch.cat([head[:10], words[1].log_softmax(0) + head[10], words[2].log_softmax(0) + head[11]])
    torch.testing.assert_close(softmax.get_log_prob(x, None)[0, 0], expected)
    assert [features.numel() for features in (first, second, third)] == [32, 8, 2]


def test_tables_and_projections_are_shared_but_for_the_heads():
    embedding = AdaptiveInput(VOCABULARY, 32, [10, 20], 4)
    softmax = ProjectedAdaptiveSoftmax(embedding)
    own = {
        name
        for name, parameter in softmax.named_parameters()
        if all(parameter is not p for p in embedding.parameters())
    }
    assert own == {"bias", "clusters.weight", "clusters.bias", "projections.0.weight"}


def test_gradients_of_losses_without_a_graph(softmax, monkeypatch):
    """Blocks of rows with a smaller last one, and clusters without a target."""
    monkeypatch.setattr(adaptive_softmax, "BLOCK", 5)
    features = random_features(softmax, 3, 4).requires_grad_()
    for target in (torch.randint(VOCABULARY, (3, 4)), torch.randint(4, (3, 4))):
        (expected,) = torch.autograd.grad(-softmax.target_log_prob(features, target).sum(), features)
        with torch.no_grad():
            found = softmax.loss_gradient(features, target)
        torch.testing.assert_close(found, expected)
        assert not found.requires_grad
    nothing = softmax.loss_gradient(features[:, :0], target[:, :0])
    assert nothing.shape == (3, 0, features.shape[2])


OUTPUT_LAYERS = {
    "biased": lambda: TiedAdaptiveSoftmax(nn.Embedding(VOCABULARY, DIM), [10, 20]),
    "tied": lambda: TiedAdaptiveSoftmax(nn.Embedding(VOCABULARY, DIM), [], biased=False),
    "untied": lambda: UntiedSoftmax(nn.Embedding(VOCABULARY, DIM)),
    "projected": lambda: ProjectedAdaptiveSoftmax(AdaptiveInput(VOCABULARY, DIM, [10, 20], 2)),
    "projected, tied": lambda: ProjectedAdaptiveSoftmax(AdaptiveInput(VOCABULARY, DIM, [10, 20], 2), biased=False),
}


@pytest.mark.parametrize("kind", OUTPUT_LAYERS)
def test_a_loaded_bias_of_minus_infinity_is_a_mask(kind):
    """The mask scores as that bias, to the last bit, and is not learned; saving gives the bias that was read."""
    absent, targets = [0, 1, 15, 29], torch.randint(2, 10, (3, 4))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
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
