"""Whole models as one graph: torch.export, to a file and back, and torch.compile."""

import io

import pytest
import torch
from support.pairwise import looped
from support.small_models import build, random_tokens
from torch.export import Dim

FAST = ("delta", "softmax", "relative")
MODELS = [*FAST, "decay", "sum", "gated", "delta_favor", "local", "softmax last", "layerwise"]


@pytest.fixture(params=[pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in MODELS])
def model(request):
    kind = request.param
    return build(kind, tokens_per_sample=32, **({} if kind in ("relative", "layerwise") else {"fwp_backend": "auto"}))


def padded(model, *shape):
    tokens = random_tokens(*shape)
    tokens[1, :2] = model.decoder.padding_idx
    return tokens


def assert_same(found, expected):
    """Compare the features and every tensor of the state except padding (a graph always has a mask)."""
    torch.testing.assert_close(found[0], expected[0])
    for layer, truth in zip(found[1]["state"].layers, expected[1]["state"].layers, strict=True):
        assert type(layer) is type(truth)
        torch.testing.assert_close(layer[0], truth[0])


def saved_and_loaded(*arguments, **options):
    file = io.BytesIO()
    torch.export.save(torch.export.export(*arguments, **options), file)
    file.seek(0)
    return torch.export.load(file).module()


def test_a_model_is_exported_saved_and_loaded_with_its_state(model):
    tokens, more, other = padded(model, 2, 7), padded(model, 2, 7), padded(model, 3, 7)
    start = saved_and_loaded(model, (tokens,), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert_same(start(other), model(other))
    state = model(tokens)[1]["state"]
    step = saved_and_loaded(model, (more,), {"state": state})
    assert_same(step(more, state=start(tokens)[1]["state"]), model(more, state=state))


@pytest.mark.slow
@looped("kind", ["delta", "softmax", "relative"])
def test_the_compiled_code_of_inductor_gives_the_same_gradients(kind):
    """For two sizes of a batch, the second with dynamic shapes."""
    torch.compiler.reset()
    model = build(kind, tokens_per_sample=32, dropout=0.0).train()
    compiled = torch.compile(model)
    for rows in (2, 3):
        tokens = random_tokens(rows, 7)
        found, expected = (
            torch.autograd.grad(each(tokens)[0].square().sum(), [*model.parameters()], allow_unused=True)
            for each in (compiled, model)
        )
        torch.testing.assert_close(found, expected)


def test_a_model_compiles_into_one_graph(model):
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for tokens in (random_tokens(2, 7), padded(model, 2, 7)):
        found, expected = compiled(tokens), model(tokens)
        assert_same(found, expected)
        assert_same(compiled(tokens, state=found[1]["state"]), model(tokens, state=expected[1]["state"]))
