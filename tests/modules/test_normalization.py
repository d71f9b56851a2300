"""Sum and attention normalisation in cases that a layer seldom meets; Eqs. 24 to 28 are held in test_attention.py."""

import torch
from support.attentions import memories
from support.pairwise import looped

from fairseq_fwp import ops
from fairseq_fwp.modules.attention.memory import FastWeightState, Memory
from fairseq_fwp.modules.attention.normalization import AttentionNormalization, SumNormalization, running_sum
from fairseq_fwp.modules.update_rules import UPDATE_RULES

NORMALIZATION = AttentionNormalization()


def random(*shape):
    return torch.rand(*shape, dtype=torch.float64)


def delta_inputs(length=7, case=""):
    """Return q, k, v and beta, with keys of zero at the start or with keys that share no feature, by case."""
    q, k = random(2, 3, length, 4), random(2, 3, length, 4)
    v, beta = random(2, 3, length, 5) - 0.5, random(2, 3, length)
    if case == "padding":
        k[0, :, :3] = 0
    elif case == "orthogonal keys":
        k[:, :, :2, :2] = k[:, :, 2:4, 2:] = 0
    return q, k, v, beta


CASES = ["first position", "carried", "padding", "orthogonal keys"]


def normalised_delta(q, k, v, beta, state=None):
    """Return the outputs, the memory and z of the delta rule with attention normalisation."""
    memory = Memory(UPDATE_RULES["delta"], NORMALIZATION, "reference")
    out, after = memory.write_and_read(q, k, v, {"beta": beta}, state and FastWeightState(*state))
    return out, after.weights, after.normalizer


@looped("case", CASES)
def test_the_delta_rule_retrieves_a_normalised_value(case):
    """Eq. 27 with the plain operator: from an empty or carried memory, after padding, with unrelated keys."""
    q, k, v, beta = delta_inputs(case=case)
    state = (random(2, 3, 4, 5), random(2, 3, 4)) if case == "carried" else None
    outs = []
    for t, (w, z) in enumerate(memories("delta", k, v, [beta], True, state)):
        outs.append(ops.retrieve(q[:, :, t], w) / (q[:, :, t] * z).sum(-1, keepdim=True).clamp(min=1e-6))
    results = normalised_delta(q, k, v, beta, state)
    for result, value in zip(results, (torch.stack(outs, 2), w, z), strict=True):
        torch.testing.assert_close(result, value, rtol=1e-9, atol=1e-11)
    assert results[2].untyped_storage().nbytes() == z.numel() * z.element_size()  # not a slice of all sums


@looped("case", CASES)
def test_an_added_epsilon_shrinks_the_write_as_the_public_code_does(case):
    """It multiplies beta by c = z . k (1 for an empty memory), and divides the key by c + epsilon."""
    q, k, v, beta = (x.requires_grad_() for x in delta_inputs(case=case))
    z, epsilon = running_sum(k, random(2, 3, 4) if case == "carried" else None), 1e-2
    c = torch.where(z[:, :, :-1].eq(0).all(-1), 1, (z[:, :, :-1] * k).sum(-1))
    expected, _ = ops.delta_rule(q, k / (c + epsilon).unsqueeze(-1), v, beta * c, backend="reference")
    normalization = AttentionNormalization(epsilon, add_epsilon=True)
    keys, values = normalization.normalize_retrieval(k, v, z)
    result, _ = ops.delta_rule(q, keys, values, beta, backend="reference")
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(result.sum(), (q, v, beta), retain_graph=True))
    assert torch.autograd.grad(keys.sum(), k)[0].isfinite().all()


def test_zero_features_stay_zero_with_a_finite_gradient():
    features = torch.zeros(2, 4, requires_grad=True)
    normalized = SumNormalization()(features)
    assert torch.equal(normalized, torch.zeros(2, 4))
    normalized.sum().backward()
    assert features.grad.isfinite().all()


def test_the_retrieval_divisor_by_hand():
    """It is 1 if nothing is stored under the key, the bound if almost nothing is, and otherwise z . k."""
    k = torch.tensor([[0.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.0, 1.0], [1e-9, 0.0]]).reshape(1, 1, 5, 2)
    divisor = NORMALIZATION.retrieval_divisor(k, running_sum(k))
    torch.testing.assert_close(divisor.flatten(), torch.tensor([1.0, 1.0, 6.0, 1.0, 1e-6]))
    carried = NORMALIZATION.retrieval_divisor(k, running_sum(k, torch.tensor([0.5, 0.25]).reshape(1, 1, 2)))
    torch.testing.assert_close(carried.flatten(), torch.tensor([1.0, 1.0, 7.5, 0.25, 1e-6]))


@looped("add_epsilon", [False, True])
def test_what_a_document_retrieves_is_divided_as_if_it_were_the_only_one(add_epsilon):
    normalization = AttentionNormalization(0.5, add_epsilon)
    k, v = random(2, 3, 6, 4), random(2, 3, 6, 5)
    first = torch.arange(6).eq(4).expand(2, 6)
    whole = normalization.normalize_retrieval(k, v, running_sum(k, None, first), first)
    alone = normalization.normalize_retrieval(k[:, :, 4:], v[:, :, 4:], running_sum(k[:, :, 4:]))
    for x, y in zip(whole, alone, strict=True):
        torch.testing.assert_close(x[:, :, 4:], y)


def test_epsilon_bounds_or_is_added():
    """By default a sum above 1e-6 divides exactly, and a smaller one counts as 1e-6."""
    k = torch.tensor([0.0, 1.0, 1e-5]).reshape(1, 1, 3, 1)
    q = torch.tensor([1.0, 2.0, 1e-5]).reshape(1, 1, 3, 1)
    z, features = running_sum(k), torch.tensor([[0.005, 0.0], [1e-7, 1e-7]])
    for given, divisors, sums in (
        ((), [1e-6, 2.0, 1.00001e-5], [[1.0, 0.0], [0.1, 0.1]]),
        ((1e-2,), [1e-2, 2.0, 1e-2], [[0.5, 0.0], [1e-5, 1e-5]]),
        ((1e-2, True), [1e-2, 2.01, 0.01001], [[1 / 3, 0.0], [1e-7 / 0.0100002] * 2]),
    ):
        found = AttentionNormalization(*given).output_divisor(q, z).flatten()
        torch.testing.assert_close(found, torch.tensor(divisors))
        torch.testing.assert_close(SumNormalization(*given)(features), torch.tensor(sums))
    found = AttentionNormalization(1e-2).retrieval_divisor(k, z).flatten()
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0, 1e-2]))


@looped("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_divisors_are_float32(dtype):
    q, k = (x.float().to(dtype) for x in delta_inputs(4000)[:2])
    z = running_sum(k)
    exact = running_sum(k.double())
    torch.testing.assert_close(z.double(), exact, rtol=1e-5, atol=0)
    for divisor, x in ((NORMALIZATION.output_divisor, q), (NORMALIZATION.retrieval_divisor, k)):
        result = divisor(x, z)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), divisor(x.double(), exact), rtol=3e-6, atol=0)


def test_half_precision_survives_small_divisors():
    """With small features, as of long vectors, beta divided by z . k would overflow float16."""
    q, k, v, beta = delta_inputs()
    inputs = [x.half() for x in (q, k * 1e-3, v, beta)]
    _, expected, _ = normalised_delta(*(x.double() for x in inputs))
    _, weights, _ = normalised_delta(*inputs)
    assert (weights.double() - expected).norm() < 1e-3 * expected.norm()


def test_gradients_are_finite_where_divisors_vanish():
    """The divisor is zero after padding, which a layer masks, and for a query without a matching key."""
    inputs = [x.requires_grad_() for x in delta_inputs()]
    padding = torch.tensor([True] * 3 + [False] * 4).unsqueeze(-1)
    unrelated = torch.tensor([False] * 6 + [True]).unsqueeze(-1)
    q, k = inputs[0].masked_fill(unrelated, 0), inputs[1].masked_fill(padding, 0)
    out, weights, z = normalised_delta(q, k, *inputs[2:])
    assert not out[:, :, :3].any() and not out[:, :, 6:].any()
    (out.sum() + weights.sum() + z.sum()).backward()
    assert all(x.grad.abs().max() < 1e3 for x in inputs)
