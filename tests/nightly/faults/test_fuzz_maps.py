"""Every feature map, and every attention with it, on unusual inputs."""

import math

import pytest
import torch
from fuzz_values import arrange, dtypes, equal, layouts, seeds, special, values
from hypothesis import assume, given
from hypothesis import strategies as st

from fairseq_fwp.modules.attention import FastWeightAttention
from fairseq_fwp.modules.attention.base import check_heads
from fairseq_fwp.modules.attention.normalization import AttentionNormalization, SumNormalization
from fairseq_fwp.modules.feature_maps import DRAWS, FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

every_map = pytest.mark.parametrize("name", FEATURE_MAPS)
# Usual and unusual arguments; other maps have none.
ARGUMENTS = {
    "dpfp": {"nu": st.integers(-1, 12)},
    "favor": {
        "features": st.none() | st.integers(-1, 20),
        "draw": st.sampled_from([*DRAWS, "none"]),
        "offset": st.sampled_from([0.0, 1e-4, -1.0, math.nan, math.inf]),
    },
    "relu": {"features": st.none() | st.integers(-1, 20)},
}
head_dims = st.integers(1, 40)
leading = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def arguments_of(name):
    return st.fixed_dictionaries(ARGUMENTS.get(name, {}))


def build(name, head_dim, arguments, seed=0):
    """Return the map, or None if it is refused, after checking that the error names the argument."""
    torch.manual_seed(seed)
    try:
        return FEATURE_MAPS[name](head_dim, **arguments)
    except ValueError as error:
        assert "`" in str(error) and "\n" not in str(error)
        return None


@every_map
@given(head_dim=head_dims, leading=leading, dtype=dtypes, layout=layouts, seed=seeds, value=values, data=st.data())
def test_every_vector_is_mapped_by_itself(name, head_dim, leading, dtype, layout, seed, value, data):
    feature_map = build(name, head_dim, data.draw(arguments_of(name)), seed)
    assume(feature_map is not None)
    x = torch.randn(*leading, head_dim).to(dtype)
    features = feature_map(arrange(x, layout))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert features.shape == (*leading, feature_map.feature_dim) and features.dtype in (dtype, wide)
    assert features.isfinite().all()
    # Matrix products with other strides round differently, and an exponential multiplies that by its exponent.
    rounding = {"rtol": 256 * torch.finfo(wide).eps, "atol": 1e-5} if name == "favor" else {}
    torch.testing.assert_close(features, feature_map(x), **rounding)
    assert not feature_map.positive or (features >= 0).all()
    if not x.numel():
        return
    vectors = x.reshape(-1, head_dim)
    row = data.draw(st.integers(0, len(vectors) - 1))
    spoilt = vectors.clone()
    spoilt[row, data.draw(st.integers(0, head_dim - 1)) :] = special(value, dtype)
    others = torch.arange(len(vectors)) != row
    assert torch.equal(feature_map(spoilt.view(x.shape)).view(len(vectors), -1)[others], feature_map(vectors)[others])


@every_map
@given(head_dim=head_dims, dtype=dtypes, seed=seeds, data=st.data())
def test_finite_numbers_give_no_nan_nor_do_their_gradients(name, head_dim, dtype, seed, data):
    feature_map = build(name, head_dim, data.draw(arguments_of(name)), seed)
    assume(feature_map is not None)
    values = [sign * special(value, dtype) for value in ("zero", "denormal", "huge") for sign in (1, -1)]
    drawn = st.sampled_from([*values, 1.0, -1.0, 20.0, -20.0])
    x = torch.tensor(data.draw(st.lists(drawn, min_size=head_dim, max_size=head_dim)), dtype=dtype).requires_grad_()
    features = feature_map(x)
    assert not features.isnan().any()
    assert not feature_map.positive or (features >= 0).all()
    (gradient,) = torch.autograd.grad(features[features.isfinite()].sum(), x)
    assert not gradient.isnan().any()


POSITIVE = [name for name, feature_map in FEATURE_MAPS.items() if feature_map.positive]
CORRECTING = ("delta", "gated_delta", "kda")
NORMALIZATIONS = st.sampled_from(["none", "sum", "attention", "both", "read-out"])


def is_defined(rule, normalization):
    """Return whether the rule has this normalisation."""
    of_all, rule = normalization in ("attention", "both"), UPDATE_RULES[rule]
    return (rule.normalizes or normalization in ("none", "sum")) and not (of_all and rule.normalizer)


def normalizations(name, *epsilon):
    """Return the arguments of a layer; epsilon: the number, and whether it is added."""
    read_out_only = name == "read-out"
    attention = AttentionNormalization(*epsilon, read_out_only=read_out_only)
    return {
        **({"sum_normalization": SumNormalization(*epsilon)} if name in ("sum", "both") else {}),
        **({"attention_normalization": attention} if name in ("attention", "both", "read-out") else {}),
    }


def build_attention(rule, feature_map, normalization, add_epsilon=False):
    return FastWeightAttention(24, 3, feature_map, rule, **normalizations(normalization, None, add_epsilon))


@pytest.mark.parametrize("rule", UPDATE_RULES)
@given(
    name=st.sampled_from(list(FEATURE_MAPS)),
    normalization=NORMALIZATIONS,
    add_epsilon=st.booleans(),
    value=values,
    seed=seeds,
    data=st.data(),
)
def test_a_value_in_one_token_of_a_layer(rule, name, normalization, add_epsilon, value, seed, data):
    """Other sequences and earlier tokens do not change by a bit; a masked token has no effect."""
    assume((normalization == "none" or FEATURE_MAPS[name].positive) and is_defined(rule, normalization))
    torch.manual_seed(seed)
    layer = build_attention(rule, FEATURE_MAPS[name](8), normalization, add_epsilon)
    x = torch.randn(3, 6, 24)
    row, token = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 5))
    spoilt = x.clone()
    spoilt[row, token] = special(value, x.dtype)
    with torch.no_grad():
        (expected, before), (found, after) = layer(x), layer(spoilt)
    others = torch.arange(3) != row
    assert equal(found[others], expected[others]) and equal(found[row, :token], expected[row, :token])
    for old, new in zip(before, after, strict=True):
        assert old is None or equal(new[others], old[others])


@pytest.mark.parametrize("name", POSITIVE)
@given(
    rule=st.sampled_from(list(UPDATE_RULES)),
    normalization=st.sampled_from(["sum", "attention", "both", "read-out"]),
    scale=st.sampled_from([0.0, 1e-42, 1e-20, 1e-3, 1.0, 10.0, 100.0, 1e4]),
    seed=seeds,
    data=st.data(),
)
def test_no_normaliser_divides_by_zero(name, rule, normalization, scale, seed, data):
    """Outputs, states and gradients are finite if keys and queries share no features, or have none."""
    # Nothing bounds what the delta rule writes for keys of any length: it diverges, as the paper says.
    assume(is_defined(rule, normalization) and (rule not in CORRECTING or normalization != "read-out"))
    torch.manual_seed(seed)
    layer = build_attention(rule, FEATURE_MAPS[name](8), normalization)
    x = torch.randn(2, 9, 24) * scale
    if data.draw(st.booleans()):
        x[:, data.draw(st.integers(0, 8)) :] = 0
    x.requires_grad_()
    out, state = layer(x)
    assert out.isfinite().all() and all(part is None or part.isfinite().all() for part in state)
    for gradient in torch.autograd.grad(out.sum(), [x, *layer.parameters()]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("rule", UPDATE_RULES)
@given(
    name=st.sampled_from(list(FEATURE_MAPS)),
    embed_dim=st.integers(-4, 24),
    num_heads=st.integers(-1, 6),
    key_dim=st.none() | st.integers(1, 5),
    epsilon=st.none() | st.sampled_from([-1.0, 0.0, 1e-30, 1.0, math.inf, math.nan]),
    normalization=NORMALIZATIONS,
)
def test_a_layer_of_any_size_runs_or_is_refused_in_one_sentence(
    rule, name, embed_dim, num_heads, key_dim, epsilon, normalization
):
    try:
        check_heads(embed_dim, num_heads)
        feature_map = FEATURE_MAPS[name](embed_dim // num_heads if key_dim is None else key_dim)
        layer = FastWeightAttention(
            embed_dim, num_heads, feature_map, rule, key_dim=key_dim, **normalizations(normalization, epsilon)
        )
    except ValueError as error:
        assert "\n" not in str(error)
        return
    out, _ = layer(torch.randn(2, 3, embed_dim))
    assert out.shape == (2, 3, embed_dim) and out.isfinite().all()
