"""Laws of only the fwm rule: when a memory is rescaled, and a backward pass in chunks."""

import functools

import torch
from support.pairwise import looped

from fairseq_fwp import ops
from fairseq_fwp.ops.reference import CHUNK

# A function of q, k, v, beta and the state.
every_backend = looped("fwm", [functools.partial(ops.fwm_rule, backend=name) for name in ("reference", "auto")])
both_starts = looped("state", [None, torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0)).double()])


def tokens(length, *, batch=2, heads=3, key_size=5, value_size=4, dtype=torch.float64):
    """Return q, k, v, beta: keys of length one, values of length about two, so that every step rescales the memory."""
    q, k = torch.randn(2, batch, heads, length, key_size, dtype=torch.float64)
    v = torch.randn(batch, heads, length, value_size, dtype=torch.float64)
    beta = 0.1 + 0.8 * torch.rand(batch, heads, length, dtype=torch.float64)
    return [x.to(dtype) for x in (q, torch.nn.functional.normalize(k, dim=-1), v, beta)]


def results(function, tensors, state=None):
    """Return out, the new state, and the gradients of a random projection of both by every tensor that is given."""
    given = [x.detach().requires_grad_() for x in (*tensors, *(() if state is None else (state,)))]
    found, generator = function(*given), torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in found]
    return *found, *torch.autograd.grad(found, given, weights)


@every_backend
def test_by_hand(fwm):
    """Hand-computed with 3-4-5 and 5-12-13 triangles."""
    q = torch.tensor([[1.0, 0.0], [13.0, 13.0], [13.0, 13.0], [2.0, 1.0]])
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 2.0]])
    v = torch.tensor([[6.0, 8.0], [0.0, 12.0], [0.0, 0.0], [12 / 13, 0.0]])
    beta = torch.tensor([0.5, 1.0, 1.0, 0.5])
    out, state = fwm(*(x[None, None] for x in (q, k, v, beta)))
    expected = [
        [3, 4],  # W = [[3, 4], [0, 0]]: of norm 5, but the first write is not rescaled
        [3, 16],  # [[3, 4], [0, 12]] / 13
        [3, 4],  # [[3, 4], [0, 0]] / 13: norm below one, so not rescaled
        [18 / 13, 8 / 13],  # [[3, 4], [12, 0]] / 13: of norm one
    ]
    torch.testing.assert_close(out, torch.tensor([[expected]]))
    torch.testing.assert_close(state, torch.tensor([[[[3.0, 4.0], [12.0, 0.0]]]]) / 13)


@every_backend
def test_norm_is_at_most_one_after_the_second_write(fwm):
    tensors = tokens(40)
    norms = torch.stack([fwm(*(x[:, :, :t] for x in tensors))[1].norm(dim=(-2, -1)) for t in range(1, 41)])
    assert (norms[0] > 1).any() and (norms[0] < 1).any()
    assert norms[1:].max() <= 1 + 1e-12
    assert (norms[1:] > 1 - 1e-12).any() and (norms[1:] < 0.999).any()  # some were rescaled, some were not


@every_backend
def test_only_zeros_are_empty(fwm):
    """Also where a memory was erased: otherwise the result would depend on more than the carried state."""
    tensors, zeros = tokens(9), torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    for x, y in zip(results(fwm, tensors), results(fwm, tensors, -zeros), strict=False):
        assert torch.equal(x, y)
    k, v = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]]]])
    for entry, norm in ((0.0, 5.0), (1e-30, 1.0)):  # whose square is zero in float32
        _, state = fwm(k, k, v[:, :, :1], torch.ones(1, 1, 1), torch.full((1, 1, 2, 2), entry))
        torch.testing.assert_close(state.norm().item(), norm)
    out, _ = fwm(k.expand(1, 1, 3, 2), k.expand(1, 1, 3, 2), v, torch.ones(1, 1, 3))
    assert out.tolist() == [[[[3, 4], [0, 0], [6, 8]]]]


@every_backend
@looped("padding", [1, 3])
@both_starts
def test_padding_changes_nothing(fwm, padding, state):
    """Padding changes nothing before the first write, after it (with a norm above one), or at the end."""
    where, length = torch.tensor([2, 5, 6, 9, 70]), 73
    tensors = tokens(5)
    tensors[2] *= 3
    longer = [torch.randn(*x.shape[:2], length, *x.shape[3:], dtype=x.dtype) for x in tensors]
    longer[padding][:] = 0

    def with_padding(*given):
        out, after = fwm(*(x.index_copy(2, where, y) for x, y in zip(longer, given, strict=False)), *given[4:])
        return out[:, :, where], after

    (out, after, *gradients), (long_out, long_after, *of_long) = (
        results(function, tensors, None if state is None else 3 * state) for function in (fwm, with_padding)
    )
    assert torch.equal(long_out, out) and torch.equal(long_after, after)
    torch.testing.assert_close(of_long, gradients, rtol=1e-12, atol=1e-12)


@every_backend
def test_each_sequence_and_head_decides_for_itself(fwm):
    """A batch with an empty memory, a padded token, a memory that is rescaled and one that is not."""
    tensors, state = tokens(6, heads=2), torch.randn(2, 2, 5, 4, dtype=torch.float64)
    state[0, 0] = 0
    tensors[2][0, 0] *= 10
    tensors[1][0, 1, :3] = 0
    state[1, 0] *= 0.01
    tensors[2][1, 0] *= 0.01
    together = results(fwm, tensors, state)[:2]
    for b, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
        own = fwm(*(x[b, h][None, None] for x in (*tensors, state)))
        torch.testing.assert_close([x[0, 0] for x in own], [y[b, h] for y in together], rtol=1e-13, atol=1e-13)


@every_backend
@looped("first", [0.5, 4.0])
def test_gradcheck_from_the_empty_memory_over_padding_and_rescaling(fwm, first):
    q, k, v, beta = tokens(6, batch=1, heads=1, key_size=3, value_size=2)
    v[:, :, 1] *= first / v[:, :, 1].norm()
    v[:, :, 3:] *= 4
    beta[:, :, 1] = 0.5
    mask = torch.ones(6, 1, dtype=torch.float64)
    mask[[0, 2]] = 0  # padding: before the first write and just after it
    given = [x.requires_grad_() for x in (q, k, v, beta)]

    def function(q, k, v, beta):
        return fwm(q, k * mask, v, beta)

    assert torch.autograd.gradcheck(function, given)
    if fwm.keywords["backend"] == "reference":
        assert torch.autograd.gradgradcheck(function, given)
    norms = [ops.fwm_rule(*(x[:, :, :t] for x in (q, k * mask, v, beta)))[1].norm(dim=(-2, -1)) for t in range(7)]
    assert bool((norms[2] > 1).all()) == (first > 1)
    assert any(abs(norm - 1) < 1e-12 for norm in torch.stack(norms[3:]).flatten())


@every_backend
def test_gradcheck_of_an_empty_state(fwm):
    """Gradients equal finite differences if the first write is short, so that W is continuous there."""
    given = tokens(4, batch=1, heads=2, key_size=3, value_size=2)
    given[2][:, :, 0] *= 0.1
    given.append(torch.zeros(1, 2, 3, 2, dtype=torch.float64))
    assert torch.autograd.gradcheck(fwm, [x.requires_grad_() for x in given])


@every_backend
@looped("zeroed", range(4))
def test_gradients_of_nothing_written_are_finite(fwm, zeroed):
    """The norm has no derivative at zero, and a comparison chooses the scale: neither may make a gradient NaN."""
    tensors = tokens(5)
    tensors[zeroed].zero_()
    found = results(fwm, tensors, torch.zeros(2, 3, 5, 4, dtype=torch.float64))
    assert all(x.isfinite().all() for x in found)


@looped("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 37])
@both_starts
def test_chunks_equal_the_derivative_of_the_loop(length, state):
    tensors = tokens(length)
    tensors[1][0, :, : CHUNK + 1] = 0  # empty at the first boundary
    tensors[3][1, 1, 20:] = 0
    reference = functools.partial(ops.fwm_rule, backend="reference")
    found, expected = (results(function, tensors, state) for function in (ops.fwm_rule, reference))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_opcheck_over_several_chunks():
    """States with other strides compile too: the fake operator must predict the strides of the results."""
    for state in (None, torch.randn(2, 1, 4, 5).transpose(2, 3)):
        given = [*tokens(CHUNK + 2, heads=1, dtype=torch.float32), state]
        arguments = [None if x is None else x.requires_grad_() for x in given]
        torch.library.opcheck(torch.ops.fwp.fwm_rule.default, (*arguments, None))
