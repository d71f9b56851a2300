"""The Delta RNN against its equations, and over documents; its other laws are in test_attention.py."""

import torch

from fairseq_fwp.modules.attention.delta_rnn import DeltaRnn
from fairseq_fwp.modules.attention.normalization import SumNormalization
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS

DIM, HEADS, SIZE = 12, 3, 4


def build(feature_map="elu"):
    torch.manual_seed(3)
    layer = DeltaRnn(DIM, HEADS, FEATURE_MAPS[feature_map](SIZE), sum_normalization=SumNormalization())
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    return layer.double().eval()


def by_the_equations(layer, x):
    """Compute one head and one token at a time, from the weights: y_t = W_t phi(q_t) + R_t softmax(y_{t-1})."""
    q, k, v, beta = layer.feedforward.in_proj(x).split([DIM, DIM, DIM, HEADS], -1)
    recurrent_k, recurrent_v, recurrent_beta = layer.recurrent_proj(x).split([DIM, DIM, HEADS], -1)
    outs = torch.zeros_like(x)
    for head in range(HEADS):
        part = slice(head * SIZE, (head + 1) * SIZE)
        y, w, r = torch.zeros(SIZE).double(), torch.zeros(SIZE, SIZE).double(), torch.zeros(SIZE, SIZE).double()
        for t in range(len(x)):
            features = [torch.nn.functional.elu(z[t, part]) + 1 for z in (q, k)]
            phi_q, phi_k = (feature / feature.sum() for feature in features)
            w = w + beta[t, head].sigmoid() * torch.outer(v[t, part] - w @ phi_k, phi_k)
            key = recurrent_k[t, part].softmax(0)
            r = r + recurrent_beta[t, head].sigmoid() * torch.outer(recurrent_v[t, part] - r @ key, key)
            y = w @ phi_q + r @ y.softmax(0)
            outs[t, part] = y
    return outs @ layer.out_proj.weight.T


def test_the_layer_is_the_papers_equation():
    layer = build()
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    expected = torch.stack([by_the_equations(layer, row) for row in x])
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-10, atol=1e-12)
    without = layer.feedforward(x)[0] @ layer.out_proj.weight.T
    assert (expected - without).abs().max() > 0.1  # what is fed back matters


def test_a_document_begins_with_empty_memories():
    layer = build("dpfp")
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    first = torch.zeros(2, 9, dtype=torch.bool)
    first[0, 4] = first[1, 7] = True
    y, state = layer(x, first=first)
    for row, start in ((0, 4), (1, 7)):
        alone, last = layer(x[row : row + 1, start:])
        torch.testing.assert_close(y[row : row + 1, start:], alone)
        for ours, theirs in zip(state, last, strict=True):
            torch.testing.assert_close(ours[row : row + 1], theirs)


def test_the_size_of_the_state():
    layer = build()
    _, state = layer(torch.randn(1, 3, DIM, dtype=torch.float64))
    assert layer.state_size(3) == sum(part.numel() for part in state)
