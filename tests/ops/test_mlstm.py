"""mLSTM against its equations, token by token, in the steps of public code; its bits, documents and refusals."""

import functools

import pytest
import torch
from support.operator_fixtures import on_one_and_three_threads
from support.pairwise import looped

from fairseq_fwp.ops import MlstmState, mlstm_rule

NAMES = ("out", "weights", "normalizer", "maximum", "q", "k", "v", "input_gate", "forget_gate")
every_backend = looped("backend", ["kernel", "reference"])


def tokens(batch=2, heads=3, length=70, keys=5, values=7, dtype=torch.float64, strong=3.0):
    """Return q, k, v and both gates: new maxima come in the middle of sequences, and decays of all sizes."""
    q, k = torch.randn(2, batch, heads, length, keys, dtype=torch.float64)
    v = torch.randn(batch, heads, length, values, dtype=torch.float64)
    input_gate, forget_gate = strong * torch.randn(2, batch, heads, length, dtype=torch.float64)
    return [x.to(dtype) for x in (q, k, v, input_gate, forget_gate + 2)]


def some_state(batch=2, heads=3, keys=5, values=7, dtype=torch.float64):
    sizes = [(batch, heads, keys, values), (batch, heads, keys), (batch, heads)]
    return MlstmState(*(torch.randn(size, dtype=torch.float64).to(dtype) for size in sizes))


def loop(q, k, v, input_gate, forget_gate, state=None, first=None, epsilon=1e-6):
    """Beck et al. 2024, Eqs. 19-27 in the stabilised form: C, n and m, one token after the other."""
    if state is None:
        C, n, m = (q.new_zeros(*q.shape[:2], *size) for size in ((q.shape[3], v.shape[3]), (q.shape[3],), ()))
    else:
        C, n, m = state
    outs = []
    for t in range(q.shape[2]):
        if first is not None:
            begins = first[:, t, None]
            C, n, m = C.masked_fill(begins[..., None, None], 0), n.masked_fill(begins[..., None], 0), m * ~begins
        log_f, log_i = -torch.log1p(torch.exp(-forget_gate[:, :, t])), input_gate[:, :, t]
        new = torch.maximum(log_f + m, log_i)
        f, i, m = torch.exp(log_f + m - new)[..., None], torch.exp(log_i - new)[..., None], new
        C = f[..., None] * C + (i * k[:, :, t])[..., None] * v[:, :, t, None, :]
        n = f * n + i * k[:, :, t]
        read, sums = torch.einsum("bhk,bhkv->bhv", q[:, :, t], C), (q[:, :, t] * n).sum(-1, keepdim=True)
        outs.append(read / (torch.maximum(sums.abs(), torch.exp(-m)[..., None]) + epsilon))
    return torch.stack(outs, 2), MlstmState(C, n, m)


def results(function, given, state, **options):
    """Return out, the new state, and the gradients of a random projection of all, by name."""
    leaves = [x.detach().requires_grad_() for x in (*given, *(state or ()))]
    out, after = function(*leaves[:5], MlstmState(*leaves[5:]) if state else None, **options)
    found, generator = (out, *after), torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in found]
    grads = torch.autograd.grad(found, leaves, weights)
    return dict(zip((*NAMES, "C_0", "n_0", "m_0"), (*found, *grads), strict=False))


@every_backend
@looped("length", [1, 64, 140])
@looped("with_state", [True, False])
def test_equals_the_equations(backend, length, with_state):
    given, state = tokens(length=length), some_state() if with_state else None
    first = torch.zeros(2, length, dtype=torch.bool)
    first[0, [0, length // 2]] = first[1, length - 1] = True
    for documents in (None, first):
        truth = results(loop, given, state, first=documents)
        found = results(mlstm_rule, given, state, first=documents, backend=backend)
        errors = {name: ((found[name] - x).abs().max() / x.abs().max()).item() for name, x in truth.items()}
        assert max(errors.values()) <= 1e-12, errors


def test_float32_is_as_accurate_as_the_equations_in_float32():
    """With keys and queries above 0: next to a divisor of zero, one draw of rounding is as bad as another."""
    for length, keys, values in ((80, 24, 40), (33, 256, 64)):
        errors = {mlstm_rule: [], loop: []}
        for _ in range(9):
            q, k, *others = tokens(1, 4, length, keys, values)
            narrow = [x.float() for x in (q.abs(), k.abs(), *others)], some_state(1, 4, keys, values, torch.float32)
            truth = results(loop, *([x.double() for x in part] for part in narrow))
            for function, found in errors.items():
                computed = results(function, *narrow)
                found.append([((computed[name] - x).norm() / x.norm()).item() for name, x in truth.items()])
        ours, loops = (torch.tensor(found).median(0).values for found in errors.values())
        assert (ours <= 2 * loops + torch.finfo(torch.float32).eps).all(), (length, ours, loops)


def test_batch_threads_and_splits_change_no_bit():
    for shape in ((3, 2, 200, 16, 16), (2, 2, 150, 64, 64), (2, 1, 140, 256, 64), (2, 1, 150, 17, 33)):
        given, state = tokens(*shape, dtype=torch.float32), some_state(*shape[:2], *shape[3:], dtype=torch.float32)
        first = torch.zeros(shape[0], shape[2], dtype=torch.bool)
        first[0, [3, 64, 100]] = True  # of another row
        of_row, in_row = [x[1:2] for x in given], MlstmState(*(x[1:2] for x in state))
        out, final = mlstm_rule(*of_row, in_row)
        batch_out, batch_final = mlstm_rule(*given, state, first=first)
        found = [(batch_out[1:2], *(x[1:2] for x in batch_final))]
        found += [(o, *s) for o, s in on_one_and_three_threads(functools.partial(mlstm_rule, *of_row, in_row))]
        for cut in range(64, shape[2], 64):
            before, carried = mlstm_rule(*(x[:, :, :cut] for x in of_row), in_row)
            after, last = mlstm_rule(*(x[:, :, cut:] for x in of_row), carried)
            found.append((torch.cat([before, after], 2), *last))
        assert all(torch.equal(x, y) for other in found for x, y in zip(other, (out, *final), strict=True)), shape


def test_gates_may_have_any_size():
    """Padding, as of a layer, changes nothing; closed gates, and tokens far below e^-88, give no NaN."""
    q, k, v, input_gate, forget_gate = tokens(dtype=torch.float32)
    input_gate[:, :, 20:30], forget_gate[:, :, 20:30] = -torch.inf, torch.inf
    _, before = mlstm_rule(*(x[:, :, :20] for x in (q, k, v, input_gate, forget_gate)))
    _, after = mlstm_rule(*(x[:, :, :30] for x in (q, k, v, input_gate, forget_gate)))
    _, same = mlstm_rule(*(x[:, :, :0] for x in (q, k, v, input_gate, forget_gate)), before)
    assert all(torch.equal(x, y) for other in (after, same) for x, y in zip(before, other, strict=True))
    first = torch.zeros(2, 70, dtype=torch.bool)
    first[:, 35] = True
    for closed in ((-torch.inf, 3.0), (-200.0, -200.0), (300.0, -torch.inf)):
        gates = [torch.full_like(input_gate, number) for number in closed]
        gates[0][:, :, :35] = 200  # of an earlier document
        found = results(mlstm_rule, [q, k, v, *gates], None, first=first)
        assert all(x.isfinite().all() for x in found.values()), closed


@looped("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_a_float32_state_and_shares_heads(dtype):
    given = tokens(dtype=dtype, heads=4, strong=1.0)
    shared = [given[0][:, ::2], given[1][:, ::2], *given[2:3], *(x.float() for x in given[3:])]
    out, state = mlstm_rule(*shared)
    wide = [x.double() for x in shared]
    wide[:2] = (x.repeat_interleave(2, 1) for x in wide[:2])
    expected, final = loop(*wide)
    assert out.dtype == dtype and {x.dtype for x in state} == {torch.float32}
    assert (out.double() - expected).norm() <= 0.02 * expected.norm()
    assert (state.weights - final.weights).norm() <= 0.01 * final.weights.norm()


def test_refusals():
    q, k, v, i, f = tokens()
    for given, said in (
        ((q, k, v, i[:, :, 1:], f), r"mlstm_rule: input_gate must have shape \(B, H, L\) = \(2, 3, 70\), got"),
        ((q, k, v, i, f, some_state(keys=4)), r"mlstm_rule: state.weights must have shape \(B = 2"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            mlstm_rule(*given)
    with pytest.raises(ValueError, match="epsilon must be above 0, got 0"):
        mlstm_rule(q, k, v, i, f, epsilon=0)
