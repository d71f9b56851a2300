"""Sum and attention normalisation, the latter against a loop written from Eqs. 26 to 28."""

import torch
from pairwise import looped

from fairseq_fwp import ops
from fairseq_fwp.modules.attention.normalization import AttentionNormalization, SumNormalization, running_sum

NORMALIZATION = AttentionNormalization()


def attention_normalize(out, q, k, normalizer, **epsilon):
    """Compute Eqs. 26 and 28 as the layer does."""
    z = running_sum(k, normalizer)
    return (out / AttentionNormalization(**epsilon).output_divisor(q, z).unsqueeze(-1)).to(out.dtype), z[
        :, :, -1
    ].clone()


def test_sum_normalized_features_sum_to_one():
    features = torch.rand(3, 5, 7, dtype=torch.float64)
    normalized = SumNormalization()(features)
    torch.testing.assert_close(normalized.sum(-1), torch.ones(3, 5, dtype=torch.float64))
    torch.testing.assert_close(normalized * features.sum(-1, keepdim=True), features)


def test_zero_features_stay_zero_with_a_finite_gradient():
    features = torch.zeros(2, 4, requires_grad=True)
    normalized = SumNormalization()(features)
    assert torch.equal(normalized, torch.zeros(2, 4))
    normalized.sum().backward()
    assert features.grad.isfinite().all()


def test_the_bounds_are_the_documented_ones():
    """A sum above 1e-6 divides exactly, a smaller one counts as 1e-6, and so does z . q."""
    features = torch.tensor([[1e-4, 3e-4], [1e-7, 1e-7]], dtype=torch.float64)
    expected = torch.tensor([[0.25, 0.75], [0.1, 0.1]], dtype=torch.float64)
    torch.testing.assert_close(SumNormalization()(features), expected)
    q = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    k = torch.tensor([1e-7, 1e-4], dtype=torch.float64).reshape(1, 1, 2, 1)
    out, _ = attention_normalize(torch.ones(1, 1, 2, 1, dtype=torch.float64), q, k, None)
    torch.testing.assert_close(out.flatten(), torch.tensor([1e6, 1 / 1.001e-4], dtype=torch.float64))


def test_half_precision_sums_in_float32():
    q, k = torch.rand(2, 1, 2, 4000, 8).to(torch.bfloat16).unbind(0)
    read = torch.randn(1, 2, 4000, 3).to(torch.bfloat16)
    out, normalizer = attention_normalize(read, q, k, None)
    assert out.dtype == torch.bfloat16 and normalizer.dtype == torch.float32
    torch.testing.assert_close(normalizer.double(), k.double().sum(2), rtol=1e-5, atol=0)


def test_attention_normalization_is_the_weighted_average_of_values():
    """With the sum rule it is Eq. 13: weights k_j . q_i divided by their sum."""
    q, k = torch.rand(2, 2, 3, 5, 4, dtype=torch.float64).unbind(0)
    v = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    scores = (q @ k.transpose(-1, -2)).tril()
    out, normalizer = attention_normalize(scores @ v, q, k, None)
    torch.testing.assert_close(out, scores / scores.sum(-1, keepdim=True) @ v)
    torch.testing.assert_close(normalizer, k.sum(2))


def test_the_normalizer_is_carried():
    q, k = torch.rand(2, 2, 3, 6, 4, dtype=torch.float64).unbind(0)
    read = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    whole, last = attention_normalize(read, q, k, None)
    first, carried = attention_normalize(read[:, :, :2], q[:, :, :2], k[:, :, :2], None)
    second, carried = attention_normalize(read[:, :, 2:], q[:, :, 2:], k[:, :, 2:], carried)
    torch.testing.assert_close(torch.cat([first, second], 2), whole)
    torch.testing.assert_close(carried, last)
    _, unchanged = attention_normalize(read[:, :, :0], q[:, :, :0], k[:, :, :0], carried)
    assert torch.equal(unchanged, carried)


def equations_24_and_26_to_28(q, k, v, beta, weights, z):
    """Compute the delta rule with attention normalisation by head and token; an empty memory retrieves 0."""
    outs = []
    for q_t, k_t, v_t, beta_t in zip(q, k, v, beta, strict=True):
        retrieved = torch.zeros_like(v_t) if not z.any() else k_t @ weights / (z @ k_t).clamp(min=1e-6)
        weights = weights + beta_t * torch.outer(k_t, v_t - retrieved)
        z = z + k_t
        outs.append(q_t @ weights / (z @ q_t).clamp(min=1e-6))
    return torch.stack(outs), weights, z


def delta_with_attention_normalization(q, k, v, beta, weights=None, z_0=None, half=False):
    """Compute the same with the operator, as a layer does; half: in the form for half precision."""
    z = running_sum(k, z_0)
    divisor, c = NORMALIZATION.output_divisor(q, z), NORMALIZATION.retrieval_divisor(k, z)
    k, v, beta = (k / c.sqrt()[..., None], c.sqrt()[..., None] * v, beta) if half else (k, c[..., None] * v, beta / c)
    out, weights = ops.delta_rule(q, *(x.to(q.dtype) for x in (k, v, beta)), weights, backend="reference")
    return out / divisor[..., None], weights, z[:, :, -1]


def delta_inputs(length=7, dtype=torch.float64):
    q, k = torch.rand(2, 2, 3, length, 4, dtype=dtype).unbind(0)
    return q, k, torch.randn(2, 3, length, 5, dtype=dtype), torch.rand(2, 3, length, dtype=dtype)


def by_the_equations(inputs, weights=None, z=None):
    q = inputs[0]
    weights = q.new_zeros(2, 3, 4, 5) if weights is None else weights
    z = q.new_zeros(2, 3, 4) if z is None else z
    rows = [equations_24_and_26_to_28(*(x[b, h] for x in (*inputs, weights, z))) for b in range(2) for h in range(3)]
    return tuple(torch.stack(part).unflatten(0, (2, 3)) for part in zip(*rows, strict=True))


@looped("half", [False, True])
@looped("sum_norm", [False, True])
@looped("case", ["first position", "carried", "padding", "orthogonal keys"])
def test_the_delta_rule_retrieves_a_normalized_value(case, sum_norm, half):
    """Eq. 27 with the plain operator: from an empty or carried memory, after padding, with unrelated keys."""
    q, k, v, beta = delta_inputs()
    weights = z = None
    if case == "carried":
        z = torch.rand(2, 3, 4, dtype=torch.float64)
        weights = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    elif case == "padding":
        k[0, :, :3] = 0
    elif case == "orthogonal keys":
        k[:, :, :2, :2] = k[:, :, 2:4, 2:] = 0
    if sum_norm:
        q, k = SumNormalization()(q), SumNormalization()(k)
    expected = by_the_equations((q, k, v, beta), weights, z)
    results = delta_with_attention_normalization(q, k, v, beta, weights, z, half)
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=1e-9, atol=1e-11)


def test_retrieval_differs_from_the_plain_delta_rule():
    inputs = delta_inputs()
    _, normalized, _ = delta_with_attention_normalization(*inputs)
    _, plain = ops.delta_rule(*inputs, backend="reference")
    assert (normalized - plain).abs().max() > 0.1


def test_the_retrieval_divisor_by_hand():
    """It is 1 if nothing is stored under the key, the bound if almost nothing is, and otherwise z . k."""
    k = torch.tensor([[0.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.0, 1.0], [1e-9, 0.0]]).reshape(1, 1, 5, 2)
    divisor = NORMALIZATION.retrieval_divisor(k, running_sum(k))
    torch.testing.assert_close(divisor.flatten(), torch.tensor([1.0, 1.0, 6.0, 1.0, 1e-6]))
    carried = NORMALIZATION.retrieval_divisor(k, running_sum(k, torch.tensor([0.5, 0.25]).reshape(1, 1, 2)))
    torch.testing.assert_close(carried.flatten(), torch.tensor([1.0, 1.0, 7.5, 0.25, 1e-6]))


@looped("add_epsilon", [False, True])
def test_what_is_retrieved_after_a_documents_beginning_is_divided_as_if_it_stood_alone(add_epsilon):
    normalization = AttentionNormalization(0.5, add_epsilon)
    k, v = torch.rand(2, 3, 6, 4, dtype=torch.float64), torch.randn(2, 3, 6, 5, dtype=torch.float64)
    first = torch.arange(6).eq(4).expand(2, 6)
    whole = normalization.normalize_retrieval(k, v, running_sum(k, None, first), first)
    alone = normalization.normalize_retrieval(k[:, :, 4:], v[:, :, 4:], running_sum(k[:, :, 4:]))
    for x, y in zip(whole, alone, strict=True):
        torch.testing.assert_close(x[:, :, 4:], y)


def test_epsilon_bounds_or_is_added():
    k = torch.tensor([0.0, 1.0, 1e-5]).reshape(1, 1, 3, 1)
    q = torch.tensor([1.0, 2.0, 1e-5]).reshape(1, 1, 3, 1)
    z = running_sum(k)
    styles = {"bound": {"epsilon": 1e-2}, "added": {"epsilon": 1e-2, "add_epsilon": True}}
    expected = {
        "bound": torch.tensor([1e-2, 2.0, 1e-2]),
        "added": torch.tensor([1e-2, 2.01, 0.01001]),
    }
    for style, arguments in styles.items():
        read = expected[style]
        torch.testing.assert_close(AttentionNormalization(**arguments).output_divisor(q, z).flatten(), read)
        out, _ = attention_normalize(torch.ones(1, 1, 3, 1), q, k, None, **arguments)
        torch.testing.assert_close(out.flatten(), 1 / read)
    torch.testing.assert_close(
        AttentionNormalization(1e-2).retrieval_divisor(k, z).flatten(), torch.tensor([1.0, 1.0, 1e-2])
    )
    features = torch.tensor([0.005, 0.0])
    torch.testing.assert_close(SumNormalization(**styles["bound"])(features), torch.tensor([0.5, 0.0]))
    torch.testing.assert_close(SumNormalization(**styles["added"])(features), torch.tensor([1 / 3, 0.0]))


def test_divisors_are_carried():
    q, k, _, _ = delta_inputs(9)
    z = running_sum(k)
    first = running_sum(k[:, :, :4])
    second = running_sum(k[:, :, 4:], first[:, :, -1])
    torch.testing.assert_close(torch.cat([first, second[:, :, 1:]], 2), z)
    for divisor, x in ((NORMALIZATION.output_divisor, q), (NORMALIZATION.retrieval_divisor, k)):
        halves = [divisor(x[:, :, :4], first), divisor(x[:, :, 4:], second)]
        torch.testing.assert_close(torch.cat(halves, 2), divisor(x, z))
    carried = running_sum(k[:, :, :0], z[:, :, -1])
    assert torch.equal(carried, z[:, :, -1:])
    for divisor, x in ((NORMALIZATION.output_divisor, q), (NORMALIZATION.retrieval_divisor, k)):
        assert divisor(x[:, :, :0], carried).shape == (2, 3, 0)


def test_the_carried_normalizer_does_not_hold_the_sequence():
    q, k, _, _ = delta_inputs()
    _, normalizer = attention_normalize(torch.ones_like(q), q, k, None)
    assert normalizer.untyped_storage().nbytes() == normalizer.numel() * normalizer.itemsize


@looped("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_divisors_are_float32(dtype):
    q, k, _, _ = delta_inputs(3000, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    z = running_sum(k)
    exact = running_sum(k.double())
    for divisor, x in ((NORMALIZATION.output_divisor, q), (NORMALIZATION.retrieval_divisor, k)):
        result = divisor(x, z)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), divisor(x.double(), exact), rtol=3e-6, atol=0)


def test_the_form_for_half_precision_survives_small_divisors():
    """With small features, as of long vectors, beta / c overflows float16, and the other form does not."""
    q, k, v, beta = delta_inputs()
    k = k * 1e-3
    inputs = [x.half() for x in (q, k, v, beta)]
    _, expected, _ = delta_with_attention_normalization(*(x.double() for x in inputs))
    _, weights, _ = delta_with_attention_normalization(*inputs, half=True)
    assert (weights.double() - expected).norm() < 1e-3 * expected.norm()
    assert not delta_with_attention_normalization(*inputs)[1].isfinite().all()


def test_gradients_through_the_whole_normalization():
    q, k, v, beta = (x[:1, :1].contiguous().requires_grad_() for x in delta_inputs(4))
    weights, z = torch.randn(1, 1, 4, 5, dtype=torch.float64), torch.rand(1, 1, 4, dtype=torch.float64)
    state = (weights.requires_grad_(), z.requires_grad_())
    assert torch.autograd.gradcheck(delta_with_attention_normalization, (q, k, v, beta, *state))
    assert torch.autograd.gradcheck(delta_with_attention_normalization, (q, k, v, beta))  # from an empty memory


def test_gradients_are_finite_where_divisors_vanish():
    """The divisor is zero after padding, which a layer masks, and for a query without a matching key."""
    inputs = [x.requires_grad_() for x in delta_inputs()]
    padding = torch.tensor([True] * 3 + [False] * 4).unsqueeze(-1)
    unrelated = torch.tensor([False] * 6 + [True]).unsqueeze(-1)
    q, k = inputs[0].masked_fill(unrelated, 0), inputs[1].masked_fill(padding, 0)
    out, weights, z = delta_with_attention_normalization(q, k, *inputs[2:])
    assert not out[:, :, :3].any() and not out[:, :, 6:].any()
    (out.sum() + weights.sum() + z.sum()).backward()
    assert all(x.grad.abs().max() < 1e3 for x in inputs)


@looped("case", ["first position", "carried", "padding", "orthogonal keys"])
def test_an_added_epsilon_shrinks_the_write_as_the_public_code_does(case):
    """It multiplies beta by c = z . k (1 for an empty memory), and divides the key by c + epsilon."""
    q, k, v, beta = (x.requires_grad_() for x in delta_inputs())
    z_0 = torch.rand(2, 3, 4, dtype=torch.float64) if case == "carried" else None
    k = k.clone()
    if case == "padding":
        k[0, :, :3] = 0
    elif case == "orthogonal keys":
        k[:, :, :2, :2] = k[:, :, 2:4, 2:] = 0
    z, epsilon = running_sum(k, z_0), 1e-2
    c = torch.where(z[:, :, :-1].eq(0).all(-1), 1, (z[:, :, :-1] * k).sum(-1))
    expected, _ = ops.delta_rule(q, k / (c + epsilon).unsqueeze(-1), v, beta * c, backend="reference")
    normalization = AttentionNormalization(epsilon, add_epsilon=True)
    keys, values = normalization.normalize_retrieval(k, v, z)
    result, _ = ops.delta_rule(q, keys, values, beta, backend="reference")
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(result.sum(), (q, v, beta)))
    assert torch.autograd.grad(normalization.normalize_retrieval(k, v, z)[0].sum(), k)[0].isfinite().all()
