import torch

from fairseq_fwp.modules.normalization import attention_normalize, sum_normalize


def test_sum_normalized_features_sum_to_one():
    features = torch.rand(3, 5, 7, dtype=torch.float64)
    normalized = sum_normalize(features)
    torch.testing.assert_close(normalized.sum(-1), torch.ones(3, 5, dtype=torch.float64))
    torch.testing.assert_close(normalized * features.sum(-1, keepdim=True), features)


def test_zero_features_stay_zero_with_a_finite_gradient():
    features = torch.zeros(2, 4, requires_grad=True)
    normalized = sum_normalize(features)
    assert torch.equal(normalized, torch.zeros(2, 4))
    normalized.sum().backward()
    assert features.grad.isfinite().all()


def test_the_bounds_are_the_documented_ones():
    """A sum above 1e-6 divides exactly, a smaller one counts as 1e-6; the same for z . q."""
    features = torch.tensor([[1e-4, 3e-4], [1e-7, 1e-7]], dtype=torch.float64)
    expected = torch.tensor([[0.25, 0.75], [0.1, 0.1]], dtype=torch.float64)
    torch.testing.assert_close(sum_normalize(features), expected)
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
    """With the sum rule, Eq. 13: weights k_j . q_i over their sum."""
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
