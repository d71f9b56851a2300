"""The causal attentions: their papers' equations, numbers of any size, and refusals; laws are in tests/laws."""

import collections
import copy
import io
import itertools
import math
import re
from typing import NamedTuple

import pytest
import torch
from support.attentions import (
    DIM,
    FAST_WEIGHTS,
    HEADS,
    NORMALIZATIONS,
    build,
    is_defined,
    memories,
    random,
    rule_inputs,
)
from support.pairwise import looped
from torch.nn import functional as F

from fairseq_fwp import ops
from fairseq_fwp.modules.attention import DeltaRnn, FastWeightAttention, FastWeightState, Hybrid, RecurrentDelta, Srwm
from fairseq_fwp.modules.attention.base import Attention
from fairseq_fwp.modules.attention.normalization import AttentionNormalization, SumNormalization
from fairseq_fwp.modules.attention.relative import (
    LearnedDistances,
    RelativeAttention,
    SegmentMemory,
    SinusoidalDistances,
)
from fairseq_fwp.modules.attention.softmax import SoftmaxAttention
from fairseq_fwp.modules.attention.time_mix import TimeMix
from fairseq_fwp.modules.decoder_layer import DecoderLayer
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES, uniform_gate_bias
from fairseq_fwp.ops.srwm import srwm

# Fast weights.


@pytest.mark.parametrize("rule", UPDATE_RULES)
@looped("carried", [False, True])
def test_it_is_the_papers_equations(rule, carried):
    """With every map and normalisation: out = W q, divided by z . q, from the layer's own projections.

    The public code normalises and scales what is read.
    """
    options = ({"backend": "reference"}, {"backend": "auto", "norm_read_out": True, "scale_read_out": True})
    for kind, given in itertools.product([kind for kind in FAST_WEIGHTS if kind[0] == rule], options):
        layer, x = build(kind, **given), random(2, 7, DIM)
        q, k, v, gates = rule_inputs(layer, x)
        attention = layer.memory.normalization
        size = (2, HEADS, layer.feature_map.feature_dim)
        state = (random(*size, DIM // HEADS), random(*size).abs() + 0.5) if carried else None
        found, last = layer(x, FastWeightState(state[0], state[1] if attention else None) if carried else None)
        divided = attention and not attention.read_out_only
        outs = []
        for t, (w, z) in enumerate(memories(rule, k, v, gates, divided, state)):
            divisor = (q[:, :, t] * z).sum(-1, keepdim=True).clamp(min=1e-6) if attention else 1
            outs.append(ops.retrieve(q[:, :, t], w) / divisor)
        out = torch.stack(outs, 2).transpose(1, 2)
        if "norm_read_out" in given:
            out = F.layer_norm(out, (4,)) / 4**0.5
        expected = layer.out_proj(out.flatten(2))
        torch.testing.assert_close(found, expected, msg=lambda said, kind=kind: f"{kind}: {said}")
        torch.testing.assert_close(last.weights, w)
        if attention:
            torch.testing.assert_close(last.normalizer, z)


@looped("length, by_scores", [(6, True), (12, False)])
@looped("kind", [kind for kind in FAST_WEIGHTS if kind[0] == "sum"])
def test_short_sequences_are_read_by_their_scores(kind, length, by_scores, monkeypatch):
    """Without a state the sum rule is attention: output, state, later outputs and gradients are the same."""
    layer = FastWeightAttention(32, 2, FEATURE_MAPS[kind[1]](16), "sum", **NORMALIZATIONS[kind[2]]).double().eval()
    x = random(2, length, 32).requires_grad_()
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, :2] = True

    def results():
        y, state = layer(x, None, padding)
        more, _ = layer(x[:, :1], state)
        gradients = torch.autograd.grad(y.square().sum() + more.square().sum(), [x, *layer.parameters()])
        torch.testing.assert_close(layer.read_whole(x, padding), y)
        return [y, more, *state, *gradients]

    layer.memory.backend = "reference"
    expected = results()
    layer.memory.backend = "auto"
    visits, run = [], ops.Rule.run
    monkeypatch.setattr(ops.Rule, "run", lambda *given, **named: visits.append(1) or run(*given, **named))
    for ours, theirs in zip(results(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(visits) == (1 if by_scores else 3)  # tokens after a state visit it
    monkeypatch.undo()


@looped(
    ("name", "size"),
    # Not favor with 2: exp(-|q|^2 / 2) exp(-|k|^2 / 2) is below float32 there, see its docstring.
    [
        (name, size)
        for name, feature_map in FEATURE_MAPS.items()
        for size in (0.3, 1.0, 2.0)
        if feature_map.positive and (name, size) != ("favor", 2.0)
    ],
)
def test_constant_values_are_read_back(name, size):
    """The output is an average of the values, for any size of the features."""
    layer = FastWeightAttention(32, 2, FEATURE_MAPS[name](16), "sum", attention_normalization=AttentionNormalization())
    with torch.no_grad():
        torch.nn.init.normal_(layer.in_proj.weight[:64], std=size / 32**0.5)
        layer.in_proj.weight[64:] = 0
        layer.in_proj.weight[64:, 0] = 1
        layer.out_proj.weight.copy_(torch.eye(32))
    x = torch.randn(1, 256, 32)
    x[..., 0] = 1
    reads = layer(x)[0]
    written = reads != 0 if name in ("dpfp", "relu") else torch.ones_like(reads, dtype=torch.bool)  # may map to zero
    torch.testing.assert_close(reads[written], torch.ones_like(reads)[written], rtol=1e-3, atol=0)
    assert written.float().mean() > 0.9


OPENINGS = {"none": torch.ones_like, "silu": F.silu, "sigmoid": torch.sigmoid}


@looped("gate", OPENINGS)
@looped("rank", [None, 3])
@looped("norm", [{}, {"norm_read_out": True}, {"norm_read_out": True, "rms_norm": True}])
@looped("scale", [1, 0.5])
def test_the_read_out_is_its_equation(gate, rank, norm, scale):
    """Normalisation of each head, scale and gate; checkpoints/convert/test_fla.py has the layers that have them."""
    options = {**norm, "norm_epsilon": 0.5, "scale_read_out": scale < 1, "output_gate": gate, "output_gate_rank": rank}
    layer, x = build(("delta", "silu", "neither"), **options), random(2, 6, DIM)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    out = layer.memory.write_and_read(*layer.memory_inputs(x)[:4])[0].transpose(1, 2)
    if norm:
        out = out if "rms_norm" in norm else out - out.mean(-1, keepdim=True)
        out = out / (out.square().mean(-1, keepdim=True) + 0.5).sqrt() * layer.read_out_norm.weight
        out = out if "rms_norm" in norm else out + layer.read_out_norm.bias
    out = scale * out.flatten(2)
    if gate != "none":
        weight, *others = layer.output_gate.parameters()
        logits = x @ weight.T @ others[0].T + others[1] if rank else x @ weight.T
        out = out * OPENINGS[gate](logits)
    torch.testing.assert_close(layer(x)[0], out @ layer.out_proj.weight.T)


@looped("rule", ["gated", "decay"])
@looped("logit", [6.0, 8.0])
def test_long_memories_survive_half_precision(rule, logit):
    """Gates just below 1, which bfloat16 rounds to 1, over 1,000 tokens."""
    layer = build((rule, "elu", "sum"), backend="auto").float()
    rows = sum(layer.gates.columns.values())
    with torch.no_grad():
        layer.in_proj.weight[-rows:] = 0
        layer.in_proj.weight[-rows:, 0] = logit
        for bias in layer.gate_biases.values():
            bias.zero_()
    x = torch.randn(1, 1000, DIM)
    x[..., 0] = 1
    expected = copy.deepcopy(layer).double()(x.double())[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)[0].double()
    assert (found - expected).norm() < 0.01 * expected.norm(), (found - expected).norm() / expected.norm()


def test_uniform_gate_initialisation():
    opened = uniform_gate_bias(4000).sigmoid()
    assert 1 / 4000 <= opened.min() < 0.01 and 0.99 < opened.max() <= 1 - 1 / 4000
    assert abs(opened.mean() - 0.5) < 0.03 and abs(opened.var() - 1 / 12) < 0.01
    layer = build(("decay", "identity", "neither"))
    before = layer.gate_biases["key_decay"].clone()
    layer.initialize()
    assert not torch.equal(layer.gate_biases["key_decay"], before)


# Without a normalisation outputs have no bound, nor have delta's writes for keys without one: it diverges, as the
# paper says.
CORRECTING = [
    name for name, rule in UPDATE_RULES.items() if rule.normalizer and rule.normalizer.retrieved and name != "fwm"
]
BOUNDED = [kind for kind in FAST_WEIGHTS if kind[2] != "neither" and (kind[0] not in CORRECTING or kind[2] != "output")]


@looped("kind", BOUNDED)
def test_large_inputs_stay_finite(kind):
    """|x| up to 30 in float16, values and gradients."""
    layer = build(kind, backend="auto").float()
    x = (60 * torch.rand(2, 6, DIM) - 30).requires_grad_()
    with torch.autocast("cpu", torch.float16):
        out = layer(x)[0]
    out.float().mean().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()


# Rules with each kind of kernel, or without one; the others are slow.
COMPILED = ("sum", "delta", "kda", "fwm")


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=() if rule in COMPILED else pytest.mark.slow) for rule in UPDATE_RULES]
)
def test_a_layer_compiles_into_one_graph(rule):
    torch.compiler.reset()
    normalization = next(x for x in ("attention", "output", "sum") if is_defined(rule, "dpfp", x))
    layer = build((rule, "dpfp", normalization), backend="auto").float()
    x = torch.randn(2, 5, DIM)
    backend = "aot_eager" if rule in ("sum", "delta") else "eager"  # operators and maps have tests of their own
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x)[0], layer(x)[0])


# Softmax attentions.


def scores_by_definition(layer, x):
    """Return v (B, H, S, d) and all scores (B, H, S, S), of Su et al. 2021 and of Dai et al. 2019, Secs. 3.3 and 4.2.

    Heads of queries share those of keys; a pair of rotated numbers is a complex number, turned by its place.
    """
    sizes, count = getattr(layer, "sizes", [DIM] * 3), x.shape[1]
    size = sizes[0] // layer.num_heads
    q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in layer.in_proj(x).split(sizes, -1))
    if getattr(layer, "query_norm", None) is not None:
        means = (part.square().mean(-1, keepdim=True) for part in (q, k))
        gains = (layer.query_norm.weight, layer.key_norm.weight)
        q, k = (part / (mean + 0.5).sqrt() * gain for part, mean, gain in zip((q, k), means, gains, strict=True))
    k, v = (part.repeat_interleave(layer.num_heads // part.shape[1], 1) for part in (k, v))
    distance = torch.arange(count)[:, None] - torch.arange(count)
    if isinstance(layer, RelativeAttention):
        positions = layer.positions
        scores, at = q @ k.mT, distance.clamp(0, positions.clamp_len)  # (a)
        if isinstance(positions, LearnedDistances):
            r = positions.table[:, at]
            of_places = 0 if positions.content_bias is None else r[..., size]
        else:
            angles = at[..., None].double() / 10000 ** (torch.arange(0, DIM, 2) / DIM)
            r = (
                positions.proj(torch.cat([angles.sin(), angles.cos()], -1))
                .unflatten(-1, (-1, size))
                .permute(2, 0, 1, 3)
            )
            of_places = (r * positions.position_bias[:, None, None]).sum(-1)  # (d)
        scores = scores + (q.unsqueeze(3) * r[..., :size]).sum(-1) + of_places  # (b)
        if positions.content_bias is not None:
            scores = scores + (k * positions.content_bias[:, None]).sum(-1).unsqueeze(2)  # (c)
    else:
        if layer.memory.rope_theta is not None:
            frequencies = layer.memory.rope_theta ** -(torch.arange(0, size, 2).double() / size)
            if layer.memory.rope_scaling is not None:
                frequencies = torch.tensor([scaled(float(frequency)) for frequency in frequencies]).double()
            angles = torch.arange(count)[:, None] * frequencies
            q, k = (torch.complex(*part.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles) for part in (q, k))
        scores = (q @ k.mH).real
    unseen = (distance < 0) | (distance >= (getattr(layer, "memory", layer).window or count))
    return v, (scores / size**0.5).masked_fill(unseen, -torch.inf)


def scaled(frequency):
    """Return a frequency for texts 4 times as long as 40 tokens, in which the slow turn twice and the fast 5 times."""
    wavelength = 2 * math.pi / frequency
    if wavelength >= 20:
        return frequency / 4
    if wavelength <= 8:
        return frequency
    share = (40 / wavelength - 2) / 3
    return (1 - share) * frequency / 4 + share * frequency


def by_definition(layer, x):
    v, scores = scores_by_definition(layer, x)
    return layer.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


NORMALISED = {"kv_heads": 1, "head_dim": 10, "qk_norm": True, "norm_epsilon": 0.5, "rope_theta": 50.0}
NORMALISED["rope_scaling"] = "4,2,5,40"


@looped("mix, rope_theta", [("channel", None), ("head", 20.0), ("sum", None)])
@looped("pieces", [[9], [1] * 5, [4, 7]])
def test_the_hybrid_is_its_equations(mix, rope_theta, pieces):
    layer = Hybrid(DIM, HEADS, window=4, rope_theta=rope_theta, mix=mix, norm_epsilon=0.5).double()
    torch.nn.init.normal_(layer.read_out_norm.weight, 1.0, 0.5)
    x, state, outs = random(2, sum(pieces), DIM), None, []
    for piece in x.split(pieces, 1):
        y, state = layer(piece, state)
        outs.append(y)
    values, scores = scores_by_definition(layer, x)
    values = values * values.sigmoid()
    recent = scores.softmax(-1) @ values
    q, k, _ = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in layer.in_proj(x).chunk(3, -1))
    q, k = ((u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt()) for u in (q * q.sigmoid(), k * k.sigmoid()))
    gates = layer.gates(x).sigmoid().unflatten(-1, (HEADS, -1)).transpose(1, 2)
    weights, whole = torch.zeros(2, HEADS, DIM // HEADS, DIM // HEADS).double(), []
    for t in range(x.shape[1]):
        error = values[:, :, t] - (k[:, :, t, None] @ weights)[:, :, 0]
        weights = weights + k[:, :, t, :, None] * (gates[:, :, t, :1] * error)[:, :, None]
        whole.append((q[:, :, t, None] @ weights)[:, :, 0] / (DIM // HEADS) ** 0.5)
    whole, gates = torch.stack(whole, 2), gates[..., 1:]
    of_whole, of_recent = {"channel": (gates, 1 - gates), "head": gates.split(1, -1), "sum": (1, 1)}[mix]
    mixed = of_whole * whole + of_recent * recent
    normal = mixed / (mixed.square().mean(-1, keepdim=True) + 0.5).sqrt() * layer.read_out_norm.weight
    torch.testing.assert_close(torch.cat(outs, 1), layer.out_proj(normal.transpose(1, 2).flatten(2)))
    torch.testing.assert_close(state.weights, weights)


@looped("window", [None, 1, 2, 3, 5, 6, 8, 40])
@looped("options", [{}, {"softmax_heads": 6, "kv_heads": 3, "qkv_bias": True, "rope_theta": 50.0}, NORMALISED])
@looped("pieces", [[1], [5], [8], [17], [1] * 11, [2, 9], [7, 4]])
def test_softmax_attention_is_its_definition(window, options, pieces):
    layer, state, outs = SoftmaxAttention(DIM, HEADS, **options, window=window), None, []
    if options == NORMALISED:
        for norm in (layer.query_norm, layer.key_norm):
            torch.nn.init.normal_(norm.weight, 1.0, 0.5)
    layer, x = layer.double(), random(2, sum(pieces), DIM)
    for piece in x.split(pieces, 1):
        y, state = layer(piece, state)
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1), by_definition(layer, x))
    assert state.keys.shape[1:3] == (options.get("kv_heads", HEADS), min((window or 99) - 1, sum(pieces)))
    assert layer.out_proj.bias is None


def relative(positions="relative", clamp_len=None, window=None):
    """Return a float64 layer with weights large enough to distinguish positions."""
    if positions == "relative":
        distances = SinusoidalDistances(DIM, HEADS, clamp_len)
    else:
        distances = LearnedDistances(HEADS, DIM // HEADS, clamp_len, biased=positions == "shaw, biased")
    layer = RelativeAttention(DIM, HEADS, distances, window).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer


CLAMPED = [("relative", None), ("relative", 1), ("relative", 4), ("shaw", 1), ("shaw", 4), ("shaw, biased", 4)]


@looped("positions, clamp_len", CLAMPED)
@looped("window", [None, 1, 3])
@looped("lengths", [(1, 0), (5, 0), (4, 3), (1, 6), (3, 7)])
def test_relative_attention_is_its_definition(positions, clamp_len, window, lengths):
    layer = relative(positions, clamp_len, window)
    x, memory = (random(2, length, DIM) for length in lengths)
    found, after = layer(x, SegmentMemory(memory))
    whole = torch.cat([memory, x], 1)
    torch.testing.assert_close(found, by_definition(layer, whole)[:, lengths[1] :])
    assert torch.equal(after.hidden, whole)


def test_no_tensor_holds_a_vector_for_every_pair(largest_tensor):
    """Scores are O(B H L S); vectors of distances for every pair would take d = 32 times that."""
    layer = RelativeAttention(64, 2, SinusoidalDistances(64, 2))
    with largest_tensor() as mode:
        layer(torch.randn(1, 128, 64, requires_grad=True), SegmentMemory(torch.randn(1, 128, 64)))[0].sum().backward()
    assert mode.largest <= 2 * 2 * 128 * 256


def test_sinusoids_of_long_distances_survive_half_precision():
    """Sinusoids are computed in float32: bfloat16 does not distinguish 1000 from 1001."""
    positions = SinusoidalDistances(DIM, HEADS).to(torch.bfloat16)
    torch.nn.init.eye_(positions.proj.weight)
    rows = positions(1000, 1002).float()
    assert (rows[:, 0] - rows[:, 1]).abs().max() > 0.1


# The Delta RNN, the Recurrent Delta Net, and RWKV-7's time mixing, whose equations are in convert/test_fla.py.


def test_the_delta_rnn_is_the_papers_equation():
    """y_t = W_t phi(q_t) + R_t softmax(y_{t-1}), with both memories written by the delta rule."""
    layer, x = build(("delta_rnn",)), random(2, 7, DIM)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    phi_q, phi_k, v, beta = rule_inputs(layer.feedforward, x)
    k, recurrent_v, recurrent_beta = layer.recurrent_proj(x).split([DIM, DIM, HEADS], -1)
    k, recurrent_v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (k, recurrent_v))
    recurrent = memories("delta", k.softmax(-1), recurrent_v, [recurrent_beta.sigmoid().transpose(1, 2)])
    y, outs = torch.zeros(2, HEADS, 4).double(), []
    for t, ((w, _), (r, _)) in enumerate(zip(memories("delta", phi_k, v, beta), recurrent, strict=True)):
        y = ops.retrieve(phi_q[:, :, t], w) + ops.retrieve(y.softmax(-1), r)
        outs.append(y)
    expected = torch.stack(outs, 2).transpose(1, 2).flatten(2) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-10, atol=1e-12)
    options = {"sum_normalization": SumNormalization(), "scale_read_out": True}
    scaled = DeltaRnn(DIM, HEADS, layer.feedforward.feature_map, **options)
    scaled.double().load_state_dict(layer.state_dict())
    torch.testing.assert_close(scaled(x)[0], expected / 2, rtol=1e-10, atol=1e-12)  # / sqrt(d), after the recurrence
    without = layer.merge_heads(layer.feedforward.memory.write_and_read(phi_q, phi_k, v, {"beta": beta[0]})[0])
    without = without @ layer.out_proj.weight.T
    assert (expected - without).abs().max() > 0.1  # what is fed back matters


def test_the_recurrent_delta_net_is_the_papers_equation():
    """q, k, v and beta also depend on tanh(y_{t-1}); the delta rule writes, and the query reads, both as a softmax."""
    layer, x = build(("recurrent_delta",)), random(2, 7, DIM)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    d = DIM // HEADS
    of_tokens = layer.in_proj(x).view(2, 7, HEADS, 3 * d + 1)
    w, y, outs = torch.zeros(2, HEADS, d, d).double(), torch.zeros(2, HEADS, d).double(), []
    for t in range(7):
        logits = of_tokens[:, t] + (y.tanh().unsqueeze(2) @ layer.recurrent).squeeze(2)
        q, k, v, beta = logits.split([d, d, d, 1], -1)
        k = k.softmax(-1)
        w = w + k.unsqueeze(3) * (beta.sigmoid() * (v - ops.retrieve(k, w))).unsqueeze(2)
        y = ops.retrieve(q.softmax(-1), w)
        outs.append(y)
    expected = torch.stack(outs, 1).flatten(2) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-10, atol=1e-12)
    scaled = RecurrentDelta(DIM, HEADS, scale_read_out=True).double()
    scaled.load_state_dict(layer.state_dict())
    torch.testing.assert_close(scaled(x)[0], expected / 2, rtol=1e-10, atol=1e-12)  # / sqrt(d), after the recurrence


def test_a_self_referential_layer_reads_its_input_itself():
    """Each head its part, or its softmax. First values are the public code's, and so is the block's residual."""
    torch.manual_seed(1)
    layer, x = Srwm(256, 2, query_scale=0.01), torch.randn(2, 7, 256)
    expected = srwm(x.unflatten(-1, (2, 128)), layer.weights)[0].flatten(2) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x)[0], expected)
    y, q, k, rates = layer.weights.split([128, 128, 128, 4], -1)
    for part, mean, deviation in ((y, 0, 1), (q, 0, 0.01), (k, 0, 1), (rates, -1, 1)):
        assert abs(part.mean() - mean) < 0.01 and abs(part.std() * 128**0.5 / deviation - 1) < 0.1
    mapped = Srwm(256, 2, softmax_input=True, rate_mean=0.0)
    mapped.weights, mapped.out_proj = layer.weights, layer.out_proj
    parts = x.unflatten(-1, (2, 128)).softmax(-1).flatten(2)
    torch.testing.assert_close(mapped(x)[0], layer(parts)[0])
    block = DecoderLayer(layer, 256, 8, torch.relu, normalize_before=True).eval()
    for part in (block.fc2.weight, block.fc2.bias):
        torch.nn.init.zeros_(part)
    torch.testing.assert_close(block(x)[0], block.self_attn_layer_norm(x) + expected)


@looped("depth", [0.0, 0.5])
def test_first_values_of_time_mixing(depth):
    """Powers of the channels' places for mixtures and decays, as in public code; ranks from the size."""
    layer = TimeMix(1024, 16, depth=depth)
    share = torch.arange(1024) / 1024
    for mix, power in zip(layer.token_shift.mix, (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
        torch.testing.assert_close(mix, 1 - share ** (power * (1 - depth)))
    decays = -0.5 + 6 * (torch.arange(1024) / 1023) ** (1 + depth**0.3) - 5
    torch.testing.assert_close(layer.decay[2].bias, decays)
    parts = (layer.decay, layer.rate, layer.output_gate, *([layer.value] if depth else []))
    assert [len(part[0].weight) for part in parts] == [64, 64, 160, 64][: len(parts)]
    assert (layer.value is None) == (depth == 0) and layer.output_gate[2].bias is None
    for parameter in (layer.removal_scale, layer.rate_scale, layer.bonus):
        assert parameter.unique().numel() == 1


# Refused, in one sentence that names the argument: an attention, its options, and what is said.


def fast_weights(rule="delta", num_heads=2, feature_map="silu", **options):
    key_dim = options.setdefault("key_dim", 5)
    made = FEATURE_MAPS[feature_map](key_dim) if feature_map in FEATURE_MAPS else feature_map
    return FastWeightAttention(10, num_heads, made, rule, **options)


REFUSED = [
    (fast_weights, {"key_dim": None, "num_heads": 3}, "must be divisible by `num_heads`, got 10 and 3"),
    (fast_weights, {"rule": "hebb"}, "rule must be one of sum, gated, "),
    (fast_weights, {"feature_map": "cosine"}, "must be a FeatureMap such as FEATURE_MAPS['elu'](5), got str"),
    *((fast_weights, {"rule": "sum", **NORMALIZATIONS[name]}, "features must not be negative")
      for name in ("sum", "attention")),
    (fast_weights, {"conv_size": -1}, "`conv_size` must be at least 1 token, or 0 for no convolution, got -1"),
    (fast_weights, {"value_dim": 0}, "`value_dim` must be at least 1, got 0"),
    (fast_weights, {"value_heads": 3}, "`value_heads` must be a multiple of `num_heads` = 2, got 3"),
    (fast_weights, {"value_heads": 0}, "`value_heads` must be a multiple of `num_heads` = 2, got 0"),
    (fast_weights, {"output_gate": "relu"}, "`output_gate` must be one of none, silu, sigmoid, got 'relu'"),
    (fast_weights, {"output_gate": "silu", "output_gate_rank": 0}, "`output_gate_rank` must be at least 1, got 0"),
    (fast_weights, {"l2_normalization_epsilon": -1.0}, "`l2_normalization_epsilon` must be at least 0, got -1.0"),
    (fast_weights, {"norm_read_out": True, "norm_epsilon": 0.0}, "`norm_epsilon` must be above 0, got 0.0"),
    (fast_weights, {"decay_lower_bound": -5.0}, "`decay_lower_bound` must be left out for the update rule delta, got"),
    (fast_weights, {"rule": "kda", "decay_lower_bound": 0.0}, "`decay_lower_bound` must be below 0, got 0.0"),
    (fast_weights, {"num_heads": 0}, "`num_heads` must be at least 1, got 0"),
    (SoftmaxAttention, {"num_heads": 0}, "`embed_dim` must be divisible by `num_heads`, got 12 and 0"),
    (SoftmaxAttention, {"softmax_heads": 5}, "`softmax_heads` must divide `embed_dim` = 12, got 5"),
    (SoftmaxAttention, {"softmax_heads": 0}, "`softmax_heads` must divide `embed_dim` = 12, got 0"),
    (SoftmaxAttention, {"kv_heads": 3}, "`kv_heads` must divide the number of heads, 2, got 3"),
    (SoftmaxAttention, {"kv_heads": 0}, "`kv_heads` must divide the number of heads, 2, got 0"),
    (SoftmaxAttention, {"softmax_heads": 0, "head_dim": 4}, "`softmax_heads` must divide `embed_dim` = 12, got 0"),
    (SoftmaxAttention, {"head_dim": 0}, "`head_dim` must be at least 1, got 0"),
    (SoftmaxAttention, {"head_dim": 3, "rope_theta": 10.0},
     "`rope_theta` must be left out with heads of an odd size, got heads of 3"),
    (SoftmaxAttention, {"rope_theta": 0.0}, "`rope_theta` must be above 0, got 0.0"),
    (SoftmaxAttention, {"softmax_heads": 4, "rope_theta": 10.0},
     "`rope_theta` must be left out with heads of an odd size, got heads of 3"),
    (SoftmaxAttention, {"rope_scaling": "8,1,4,64"}, "`rope_theta` must be given with `rope_scaling`, got none"),
    *((SoftmaxAttention, {"rope_theta": 10.0, "rope_scaling": text},
       f"`rope_scaling` must be a factor, two ascending numbers of turns, and tokens, got '{text}'")
      for text in ("8,1,4", "8,1,4,x", "0,1,4,64", "8,4,4,64", "8,-1,4,64", "8,1,inf,64", "8,1,4,0", "nan,1,4,64", "")),
    (SoftmaxAttention, {"window": 0}, "`window` must be at least 1 token, got 0"),
]  # fmt: skip


@looped("attention, options, sentence", REFUSED)
def test_what_cannot_be_is_refused(attention, options, sentence):
    given = {} if attention is fast_weights else {"embed_dim": 12, "num_heads": 2}
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
        attention(**given | options)


@looped("kind", [("softmax",), ("local",), ("relative",), ("hybrid",)])
def test_documents_are_refused_where_they_would_be_mixed(kind):
    layer = build(kind)
    with pytest.raises(ValueError, match=f"`first` must be None for {type(layer).__name__}, which reads one document"):
        layer(random(1, 4, DIM), first=torch.tensor([[False, False, True, False]]))


def test_an_input_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"x must have shape \(B, L, D\), got \(7, 12\)"):
        build(FAST_WEIGHTS[0])(random(7, DIM))


class OwnState(NamedTuple):
    weights: torch.Tensor


def test_a_checkpoint_may_hold_the_state_of_an_attention_of_a_plug_in():
    """Its class is registered where the attention is defined."""

    class Own(Attention[OwnState]):
        states = (OwnState,)

    file = io.BytesIO()
    torch.save(OwnState(torch.ones(2)), file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)) is Own.states[0]


def test_a_state_of_a_plug_in_may_have_the_name_of_one_of_ours():
    of_plug_in = collections.namedtuple("FastWeightState", "weights")
    type("Alike", (Attention,), {"states": (of_plug_in,)})
    assert torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE["fairseq_fwp.FastWeightState"] is FastWeightState
    for wrong in (of_plug_in, (torch.Tensor,), (tuple,)):
        with pytest.raises(TypeError, match="must be a tuple of named tuples, got "):
            type("Wrong", (Attention,), {"states": wrong})
