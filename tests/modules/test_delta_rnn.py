"""The Delta RNN against its equations, and over documents; its other laws are in test_attention.py."""

import torch
from attentions import memories, read

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


def test_the_layer_is_the_papers_equation():
    """y_t = W_t phi(q_t) + R_t softmax(y_{t-1}), with both memories written by the delta rule."""
    layer, x = build(), torch.randn(2, 7, DIM, dtype=torch.float64)
    q, k, v, beta = layer.feedforward.in_proj(x).split([DIM, DIM, DIM, HEADS], -1)
    recurrent_k, recurrent_v, recurrent_beta = layer.recurrent_proj(x).split([DIM, DIM, HEADS], -1)

    def heads(x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    phi_q, phi_k = (torch.nn.functional.elu(heads(x)) + 1 for x in (q, k))
    phi_q, phi_k = (x / x.sum(-1, keepdim=True) for x in (phi_q, phi_k))
    recurrent = heads(recurrent_k).softmax(-1), heads(recurrent_v), [heads(recurrent_beta).sigmoid()]
    both = zip(memories("delta", phi_k, heads(v), [heads(beta).sigmoid()]), memories("delta", *recurrent), strict=True)
    y, outs = torch.zeros(2, HEADS, SIZE).double(), []
    for t, ((w, _), (r, _)) in enumerate(both):
        y = read(phi_q[:, :, t], w) + read(y.softmax(-1), r)
        outs.append(y)
    expected = torch.stack(outs, 2).transpose(1, 2).flatten(2) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-10, atol=1e-12)
    without = layer.feedforward(x)[0] @ layer.out_proj.weight.T
    assert (expected - without).abs().max() > 0.1  # what is fed back matters


def test_a_document_begins_with_empty_memories():
    layer, x = build("dpfp"), torch.randn(2, 9, DIM, dtype=torch.float64)
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
