"""Laws of every causal attention: every rule and map of the tables, softmax, local and Transformer-XL's."""

import copy
import itertools

import torch
from support.attentions import BASELINES, DIM, FAST_WEIGHTS, KINDS, MODERN, build, half_precision_error, random
from support.pairwise import looped
from torch.utils._pytree import tree_leaves

from fairseq_fwp.modules.attention.base import detach, reorder
from fairseq_fwp.modules.attention.memory import Memory

PACKING = FAST_WEIGHTS + list(MODERN)
PACKING += [(name,) for name in ("delta_rnn", "mlstm", "recurrent_delta", "srwm", "time_mix")]
HALF_ERROR = 0.02
every_attention = looped("kind", KINDS)


@every_attention
def test_pieces_with_the_carried_state_are_the_whole(kind):
    """Rows of a state can be selected, and a detached state has the same values without a graph."""
    layer, x, order = build(kind), random(3, 9, DIM).requires_grad_(), torch.tensor([2, 0, 2])
    whole, last = layer(x)
    _, state = layer(x[:, :4])
    _, state = layer(x[:, 4:5], state)
    after, end = layer(x[:, 5:], state)
    torch.testing.assert_close(after, whole[:, 5:])
    torch.testing.assert_close(layer(x[:, :4])[0], whole[:, :4])
    for ours, theirs in zip(tree_leaves(end), tree_leaves(last), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(layer(x[order, 5:], reorder(state, order))[0], whole[order, 5:])
    (flows,) = torch.autograd.grad(after.sum(), x)
    cut = detach(state)
    assert not any(part.requires_grad for part in tree_leaves(cut) if part is not None)
    detached = layer(x[:, 5:], cut)[0]
    assert torch.equal(detached, after)
    (ends,) = torch.autograd.grad(detached.sum(), x)
    assert flows[:, :5].any() and not ends[:, :5].any()


@every_attention
def test_an_output_depends_on_no_later_token_and_on_no_padding(kind):
    """Nor do later outputs depend on padding, on either side."""
    layer, x, more = build(kind), random(2, 6, DIM), random(2, 1, DIM)
    expected, expected_state = layer(x)
    changed = x.clone()
    changed[:, 4:] += 1
    assert torch.equal(layer(changed)[0][:, :4], expected[:, :4])
    assert not torch.allclose(layer(changed)[0][:, 4:], expected[:, 4:])
    for places in (slice(3, None), slice(None, 6)):
        padded, mask = 10 * random(2, 9, DIM), torch.ones(2, 9, dtype=torch.bool)
        padded[:, places], mask[:, places] = x, False
        y, state = layer(padded, key_padding_mask=mask)
        torch.testing.assert_close(y[:, places], expected)
        assert y.isfinite().all()
        torch.testing.assert_close(layer(more, state)[0], layer(more, expected_state)[0])
    if kind in FAST_WEIGHTS:  # gates are 1 at padding, where rules that forget keep everything
        _, after = layer(x, expected_state, torch.ones(2, 6, dtype=torch.bool))
        assert all(old is new is None or torch.equal(old, new) for old, new in zip(expected_state, after, strict=True))


@looped("kind", PACKING)
@looped("padded, backend", [(False, "reference"), (True, "auto")])
def test_packed_documents_are_read_as_if_alone(kind, padded, backend):
    """Documents shorter and longer than a convolution; in pieces; with padding anywhere."""
    layer, x, first = build(kind, backend=backend), random(2, 12, DIM), torch.zeros(2, 12, dtype=torch.bool)
    starts = ([0, 5, 6, 8, 12], [0, 4, 12])
    for row, (_, *inner, _) in enumerate(starts):
        first[row, inner] = True
    alone = [
        [layer(x[row : row + 1, begin:end]) for begin, end in itertools.pairwise(places)]
        for row, places in enumerate(starts)
    ]
    expected = torch.cat([torch.cat([y for y, _ in documents], 1) for documents in alone])
    mask, places = None, torch.arange(12)
    if padded:
        places = torch.tensor([1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 15, 16])
        mask = torch.ones(2, 18, dtype=torch.bool).index_fill(1, places, False)
        x, first = random(2, 18, DIM).index_copy(1, places, x), torch.zeros_like(mask).index_copy(1, places, first)
    y, state = layer(x, None, mask, first)
    torch.testing.assert_close(y[:, places], expected)
    for row, (*_, (_, last)) in enumerate(alone):
        for ours, theirs in zip(state, last, strict=True):
            assert ours is theirs is None or torch.allclose(ours[row : row + 1], theirs)
    state, outs = None, []
    for piece in torch.arange(x.shape[1]).split(4):
        out, state = layer(x[:, piece], state, None if mask is None else mask[:, piece], first[:, piece])
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1)[:, places], y[:, places])


def test_a_document_may_begin_and_end_at_padding():
    """A beginning that stands at padding empties the state too."""
    layer, x = build(("delta", "silu", "DeltaNet")), random(1, 5, DIM)
    first = torch.tensor([[False, False, True, False, False]])
    _, state = layer(x, None, torch.tensor([[False, False, True, True, True]]), first)
    assert not state.recent.any() and not state.weights.any()
    assert layer(x[:, :0], state, None, first[:, :0])[1].recent.shape == (1, 3, 3 * DIM)


@looped("kind", [kind for kind in KINDS if kind[0] not in ("relative", "shaw")])  # their decoder counts the memory
def test_the_size_of_the_state(kind):
    """It has a bound where the attention says so; z does not count."""
    layer = build(kind)
    _, state = layer(random(1, 3, DIM))
    counted = [part for name, part in state._asdict().items() if name != "normalizer"]
    assert layer.state_size(3) == sum(part.numel() for part in tree_leaves(counted) if part is not None)
    assert (layer.state_size(99) == layer.state_size(50, carried=True)) == layer.constant_state


@every_attention
def test_transforms_of_functions(kind):
    """Gradients of each sample and derivatives in forward mode are those of autograd."""
    layer, x = build(kind), random(3, 1, 5, DIM)
    parameters = dict(layer.named_parameters())
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    along = {name: torch.randn_like(value) for name, value in values.items()}
    for module in layer.modules():
        for part in vars(module).values():
            if isinstance(part, Memory):
                part.backend = "reference"

    def loss(values, sample):
        return torch.func.functional_call(layer, values, (sample,))[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, x)
    _, slopes = torch.func.jvp(lambda values: torch.stack([loss(values, sample) for sample in x]), (values,), (along,))
    for i, sample in enumerate(x):
        gradients = torch.autograd.grad(loss(parameters, sample), list(parameters.values()))
        for name, expected in zip(parameters, gradients, strict=True):
            torch.testing.assert_close(found[name][i], expected)
        slope = sum((gradient * along[name]).sum() for name, gradient in zip(parameters, gradients, strict=True))
        torch.testing.assert_close(slopes[i], slope)


@looped("kind", KINDS)
@looped("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(kind, dtype):
    """A half-precision layer, and a float32 layer under autocast, are close to float32.

    The state of fast weights is in float32.
    """
    layer = build(kind, backend="auto").float()
    x = torch.randn(8, 12, DIM)
    expected = layer(x)[0]
    with torch.autocast("cpu", dtype):
        mixed = layer(x)
    half = copy.deepcopy(layer).to(dtype)(x.to(dtype))
    for out, state in (mixed, half):
        assert out.dtype == dtype and half_precision_error(out, expected) < HALF_ERROR
        assert kind in BASELINES or all(part is None or part.dtype == torch.float32 for part in state)
