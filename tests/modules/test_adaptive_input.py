import pytest
import torch
from pairwise import looped
from torch import nn

from fairseq_fwp.modules.adaptive_softmax import AdaptiveInput

VOCABULARY, DIM = 30, 32


@looped("cutoffs", [[], [10], [4, 20]], ids=str)
def test_a_word_is_its_row_times_its_clusters_projection(cutoffs):
    embedding = AdaptiveInput(VOCABULARY, DIM, cutoffs, 4).double()
    tokens = torch.randperm(VOCABULARY).view(5, 6)
    found = embedding(tokens)
    bounds = [0, *cutoffs, VOCABULARY]
    for place in tokens.new_tensor([[0, 0], [2, 3], [4, 5]]).tolist():
        word = tokens[tuple(place)].item()
        cluster = sum(word >= bound for bound in bounds[1:-1])
        row = embedding.tables[cluster].weight[word - bounds[cluster]]
        torch.testing.assert_close(found[tuple(place)], embedding.projections[cluster].weight @ row)
    assert [table.embedding_dim for table in embedding.tables] == [32, 8, 2][: len(bounds) - 1]


def test_every_word_but_padding_is_trained():
    """All words are trained, even those with the index of padding within their cluster."""
    embedding = AdaptiveInput(VOCABULARY, DIM, [10, 20], 2, padding_idx=1)
    embedding(torch.arange(VOCABULARY).unsqueeze(0)).square().sum().backward()
    moved = torch.cat([table.weight.grad.abs().sum(1) > 0 for table in embedding.tables])
    assert moved.logical_not().nonzero().flatten().tolist() == [1]
    assert embedding(torch.tensor([[1]])).abs().max() == 0


def test_gradients():
    embedding = AdaptiveInput(VOCABULARY, 4, [10], 2).double()
    tokens = torch.randint(VOCABULARY, (2, 5))
    parameters = {name: parameter.detach() for name, parameter in embedding.named_parameters()}

    def embed(*values):
        return torch.func.functional_call(embedding, dict(zip(parameters, values, strict=True)), tokens)

    assert torch.autograd.gradcheck(embed, [value.clone().requires_grad_() for value in parameters.values()])


def test_projections_start_small():
    embedding = AdaptiveInput(VOCABULARY, 256, [10], 2)
    for projection in embedding.projections:
        assert projection.weight.std().item() == pytest.approx(0.01, rel=0.05)


def test_autocast():
    embedding = AdaptiveInput(VOCABULARY, DIM, [10], 2)
    nn.init.normal_(embedding.projections[1].weight)
    tokens = torch.arange(VOCABULARY).unsqueeze(0)
    with torch.autocast("cpu", torch.bfloat16):
        found = embedding(tokens)
    torch.testing.assert_close(found, embedding(tokens), rtol=0.02, atol=0.1)


@looped(
    ("div_val", "sentence"),
    [
        (0, "`div_val` must be at least 1, got 0"),
        (-2, "`div_val` must be at least 1, got -2"),
        (6, "`embed_dim` must be at least 36, which is `div_val` to the power of the number of cutoffs, got 32"),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused(div_val, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        AdaptiveInput(VOCABULARY, DIM, [10, 20], div_val)


def test_the_least_size():
    """It need not be divisible: sizes are rounded down."""
    assert [table.embedding_dim for table in AdaptiveInput(VOCABULARY, 37, [10, 20], 6).tables] == [37, 6, 1]
