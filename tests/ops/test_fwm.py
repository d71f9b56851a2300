"""Laws of only the fwm rule: when a memory is rescaled, and a backward pass in chunks."""

import functools
import warnings

import pytest
import torch
from pairwise import looped

from fairseq_fwp import ops
from fairseq_fwp.kernels import backend
from fairseq_fwp.ops.reference import CHUNK

every_backend = pytest.mark.parametrize("backend", ["reference", "auto"])


def with_backend(backend):
    return functools.partial(ops.fwm_rule, backend=backend)


def tokens(length, *, batch=2, heads=3, key_size=5, value_size=4, dtype=torch.float64):
    """Return q, k, v, beta: keys of length one, values of length about two, so that every step rescales the memory."""
    q, k = torch.randn(2, batch, heads, length, key_size, dtype=torch.float64)
    v = torch.randn(batch, heads, length, value_size, dtype=torch.float64)
    beta = 0.1 + 0.8 * torch.rand(batch, heads, length, dtype=torch.float64)
    return [x.to(dtype) for x in (q, torch.nn.functional.normalize(k, dim=-1), v, beta)]


def gradients(function, tensors, state=None):
    """Return the gradients of a random projection of out and state by every tensor, and by the state if given."""
    given = [x.detach().requires_grad_() for x in (*tensors, *(() if state is None else (state,)))]
    results = function(*given)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results]
    return torch.autograd.grad(results, given, weights)


def padded(tensors, where, padding):
    """Insert tokens with a key (or rate) of zero: token i of a sequence moves to where[i]."""
    result = []
    for x in tensors:
        longer = torch.randn(*x.shape[:2], where[-1] + 3, *x.shape[3:], dtype=x.dtype)
        longer[:, :, where] = x
        result.append(longer)
    others = torch.ones(where[-1] + 3, dtype=torch.bool)
    others[where] = False
    result[1 if padding == "key" else 3][:, :, others] = 0
    return result


@every_backend
def test_by_hand(backend):
    """Hand-computed with 3-4-5 and 5-12-13 triangles."""
    q = torch.tensor([[1.0, 0.0], [13.0, 13.0], [13.0, 13.0], [2.0, 1.0]])
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 2.0]])
    v = torch.tensor([[6.0, 8.0], [0.0, 12.0], [0.0, 0.0], [12 / 13, 0.0]])
    beta = torch.tensor([0.5, 1.0, 1.0, 0.5])
    out, state = ops.fwm_rule(*(x[None, None] for x in (q, k, v, beta)), backend=backend)
    expected = [
        [3, 4],  # W = [[3, 4], [0, 0]]: of norm 5, but the first write is not rescaled
        [3, 16],  # [[3, 4], [0, 12]] / 13
        [3, 4],  # [[3, 4], [0, 0]] / 13: norm below one, so not rescaled
        [18 / 13, 8 / 13],  # [[3, 4], [12, 0]] / 13: of norm one
    ]
    torch.testing.assert_close(out, torch.tensor([[expected]]))
    torch.testing.assert_close(state, torch.tensor([[[[3.0, 4.0], [12.0, 0.0]]]]) / 13)


@every_backend
def test_norm_is_at_most_one_after_the_second_write(backend):
    tensors = tokens(40)
    norms = []
    state = None
    for t in range(40):
        _, state = ops.fwm_rule(*(x[:, :, t : t + 1] for x in tensors), state, backend=backend)
        norms.append(torch.linalg.vector_norm(state, dim=(-2, -1)))
    assert (norms[0] > 1).any() and (norms[0] < 1).any()
    after = torch.stack(norms[1:])
    assert after.max() <= 1 + 1e-12
    assert (after > 1 - 1e-12).any() and (after < 0.999).any()  # some were rescaled, some were not


@every_backend
def test_no_state_and_a_state_of_zeros_agree(backend):
    tensors = tokens(9)
    zeros = torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    function = with_backend(backend)
    for x, y in zip(function(*tensors), function(*tensors, -zeros), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(gradients(function, tensors), gradients(function, tensors, zeros), strict=False):
        assert torch.equal(x, y)


@every_backend
@looped(("entry", "norm"), [(0.0, 5.0), (1e-30, 1.0)])
def test_only_zeros_are_empty(backend, entry, norm):
    """The square of 1e-30 is zero in float32."""
    k, v = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[3.0, 4.0]]]])
    state = torch.full((1, 1, 2, 2), entry)
    _, state = ops.fwm_rule(k, k, v, torch.ones(1, 1, 1), state, backend=backend)
    torch.testing.assert_close(state.norm().item(), norm)


@every_backend
def test_an_erased_memory_is_empty_again(backend):
    """Otherwise the result would depend on more than the carried state."""
    k = torch.tensor([[[[1.0, 0.0]]]]).expand(1, 1, 3, 2)
    v = torch.tensor([[[[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]]]])
    out, _ = ops.fwm_rule(k, k, v, torch.ones(1, 1, 3), backend=backend)
    assert out.tolist() == [[[[3, 4], [0, 0], [6, 8]]]]


@every_backend
@looped("padding", ["key", "beta"])
@looped("with_state", [False, True], ids=["no_state", "state"])
def test_padding_changes_nothing(backend, padding, with_state):
    """Padding changes nothing before the first write, after it (with a norm above one), or at the end."""
    where = torch.tensor([2, 5, 6, 9, 70])
    tensors = tokens(5)
    tensors[2] *= 3
    longer = padded(tensors, where, padding)
    states = (3 * torch.randn(2, 3, 5, 4, dtype=torch.float64),) if with_state else ()
    function = with_backend(backend)
    out, state = function(*tensors, *states)
    long_out, long_state = function(*longer, *states)
    assert torch.equal(long_out[:, :, where], out) and torch.equal(long_state, state)

    def at_the_others(*given):
        out, state = function(*(x.index_copy(2, where, y) for x, y in zip(longer, given, strict=False)), *given[4:])
        return out[:, :, where], state

    expected = gradients(function, tensors, *states)
    for x, y in zip(gradients(at_the_others, tensors, *states), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@every_backend
def test_each_sequence_and_head_decides_alone(backend):
    """A batch with an empty memory, a padded token, a memory that is rescaled and one that is not."""
    tensors = tokens(6, batch=2, heads=2)
    state = torch.randn(2, 2, 5, 4, dtype=torch.float64)
    state[0, 0] = 0
    tensors[2][0, 0] *= 10
    tensors[1][0, 1, :3] = 0
    state[1, 0] *= 0.01
    tensors[2][1, 0] *= 0.01
    function = with_backend(backend)
    together = (*function(*tensors, state), *gradients(function, tensors, state))
    for b in range(2):
        for h in range(2):
            alone, own = [x[b, h][None, None] for x in tensors], state[b, h][None, None]
            for x, y in zip(function(*alone, own), together, strict=False):
                torch.testing.assert_close(x[0, 0], y[b, h], rtol=1e-13, atol=1e-13)


@every_backend
@looped("first", [0.5, 4.0], ids=["short_first_write", "long_first_write"])
def test_gradcheck_from_the_empty_memory_over_padding_and_rescaling(backend, first):
    q, k, v, beta = tokens(6, batch=1, heads=2)
    v[:, :, 1] *= first
    mask = torch.ones(6, 1, dtype=torch.float64)
    mask[[0, 2]] = 0  # padding: before the first write and just after it

    def function(q, k, v, beta):
        return ops.fwm_rule(q, k * mask, v, beta, backend=backend)

    given = [x.requires_grad_() for x in (q, k, v, beta)]
    assert torch.autograd.gradcheck(function, given)
    if backend == "reference":
        assert torch.autograd.gradgradcheck(function, given)
    norms = [ops.fwm_rule(*(x[:, :, :t] for x in (q, k * mask, v, beta)))[1].norm(dim=(-2, -1)) for t in range(7)]
    assert bool((norms[2] > 1).all()) == (first > 1)
    assert any(abs(norm - 1) < 1e-12 for norm in torch.stack(norms[3:]).flatten())


@every_backend
def test_gradcheck_of_an_empty_state(backend):
    """Gradients equal finite differences if the first write is short, so that W is continuous there."""
    given = tokens(4, batch=1, heads=2)
    given[2][:, :, 0] *= 0.1
    given.append(torch.zeros(1, 2, 5, 4, dtype=torch.float64))
    assert torch.autograd.gradcheck(with_backend(backend), [x.requires_grad_() for x in given])


@every_backend
def test_gradients_of_nothing_written_are_finite(backend):
    """The norm has no derivative at zero, and a comparison chooses the scale: neither may make a gradient NaN."""
    for zeroed in (0, 1, 2, 3):
        tensors = tokens(5)
        tensors[zeroed].zero_()
        state = torch.zeros(2, 3, 5, 4, dtype=torch.float64)
        assert all(x.isfinite().all() for x in gradients(with_backend(backend), tensors, state))


@looped("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 37])
@looped("with_state", [False, True], ids=["no_state", "state"])
def test_chunks_equal_the_derivative_of_the_loop(length, with_state):
    tensors = tokens(length)
    tensors[1][0, :, : CHUNK + 1] = 0  # empty at the first boundary
    tensors[3][1, 1, 20:] = 0
    states = (torch.randn(2, 3, 5, 4, dtype=torch.float64),) if with_state else ()
    expected = gradients(ops.fwm_rule_reference, tensors, *states)
    for x, y in zip(gradients(ops.fwm_rule, tensors, *states), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_opcheck_over_several_chunks():
    """States with other strides compile too: the fake operator must predict the strides of the results."""
    for state in (None, torch.randn(2, 1, 4, 5).transpose(2, 3)):
        given = [*tokens(CHUNK + 2, heads=1, dtype=torch.float32), state]
        arguments = [None if x is None else x.requires_grad_() for x in given]
        torch.library.opcheck(torch.ops.fwp.fwm_rule.default, (*arguments, None))


def test_without_a_kernel(monkeypatch):
    """There is no kernel to build, so nothing is built, and no warning mentions a compiler."""

    def refuse(device_type):
        raise AssertionError("asked for a kernel")

    monkeypatch.setattr(backend, "load_kernels", refuse)
    tensors = tokens(3)
    with pytest.raises(RuntimeError, match=r"no compiled kernel: use backend='auto'"):
        ops.fwm_rule(*tensors, backend="kernel")
    with pytest.raises(ValueError, match="backend must be one of"):
        ops.fwm_rule(*tensors, backend="fast")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = ops.fwm_rule(*tensors, backend="reference")
        with torch.no_grad():
            found = ops.fwm_rule(*tensors)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
