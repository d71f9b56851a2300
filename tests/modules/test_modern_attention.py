"""The parts of the layer of DeltaNet, Gated DeltaNet and Kimi Delta Attention: their equations, token by token."""

import itertools

import torch
from support.attentions import memories
from support.pairwise import looped, pairwise
from torch.nn.functional import sigmoid, silu, softplus

from fairseq_fwp import ops
from fairseq_fwp.modules.attention import FastWeightAttention
from fairseq_fwp.modules.decoder_layer import DecoderLayer
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS

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
    out = torch.stack([ops.retrieve(q[:, :, t], w) for t, (w, _) in enumerate(memories(rule, k, v, gates))], 1)
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
    torch.testing.assert_close(layer(x)[0], expected(layer, x, **case), rtol=1e-10, atol=1e-10)


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
