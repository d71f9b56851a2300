"""Linear attention to a whole sequence: the paper's equation, padding, precision; sizes are laws of translation."""

import copy

import torch
from support.attentions import half_precision_error, random
from support.pairwise import looped

from fairseq_fwp.modules.attention.linear import LinearAttention
from fairseq_fwp.modules.attention.normalization import Division
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS

DIM, HEADS, SOURCE_DIM = 12, 3, 10


def build(name, **options):
    return LinearAttention(DIM, HEADS, FEATURE_MAPS[name](DIM // HEADS), source_dim=SOURCE_DIM, **options).double()


every_map = looped("name", FEATURE_MAPS)


def by_definition(layer, x, source, padding=None):
    """Compute Eq. 13 of Schlag et al. 2021 over the whole sequence, one query, key and head at a time."""
    rows = []
    for b in range(len(x)):
        q, kv = layer.q_proj(x[b]), layer.kv_proj(source[b])
        heads = []
        for h in range(HEADS):
            at = slice(h * DIM // HEADS, (h + 1) * DIM // HEADS)
            k, v = layer.feature_map(kv[:, :DIM][:, at]), kv[:, DIM:][:, at]
            reads = []
            for query in layer.feature_map(q[:, at]):
                kept = [j for j in range(len(source[b])) if padding is None or not padding[b, j]]
                numerator = sum((k[j] @ query) * v[j] for j in kept)
                divisor = sum(k[j] @ query for j in kept)
                epsilon = layer.division.epsilon
                divisor = divisor + epsilon if layer.division.add_epsilon else divisor.clamp(min=epsilon)
                reads.append(numerator / divisor if layer.feature_map.positive else numerator)
            heads.append(torch.stack(reads))
        rows.append(torch.cat(heads, -1))
    return layer.out_proj(torch.stack(rows))


@every_map
@looped("options", [{}, {"bias": True}, *({"division": Division(9.0, add)} for add in (False, True))])
def test_equation_13(name, options):
    """Biases are of every projection, and start at zero."""
    layer, bias = build(name, **options), "bias" in options
    biases = {key: value for key, value in layer.named_parameters() if key.endswith("bias") and "map" not in key}
    assert list(biases) == ["q_proj.bias", "kv_proj.bias", "out_proj.bias"] * bias
    for value in biases.values():
        assert not value.any()
        torch.nn.init.normal_(value)
    x, source = random(2, 4, DIM), random(2, 6, SOURCE_DIM)
    padding = torch.tensor([[True, False, False, True, False, False], [False] * 6])
    torch.testing.assert_close(layer(x, source), by_definition(layer, x, source))
    expected = by_definition(layer, x, source, padding)
    torch.testing.assert_close(layer(x, source, padding), expected)
    torch.testing.assert_close(layer.read(x, layer.summarize(source, padding)), expected)
    weights = layer.weights(x, source, padding)  # they are the factors of the values
    values = layer.split_heads(layer.kv_proj(source)[..., DIM:])
    torch.testing.assert_close(layer.out_proj((weights @ values).transpose(1, 2).flatten(2)), expected)
    assert not weights[0, :, :, [0, 3]].any() and weights.shape == (2, HEADS, 4, 6)
    nothing = layer(x, source, torch.ones_like(padding))
    assert torch.equal(nothing, layer.out_proj(torch.zeros_like(x)))


@every_map
@looped("length, by_scores", [(3, True), (20, False)])
def test_short_sequences_are_read_by_their_scores(name, length, by_scores, monkeypatch):
    """Both forms give the same attention, for every map; that for long sequences never has a number per pair."""
    layer = build(name)
    x, source = random(2, length, DIM), random(2, length, SOURCE_DIM)
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, :2] = True
    expected = layer.read(x, layer.summarize(source, padding))
    with monkeypatch.context() as patch:
        patch.delattr(LinearAttention, "summarize" if by_scores else "_weights_and_values")
        torch.testing.assert_close(layer(x, source, padding), expected)


@every_map
@looped("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(name, dtype):
    """A half-precision layer, and a float32 layer under autocast, are close to float32, with a float32 summary."""
    layer = build(name)
    layer = layer.float()
    x, source = torch.randn(4, 12, DIM), torch.randn(4, 50, SOURCE_DIM)
    expected, half = layer(x, source), copy.deepcopy(layer).to(dtype)
    with torch.autocast("cpu", dtype):
        mixed = layer(x, source), layer.summarize(source)
    for out, state in (mixed, (half(x.to(dtype), source.to(dtype)), half.summarize(source.to(dtype)))):
        assert out.dtype == dtype and all(part is None or part.dtype == torch.float32 for part in state)
        assert half_precision_error(out, expected) < 0.03
    # The terms are rounded, their sum is not.
    k, v = (part.double() for part in half._keys_and_values(source.to(dtype), None))
    size = (k.norm() * v.norm()).item()
    torch.testing.assert_close(state.weights.double(), k.mT @ v, rtol=0, atol=1e-6 * size)
