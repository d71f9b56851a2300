"""Transformer-XL's attention against its formula; its memory and cache."""

import itertools

import torch
from attentions import random
from pairwise import looped

from fairseq_fwp.modules.attention.base import detach, reorder
from fairseq_fwp.modules.attention.relative import (
    LearnedDistances,
    Memory,
    RelativeAttention,
    SinusoidalDistances,
)

DIM, HEADS = 12, 3
SIZE = DIM // HEADS


def build(positions="relative", clamp_len=None, window=None, dim=DIM, heads=HEADS):
    """Return a float64 layer with weights large enough to distinguish positions."""
    if positions == "relative":
        distances = SinusoidalDistances(dim, heads, clamp_len)
    else:
        distances = LearnedDistances(heads, dim // heads, clamp_len, biased=positions == "shaw, biased")
    layer = RelativeAttention(dim, heads, distances, window).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer


def by_loops(layer, x, memory):
    """Compute the paper's equations, one query, key and head at a time, in the paper's notation."""
    whole = torch.cat([memory, x], 1)
    w_q, w_ke, w_v = layer.in_proj.weight.split(DIM)
    out = torch.zeros_like(x)
    for batch, head, i in itertools.product(range(len(x)), range(HEADS), range(x.shape[1])):
        rows = slice(head * SIZE, (head + 1) * SIZE)
        query = w_q[rows] @ x[batch, i]
        at = memory.shape[1] + i
        seen = [j for j in range(at + 1) if layer.window is None or at - j < layer.window]
        scores = []
        for j in seen:
            key = w_ke[rows] @ whole[batch, j]
            distance = at - j if layer.positions.clamp_len is None else min(at - j, layer.positions.clamp_len)
            if isinstance(layer.positions, LearnedDistances):
                vector = layer.positions.table[head, distance]
                scores.append(query @ key + query @ vector[:SIZE])
                if layer.positions.content_bias is not None:
                    scores[-1] = scores[-1] + layer.positions.content_bias[head] @ key + vector[SIZE]
                continue
            angles = [distance / 10000 ** (2 * k / DIM) for k in range(DIM // 2)]
            r = torch.tensor(angles, dtype=torch.float64)
            position = layer.positions.proj.weight[rows] @ torch.cat([r.sin(), r.cos()])
            u, v = layer.positions.content_bias[head], layer.positions.position_bias[head]
            scores.append(query @ key + query @ position + u @ key + v @ position)
        weights = (torch.stack(scores) / SIZE**0.5).softmax(0)
        out[batch, i, rows] = sum(
            weight * (w_v[rows] @ whole[batch, j]) for weight, j in zip(weights, seen, strict=True)
        )
    return layer.out_proj(out)


@looped(
    "positions, clamp_len",
    [("relative", None), ("relative", 1), ("relative", 4), ("shaw", 1), ("shaw", 4), ("shaw, biased", 4)],
)
@looped("window", [None, 1, 3])
@looped("lengths", [(1, 0), (5, 0), (4, 3), (1, 6), (3, 7)], ids=str)
def test_it_is_the_sum_of_the_four_terms(positions, clamp_len, window, lengths):
    layer = build(positions, clamp_len, window)
    x, memory = (random(2, length, DIM) for length in lengths)
    found, after = layer(x, Memory(memory))
    torch.testing.assert_close(found, by_loops(layer, x, memory))
    assert torch.equal(after.hidden, torch.cat([memory, x], 1))


def test_a_cache_is_cut_reordered_and_detached():
    layer, memory, more = build(), Memory(random(3, 6, DIM)), random(2, 2, DIM)
    order = torch.tensor([2, 0])
    expected = layer(more, reorder(memory.last(4), order))[0]
    cache = layer(random(3, 1, DIM), layer.cache(memory))[1]

    for kept in (reorder(layer.cache(memory.last(4)), order), reorder(layer.cache(memory).last(4), order)):
        torch.testing.assert_close(layer(more, kept)[0], expected)
    assert cache.last(3).distances.shape[1] == cache.last(3).keys.shape[2] == 3
    assert not any(part.requires_grad for part in detach(cache) if part is not None)


def test_no_tensor_holds_a_vector_for_every_pair(largest_tensor):
    """Scores are O(B H L S); vectors of distances for every pair would take d = 32 times that."""
    layer = RelativeAttention(64, 2, SinusoidalDistances(64, 2))
    with largest_tensor() as mode:
        layer(torch.randn(1, 128, 64, requires_grad=True), Memory(torch.randn(1, 128, 64)))[0].sum().backward()
    assert mode.largest <= 2 * 2 * 128 * 256


def test_sinusoids_of_long_distances_survive_half_precision():
    """Sinusoids are computed in float32: bfloat16 does not distinguish 1000 from 1001."""
    positions = SinusoidalDistances(DIM, HEADS).to(torch.bfloat16)
    torch.nn.init.eye_(positions.proj.weight)
    rows = positions(1000, 1002).float()
    assert (rows[:, 0] - rows[:, 1]).abs().max() > 0.1
