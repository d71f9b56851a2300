"""The parts of the layer of DeltaNet, Gated DeltaNet and Kimi Delta Attention: their equations, token by token."""

import itertools
import re

import pytest
import torch
from attentions import memories, read
from pairwise import looped, pairwise
from torch.nn.functional import sigmoid, silu, softplus

from fairseq_fwp.modules.attention import FastWeightAttention, LocalAttention, SoftmaxAttention
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.layers import DecoderLayer

DIM, HEADS, KEY = 10, 2, 4  # the heads do not divide the embedding dimension by themselves
GATES = {"none": torch.ones_like, "silu": silu, "sigmoid": sigmoid}
OPTIONS = {
    "rule": ["delta", "gated_delta", "kda"],
    "conv_size": [0, 1, 4],
    "value_dim": [3, 6],
    "value_heads": [None, 4],
    "norm": [{}, {"norm_read_out": True}, {"norm_read_out": True, "rms_norm": True, "norm_epsilon": 0.01}],
    "output_gate": list(GATES),
    "output_gate_rank": [None, 3],
    "scale_queries": [False, True],
    "lower_bound": [None, -2.0],
}
CASES = pairwise(lambda case: case.get("rule") != "delta" or case.get("lower_bound") is None, **OPTIONS)


def build(rule, norm, lower_bound, **options):
    given = {"l2_normalization": True, "l2_normalization_epsilon": 0.1, "decay_lower_bound": lower_bound, **norm}
    layer = FastWeightAttention(DIM, HEADS, FEATURE_MAPS["silu"](KEY), rule, key_dim=KEY, **given, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer.double().eval()


def convolved(x, weight):
    """Return sum_w weight_w x_{t - W + 1 + w} for x (B, L, C), weight (C, W)."""
    out = torch.zeros_like(x)
    for t, w in itertools.product(range(x.shape[1]), range(weight.shape[1])):
        past = t - weight.shape[1] + 1 + w
        if past >= 0:
            out[:, t] += weight[:, w] * x[:, past]
    return out


def expected(layer, x, rule, norm, lower_bound, conv_size, value_dim, value_heads, output_gate, **options):
    """Return y (B, L, D) from the layer's weights alone."""
    weights, heads = dict(layer.named_parameters()), value_heads or HEADS
    keys, values = HEADS * KEY, heads * value_dim
    gate = {"delta": 0, "gated_delta": heads, "kda": value_dim}[rule]
    q, k, v, decay, rate = (x @ weights["in_proj.weight"].T).split([keys, keys, values, gate, heads], -1)
    if conv_size:
        weight = weights["convolution.weight"]
        q, k, v = (convolved(y, w) for y, w in zip((q, k, v), weight.split([keys, keys, values]), strict=True))
        v = silu(v)
    q, k = (silu(y).unflatten(-1, (HEADS, KEY)) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 0.1).sqrt() for y in (q, k))
    q, k = (torch.stack([y[:, :, h * HEADS // heads] for h in range(heads)], 1) for y in (q, k))
    v = v.unflatten(-1, (heads, value_dim)).transpose(1, 2)
    gates = [sigmoid(rate).transpose(1, 2)]
    if rule != "delta":
        if rule == "kda":
            decay = decay @ weights["gate_expansions.decay.weight"].T
        at = decay.unflatten(-1, (heads, -1)) + weights["gate_activations.decay.bias"]
        a = weights["gate_activations.decay.log_rate"].exp()
        log = lower_bound * sigmoid(a * at) if lower_bound else -a * softplus(at)
        gates.insert(0, log.exp().transpose(1, 2).squeeze(-1) if rule == "gated_delta" else log.exp().transpose(1, 2))
    out = torch.stack([read(q[:, :, t], w) for t, (w, _) in enumerate(memories(rule, k, v, gates))], 1)
    if options["scale_queries"]:
        out = out / KEY**0.5
    if "rms_norm" in norm:
        out = out / (out.square().mean(-1, keepdim=True) + 0.01).sqrt() * weights["read_out_norm.weight"]
    elif norm:
        centred = out - out.mean(-1, keepdim=True)
        out = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        out = out * weights["read_out_norm.weight"] + weights["read_out_norm.bias"]
    out = out.flatten(2)
    if output_gate != "none" and options["output_gate_rank"]:
        low = x @ weights["output_gate.0.weight"].T
        out = out * GATES[output_gate](low @ weights["output_gate.1.weight"].T + weights["output_gate.1.bias"])
    elif output_gate != "none":
        out = out * GATES[output_gate](x @ weights["output_gate.weight"].T)
    return out @ weights["out_proj.weight"].T


@looped("case", CASES)
def test_the_layer_is_its_equations(case):
    layer, x = build(**case), torch.randn(2, 6, DIM, dtype=torch.float64)
    y, state = layer(x)
    torch.testing.assert_close(y, expected(layer, x, **case), rtol=1e-10, atol=1e-10)
    numbers = sum(part[0].numel() for part in state if part is not None)
    assert layer.state_size(6) == numbers


@pytest.mark.parametrize("backend", ["reference", "auto"])
@looped("conv_size", [1, 2, 4])
@looped("padded", [False, True])
def test_packed_documents_are_read_as_if_alone(conv_size, padded, backend):
    """Documents shorter and longer than the convolution; in pieces; with padding anywhere."""
    options = {"output_gate": "silu", "value_dim": 3, "value_heads": 4, "backend": backend}
    layer = build("gated_delta", {"norm_read_out": True}, None, conv_size=conv_size, **options)
    lengths = [5, 1, 2, 4]
    documents = [torch.randn(1, n, DIM, dtype=torch.float64) for n in lengths]
    alone = [layer(document) for document in documents]
    packed = torch.cat(documents, 1)
    first = torch.zeros(1, sum(lengths), dtype=torch.bool)
    first[0, [5, 6, 8]] = True
    mask, places = None, torch.arange(sum(lengths))
    if padded:
        places = torch.tensor([1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 15, 16])
        mask, longer = torch.ones(1, 18, dtype=torch.bool), torch.randn(1, 18, DIM, dtype=torch.float64)
        mask[:, places], longer[:, places] = False, packed
        starts = torch.zeros_like(mask)
        starts[:, places] = first
        packed, first = longer, starts
    y, state = layer(packed, None, mask, first)
    torch.testing.assert_close(y[:, places], torch.cat([out for out, _ in alone], 1))
    for ours, theirs in zip(state, alone[-1][1], strict=True):
        assert ours is theirs is None or torch.allclose(ours, theirs)
    state, outs = None, []
    for start in range(0, packed.shape[1], 4):
        piece = slice(start, start + 4)
        out, state = layer(packed[:, piece], state, None if mask is None else mask[:, piece], first[:, piece])
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1)[:, places], y[:, places])


def test_a_document_may_begin_and_end_at_padding():
    """A beginning that stands at padding empties the state too."""
    layer, x = build("delta", {}, None, conv_size=4, value_dim=3), torch.randn(1, 5, DIM, dtype=torch.float64)
    first = torch.tensor([[False, False, True, False, False]])
    _, state = layer(x, None, torch.tensor([[False, False, True, True, True]]), first)
    assert not state.recent.any() and not state.weights.any()
    assert layer(x[:, :0], state, None, first[:, :0])[1].recent.shape == (1, 3, 2 * HEADS * KEY + 3 * HEADS)


def test_a_block_with_a_gate_and_rms_normalisation():
    """y = x + Attn(R x), x + W_2 (SiLU(W_1 R y) * W_3 R y) with R x = x / sqrt(mean x^2 + epsilon) w."""
    attention = FastWeightAttention(DIM, HEADS, FEATURE_MAPS["elu"](5), "sum")
    layer = DecoderLayer(
        attention, DIM, 7, torch.relu, normalize_before=True, rms_norm=True, norm_epsilon=0.1, swiglu=True
    )
    assert not [name for name, _ in layer.named_parameters() if name.endswith("bias")]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    layer, x = layer.double(), torch.randn(2, 4, DIM, dtype=torch.float64)

    def normal(x, norm):
        return x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight

    y = x + attention(normal(x, layer.self_attn_layer_norm))[0]
    z = normal(y, layer.final_layer_norm)
    gate, value = z @ layer.fc1.weight[:7].T, z @ layer.fc1.weight[7:].T
    torch.testing.assert_close(layer(x)[0], y + (gate / (1 + (-gate).exp()) * value) @ layer.fc2.weight.T)


@looped("window", [None, 3])
def test_rotary_softmax_with_shared_keys_is_its_equation(window):
    """Each pair of a query and a key is a complex number, turned by its place; heads of queries share those of keys."""
    options = {"softmax_heads": 4, "kv_heads": 2, "qkv_bias": True, "rope_theta": 50.0}
    windows = {} if window is None else {"window": window}
    layer = (SoftmaxAttention if window is None else LocalAttention)(24, 5, **windows, **options).double()
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    q, k, v = (x @ layer.in_proj.weight.T + layer.in_proj.bias).split([24, 12, 12], -1)
    powers = 50.0 ** -(torch.arange(3).double() / 3)

    def turned(y, t):
        return torch.complex(*y.chunk(2, -1)) * torch.polar(torch.ones(3).double(), t * powers)

    expected = torch.zeros_like(x)
    for row, head, t in itertools.product(range(2), range(4), range(7)):
        own, shared = slice(6 * head, 6 * head + 6), slice(6 * (head // 2), 6 * (head // 2) + 6)
        seen = range(0 if window is None else max(t - window + 1, 0), t + 1)
        query, keys = turned(q[row, t, own], t), torch.stack([turned(k[row, j, shared], j) for j in seen])
        weights = ((keys.conj() @ query).real / 6**0.5).softmax(0)
        expected[row, t, own] = weights @ v[row, seen.start : t + 1, shared]
    torch.testing.assert_close(layer(x)[0], expected @ layer.out_proj.weight.T, rtol=1e-10, atol=1e-12)
    _, state = layer(x)
    assert layer.out_proj.bias is None
    assert layer.state_size(7) * 2 == sum(y.numel() for y in (*layer.project(x)[1:],)) * (
        1 if window is None else 3 / 7
    )
    assert state.keys.shape[1] == 2


REFUSED = [
    ({"conv_size": -1}, "`conv_size` must be at least 1 token, or 0 for no convolution, got -1"),
    ({"value_dim": 0}, "`value_dim` must be at least 1, got 0"),
    ({"value_heads": 3}, "`value_heads` must be a multiple of `num_heads` = 2, got 3"),
    ({"value_heads": 0}, "`value_heads` must be a multiple of `num_heads` = 2, got 0"),
    ({"output_gate": "relu"}, "`output_gate` must be one of none, silu, sigmoid, got 'relu'"),
    ({"output_gate": "silu", "output_gate_rank": 0}, "`output_gate_rank` must be at least 1, got 0"),
    ({"l2_normalization_epsilon": -1.0}, "`l2_normalization_epsilon` must be at least 0, got -1.0"),
    ({"norm_read_out": True, "norm_epsilon": 0.0}, "`norm_epsilon` must be above 0, got 0.0"),
    ({"decay_lower_bound": -5.0}, "`decay_lower_bound` must be left out for the update rule delta, got one"),
    ({"rule": "kda", "decay_lower_bound": 0.0}, "`decay_lower_bound` must be below 0, got 0.0"),
    ({"key_dim": 4, "num_heads": 0}, "`num_heads` must be at least 1, got 0"),
]


@looped("options, message", REFUSED)
def test_refusals_name_the_argument(options, message):
    options = {"rule": "delta", "num_heads": HEADS, "key_dim": 5, **options}
    rule, heads = options.pop("rule"), options.pop("num_heads")
    with pytest.raises(ValueError, match=re.escape(message)):
        FastWeightAttention(DIM, heads, FEATURE_MAPS["silu"](options["key_dim"]), rule, **options)


REFUSED_SOFTMAX = [
    ({"softmax_heads": 5}, "`softmax_heads` must divide `embed_dim` = 12, got 5"),
    ({"softmax_heads": 0}, "`softmax_heads` must divide `embed_dim` = 12, got 0"),
    ({"kv_heads": 3}, "`kv_heads` must divide the number of heads, 2, got 3"),
    ({"kv_heads": 0}, "`kv_heads` must divide the number of heads, 2, got 0"),
    ({"rope_theta": 0.0}, "`rope_theta` must be above 0, got 0.0"),
    (
        {"softmax_heads": 4, "rope_theta": 10.0},
        "`rope_theta` must be left out with heads of an odd size, got heads of 3",
    ),
]


@looped("options, message", REFUSED_SOFTMAX)
def test_refusals_of_softmax_attention(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SoftmaxAttention(12, 2, **options)
