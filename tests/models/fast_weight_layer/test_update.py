"""Linear attention by chunks against its definition."""

import torch
from support.pairwise import looped

from fairseq_fwp.models.fast_weight_layer.update import causal_sum, cumulative_sum


def random(*sizes):
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


@looped("length", [0, 1, 2, 7, 8, 9, 40])
@looped("keys", [-1, 0, 4])
def test_each_query_sees_one_key_more_and_the_last_sees_all(length, keys):
    """With as many keys as queries, it is the sum rule."""
    keys = max(length + keys, 0)
    q, k, v = random(2, length, 3), random(2, keys, 3), random(2, keys, 5)
    first = keys - length + 1
    expected = [(q[:, t : t + 1] @ k[:, : first + t].mT) @ v[:, : first + t] for t in range(length)]
    for chunk in (1, 3, 4, 8, 64):
        torch.testing.assert_close(causal_sum(q, k, v, chunk), torch.cat([v[:, :0], *expected], 1))
    sums = [v[:, : first + t].sum(1, keepdim=True) for t in range(length)]
    torch.testing.assert_close(cumulative_sum(v, length), torch.cat([v[:, :0], *sums], 1))


@looped("chunk", [2, 64])
@looped("sizes", [(3, 5), (1, 1)])  # the second is summed by chunks
def test_scores_are_scaled_and_shifted(sizes, chunk):
    """An offset is one more entry of queries and keys: its root, in both."""
    size, out = sizes
    q, k, v = random(2, 30, size), random(2, 30, size), random(2, 30, out)
    scale, offset = random(1), torch.rand(1, dtype=torch.float64, requires_grad=True)
    longer = [torch.cat([x * x_scale, offset.sqrt().expand(2, 30, 1)], 2) for x, x_scale in ((q, scale), (k, 1))]
    expected, ours = causal_sum(*longer, v, chunk), causal_sum(q, k, v, chunk, scale, offset)
    torch.testing.assert_close(ours, expected)
    inputs = (q, k, v, scale, offset)
    for own, other in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (ours, expected)), strict=True):
        torch.testing.assert_close(own, other)


def test_long_texts_are_summed_by_chunks(largest_tensor):
    """Otherwise the scores would be the largest tensor, and grow with the square of the length."""
    q, k, v = (torch.randn(1, 4096, size) for size in (8, 8, 8))
    with largest_tensor() as seen:
        causal_sum(q, k, v)
    assert seen.largest < 4096 * 64


def test_memories_larger_than_scores_are_not_summed(largest_tensor):
    """The sums would have 64 x 512 numbers; the scores of a chunk have at most 16 x 64."""
    q, k, v = (torch.randn(1, 64, size) for size in (64, 64, 512))
    with largest_tensor() as seen:
        causal_sum(q, k, v, 16)
    assert seen.largest == 64 * 512  # what it returns
    q, k, v = (torch.randn(1, 8, size) for size in (64, 64, 512))
    with largest_tensor() as seen:
        causal_sum(q, k, v, 2)
    assert seen.largest == 8 * 512
