"""Local attention against its definition, and its cost; its other laws are in test_attention.py."""

import pytest
import torch
from attentions import random
from pairwise import looped

from fairseq_fwp.modules.attention.softmax import LocalAttention

DIM, HEADS = 12, 3


def by_mask(layer, x):
    """Compute a softmax over a full matrix of scores, masked outside the window."""
    q, k, v = layer.project(x)
    scores = q @ k.transpose(-1, -2) / (DIM // HEADS) ** 0.5
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    scores = scores.masked_fill((distance < 0) | (distance >= layer.window), -torch.inf)
    return layer.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@looped("window", [1, 2, 3, 5, 6, 8, 40])
@looped("pieces", [[1], [5], [8], [17], [1] * 11, [2, 9], [7, 4]])
def test_it_is_softmax_attention_within_the_window(window, pieces):
    layer, x, state, outputs = LocalAttention(DIM, HEADS, window).double(), random(2, sum(pieces), DIM), None, []
    for piece in x.split(pieces, 1):
        y, state = layer(piece, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), by_mask(layer, x))
    assert state.keys.shape[2] == min(window - 1, sum(pieces))


def test_no_tensor_grows_faster_than_the_sequence(largest_tensor):
    layer, largest = LocalAttention(DIM, HEADS, 8), {}
    for length in (512, 2048):
        with largest_tensor() as mode:
            layer(torch.randn(1, length, DIM, requires_grad=True))[0].sum().backward()
        largest[length] = mode.largest
    assert largest[2048] <= 4 * largest[512]


def test_a_window_without_a_token_is_refused():
    with pytest.raises(ValueError, match="`window` must be at least 1 token, got 0"):
        LocalAttention(DIM, HEADS, 0)
