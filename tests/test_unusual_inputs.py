"""Operators, feature maps, layers and flags of models on unusual inputs: any sizes, strides, dtypes and values.

Shapes: B batch, H heads, L tokens, Dk size of a key, Dv size of a value.
"""

import contextlib
import io
import math
from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from hypothesis import assume, given
from hypothesis import strategies as st
from support.operator_fixtures import one_thread  # noqa: F401
from support.small_models import make_dictionary
from support.subjects import (
    PER_KEY,
    RULES,
    check_errors,
    cotangents,
    kernel_or_auto,
    relative_error,
    results,
    sample_inputs,
)

from fairseq_fwp.checkpoints.convert.checkpoint import fairseq_config
from fairseq_fwp.models.presets import PRESETS_OF_MODELS
from fairseq_fwp.modules.attention import FastWeightAttention
from fairseq_fwp.modules.attention.base import check_heads
from fairseq_fwp.modules.attention.normalization import AttentionNormalization, SumNormalization
from fairseq_fwp.modules.feature_maps import DRAWS, FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

every_rule = pytest.mark.parametrize("rule", RULES)
every_rule_of_a_layer = pytest.mark.parametrize("rule", UPDATE_RULES)
every_map = pytest.mark.parametrize("name", FEATURE_MAPS)
# Numbers of every kind, of which a dtype may have none.
VALUES = {
    "zero": lambda finfo: 0.0,
    "denormal": lambda finfo: finfo.smallest_normal / 8,
    "huge": lambda finfo: min(1e30, finfo.max),
    "infinite": lambda finfo: math.inf,
    "minus infinite": lambda finfo: -math.inf,
    "nan": lambda finfo: math.nan,
}
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
layouts = st.sampled_from(["contiguous", "second last", "last first", "sliced", "offset"])
values, seeds = st.sampled_from([*VALUES]), st.integers(0, 2**31)


def special(value, dtype):
    return VALUES[value](torch.finfo(dtype))


def arrange(x, layout):
    """Return the same numbers with other strides, surrounded by NaN."""
    if layout == "contiguous" or x.dim() == 0:
        return x
    if layout == "second last":  # as in attention: heads and tokens transposed
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x
    if layout == "last first":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "offset":
        arranged = x.new_full((x.numel() + 3,), math.nan)[3:].view(x.shape)
    else:
        arranged = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), math.nan)[..., 1::2]
    return arranged.copy_(x)


def equal(one, other):
    """Compare all bits, except those of a NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


# Operators. Sizes below, at and beyond vectors, blocks of columns, groups of tokens, chunks and quadratic forms.
SIZES = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 130)
LENGTHS = (0, 1, 2, 3, 4, 5, 31, 32, 33, 63, 65, 70)
shapes = st.tuples(st.integers(0, 3), st.integers(0, 3), *(st.sampled_from(sizes) for sizes in (LENGTHS, SIZES, SIZES)))
full_shapes = shapes.map(lambda shape: tuple(max(1, n) for n in shape))


@every_rule
@given(shape=shapes, dtype=dtypes, state=st.booleans(), seed=seeds, strides=st.lists(layouts, min_size=7, max_size=7),
       sprinkled=st.sampled_from(["nothing", "zero", "denormal"]), threads=st.integers(1, 3))  # fmt: skip
def test_what_the_loop_gives(rule, shape, dtype, state, seed, strides, sprinkled, threads):
    """With and without gradients, inputs are unchanged, and errors are those of the reference in that precision."""
    torch.manual_seed(seed)
    if rule == "fwm" and sprinkled == "denormal":
        sprinkled = "zero"  # a very small write gives a norm of one, where fwm's gradient jumps

    def draw(n):
        inputs = sample_inputs(rule, shape, dtype, state=state or shape[2] == 0, seed=seed + 2 * n)
        gradients = cotangents(inputs, seed=seed + 2 * n + 1)
        names = [name for name, x in inputs.items() if x is not None]
        for name in names if sprinkled != "nothing" else ():
            inputs[name].masked_fill_(torch.rand(inputs[name].shape) < 0.3, special(sprinkled, inputs[name].dtype))
        strange = inputs | {name: arrange(inputs[name], layout) for name, layout in zip(names, strides, strict=False)}
        before = {name: strange[name].clone() for name in names}
        torch.set_num_threads(threads)
        found = results(kernel_or_auto(rule), strange, tuple(arrange(x, strides[-1]) for x in gradients))
        with torch.no_grad():
            assert torch.equal(kernel_or_auto(rule)(**strange)[0], found["out"])
        torch.set_num_threads(1)
        assert all(torch.equal(strange[name], x) for name, x in before.items())
        exact = {name: None if x is None else x.double() for name, x in inputs.items()}
        truth = results(RULES[rule].reference, exact, tuple(x.double() for x in gradients))
        return truth, results(RULES[rule].reference, inputs, gradients), found

    if dtype == torch.float64:  # the reference is the truth
        truth, _, found = draw(0)
        for name, x in truth.items():
            assert relative_error(found[name], x) <= 64 * torch.finfo(dtype).eps, name
    else:
        check_errors(f"{rule}, {shape}, {dtype}", draw, {})


@every_rule
@given(shape=full_shapes, dtype=dtypes, state=st.booleans(), seed=seeds, value=values, data=st.data())
def test_a_value_stays_where_the_rule_lets_it_go(rule, shape, dtype, state, seed, value, data):
    """Any values in one vector of one token: other sequences and heads do not change by a bit.

    Nor do the outputs before that token, nor the gradients of tokens after it from these outputs.
    """
    inputs = sample_inputs(rule, shape, dtype, state=state, seed=seed)
    d_out, d_state = cotangents(inputs, seed=seed + 1)
    given = {name: x for name, x in inputs.items() if x is not None} | {"d_out": d_out, "d_state": d_state}
    where = data.draw(st.sampled_from(sorted(given)))
    batch, head, token = (data.draw(st.integers(0, n - 1)) for n in shape[:3])
    clean = results(kernel_or_auto(rule), inputs, (d_out, d_state))
    at = (batch, head) if "state" in where else (batch, head, token)
    given[where][at] = special(value, given[where].dtype)
    spoilt = results(kernel_or_auto(rule), inputs, (d_out, d_state))
    healthy = torch.ones(shape[:2], dtype=torch.bool)
    healthy[batch, head] = False
    for name, x in clean.items():
        assert equal(spoilt[name][healthy], x[healthy]), name
    if where in ("d_out", "d_state"):
        assert all(torch.equal(spoilt[name], clean[name]) for name in ("out", "state"))
    elif where != "state":
        assert equal(spoilt["out"][batch, head, :token], clean["out"][batch, head, :token])
    if where == "d_out":
        after = (batch, head, slice(token + 1, None))
        for name in inputs.keys() - {"state"}:
            assert equal(spoilt[f"d_{name}"][after], clean[f"d_{name}"][after]), name


@every_rule
def test_states_beyond_any_memory_are_refused(rule):
    """The keys are views of one number, which need no memory."""
    inputs = sample_inputs(rule, (1, 1, 1, 1, 4), torch.float32, state=False)
    sizes = {"q": PER_KEY, "k": RULES[rule].key, **RULES[rule].gates}
    by_key = [name for name, of in sizes.items() if of[-1] == "Dk"]
    for size in (2**40, 2**62):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"allocate|overflow"):
            wide = {name: inputs[name].expand(*inputs[name].shape[:-1], size) for name in by_key}
            kernel_or_auto(rule)(**inputs | wide)


# Feature maps. Usual and unusual arguments; other maps have none.
ARGUMENTS = {
    "dpfp": {"nu": st.integers(-1, 12)},
    "favor": {
        "features": st.none() | st.integers(-1, 20),
        "draw": st.sampled_from([*DRAWS, "none"]),
        "offset": st.sampled_from([0.0, 1e-4, -1.0, math.nan, math.inf]),
    },
    "relu": {"features": st.none() | st.integers(-1, 20)},
}


def draw_map(name, head_dim, data):
    """Return a map with any arguments. Others are refused with their name."""
    arguments = data.draw(st.fixed_dictionaries(ARGUMENTS.get(name, {})))
    torch.manual_seed(data.draw(seeds))
    try:
        return FEATURE_MAPS[name](head_dim, **arguments)
    except ValueError as error:
        said = str(error)
    assert "\n" not in said and any(f"`{argument}`" in said for argument in arguments), said
    return assume(False)


@every_map
@given(head_dim=st.integers(1, 40), leading=st.lists(st.integers(0, 4), max_size=4).map(tuple), dtype=dtypes,
       layout=layouts, value=values, data=st.data())  # fmt: skip
def test_a_map_takes_every_vector_by_itself(name, head_dim, leading, dtype, layout, value, data):
    feature_map = draw_map(name, head_dim, data)
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
@given(head_dim=st.integers(1, 40), dtype=dtypes, data=st.data())
def test_a_map_gives_no_nan_for_finite_numbers_nor_do_its_gradients(name, head_dim, dtype, data):
    feature_map = draw_map(name, head_dim, data)
    numbers = [sign * special(value, dtype) for value in ("zero", "denormal", "huge") for sign in (1, -1)]
    drawn = st.sampled_from([*numbers, 1.0, -1.0, 20.0, -20.0])
    x = torch.tensor(data.draw(st.lists(drawn, min_size=head_dim, max_size=head_dim)), dtype=dtype).requires_grad_()
    features = feature_map(x)
    assert not features.isnan().any() and (not feature_map.positive or (features >= 0).all())
    (gradient,) = torch.autograd.grad(features[features.isfinite()].sum(), x)
    assert not gradient.isnan().any()


# Layers.
normalizations = st.sampled_from(["none", "sum", "attention", "both", "read-out"])


def is_defined(rule, feature_map, normalization):
    """Return whether the rule has this normalisation, and the map features for it."""
    of_all, normalizer = normalization in ("attention", "both"), UPDATE_RULES[rule].normalizer
    has_rule = not (of_all and normalizer.output_only) if normalizer else normalization in ("none", "sum")
    return has_rule and (normalization == "none" or FEATURE_MAPS[feature_map].positive)


def make_layer(rule, feature_map, normalization, *epsilon, embed_dim=24, num_heads=3, key_dim=None):
    """Return a layer; epsilon: the number, and whether it is added."""
    read_out_only, options = normalization == "read-out", {}
    if normalization in ("sum", "both"):
        options["sum_normalization"] = SumNormalization(*epsilon)
    if normalization in ("attention", "both", "read-out"):
        options["attention_normalization"] = AttentionNormalization(*epsilon, read_out_only=read_out_only)
    made = FEATURE_MAPS[feature_map](embed_dim // num_heads if key_dim is None else key_dim)
    return FastWeightAttention(embed_dim, num_heads, made, rule, key_dim=key_dim, **options)


@every_rule_of_a_layer
@given(name=st.sampled_from([*FEATURE_MAPS]), normalization=normalizations, adds=st.booleans(), value=values,
       seed=seeds, row=st.integers(0, 2), token=st.integers(0, 5))  # fmt: skip
def test_a_value_in_one_token_of_a_layer(rule, name, normalization, adds, value, seed, row, token):
    """Other sequences and earlier tokens do not change by a bit."""
    assume(is_defined(rule, name, normalization))
    torch.manual_seed(seed)
    layer, x = make_layer(rule, name, normalization, None, adds), torch.randn(3, 6, 24)
    spoilt = x.clone()
    spoilt[row, token] = special(value, x.dtype)
    with torch.no_grad():
        (expected, before), (found, after) = layer(x), layer(spoilt)
    others = torch.arange(3) != row
    assert equal(found[others], expected[others]) and equal(found[row, :token], expected[row, :token])
    for old, new in zip(before, after, strict=True):
        assert old is None or equal(new[others], old[others])


@every_rule_of_a_layer
@given(name=st.sampled_from([name for name, feature_map in FEATURE_MAPS.items() if feature_map.positive]),
       normalization=normalizations, scale=st.sampled_from([0.0, 1e-42, 1e-20, 1e-3, 1.0, 10.0, 100.0, 1e4]),
       seed=seeds, written=st.integers(0, 9))  # fmt: skip
def test_no_normaliser_of_a_layer_divides_by_zero(rule, name, normalization, scale, seed, written):
    """Outputs, states and gradients are finite if keys and queries share no features, or have none."""
    # Nothing bounds what the delta rule writes for keys of any length: it diverges, as the paper says.
    normalizer = UPDATE_RULES[rule].normalizer
    bounded = not (normalizer and normalizer.retrieved) or normalization not in ("none", "read-out")
    assume(normalization != "none" and is_defined(rule, name, normalization) and bounded)
    torch.manual_seed(seed)
    layer, x = make_layer(rule, name, normalization), torch.randn(2, 9, 24) * scale
    x[:, written:] = 0
    x.requires_grad_()
    out, state = layer(x)
    assert out.isfinite().all() and all(part is None or part.isfinite().all() for part in state)
    for gradient in torch.autograd.grad(out.sum(), [x, *layer.parameters()]):
        assert gradient.isfinite().all()


# Flags of language models, through fairseq's own parser.
SIZE = {"decoder-layers": "1", "decoder-embed-dim": "16", "decoder-ffn-embed-dim": "16", "decoder-attention-heads": "4"}
SIZE |= {"tokens-per-sample": "16"}
WHOLE = ["-1", "0", "1", "2", "3", "5", "8", "1.5", "x", ""]
REAL = ["-0.5", "0", "1e-30", "0.1", "1", "2", "nan", "inf", "x"]
SWITCH = (None,)  # without a value
FLAGS = {
    "decoder-update-rule": [*UPDATE_RULES, "softmax", "hebb"],
    "decoder-feature-map": [*FEATURE_MAPS, "cosine"],
    "fwp-backend": ["auto", "reference", "kernel", "gpu"],
    "decoder-positions": ["relative", "shaw", "shaw_biased", "absolute", "layerwise", "none"],
    "favor-draw": ["orthogonal", "gaussian", "authors", "none"],
    "output-layer": ["biased", "tied", "untied", "none"],
    "softmax-layers": ["0", "0,1", "1", "1,0", "0,0", "-1", "x", ""],
    "adaptive-softmax-cutoff": ["", "10", "10,20", "20,10", "10,99999", "0", "-5", "a,b", "10,,20"],
    **dict.fromkeys(
        ["decoder-key-dim", "dpfp-nu", "favor-features", "relu-features", "attention-window", "mem-len", "clamp-len",
         "div-val", "decoder-layers", "decoder-embed-dim", "decoder-ffn-embed-dim", "decoder-attention-heads",
         "tokens-per-sample", "max-target-positions"],
        WHOLE,
    ),
    **dict.fromkeys(
        ["dropout", "attention-dropout", "activation-dropout", "final-dropout", "favor-offset", "normalization-epsilon",
         "sum-normalization-epsilon"],
        REAL,
    ),
    **dict.fromkeys(
        ["sum-normalization", "attention-normalization", "attention-normalization-read-out-only", "scale-read-out",
         "add-normalization-epsilon", "norm-read-out", "attention-bias", "no-token-positional-embeddings",
         "same-length", "decoder-learned-pos", "positions-from-end", "untie-biases", "half-loss",
         "decoder-normalize-before"],
        SWITCH,
    ),
}  # fmt: skip


@every_rule_of_a_layer
@given(name=st.sampled_from([*FEATURE_MAPS]), embed_dim=st.integers(-4, 24), num_heads=st.integers(-1, 6),
       key_dim=st.none() | st.integers(1, 5), normalization=normalizations,
       epsilon=st.none() | st.sampled_from([-1.0, 0.0, 1e-30, 1.0, math.inf, math.nan]))  # fmt: skip
def test_a_layer_of_any_size_runs_if_it_may(rule, name, embed_dim, num_heads, key_dim, epsilon, normalization):
    """Otherwise, and only then, it is refused in one sentence."""
    sizes = embed_dim > 0 and num_heads > 0 and embed_dim % num_heads == 0
    of_epsilon = normalization == "none" or epsilon is None or 0 < epsilon < math.inf
    may = sizes and of_epsilon and is_defined(rule, name, normalization)
    try:
        check_heads(embed_dim, num_heads)
        size = {"embed_dim": embed_dim, "num_heads": num_heads, "key_dim": key_dim}
        layer = make_layer(rule, name, normalization, epsilon, **size)
    except ValueError as error:
        assert not may and "\n" not in str(error), error
        return
    out, _ = layer(torch.randn(2, 3, embed_dim))
    assert may and out.shape == (2, 3, embed_dim) and out.isfinite().all()


FAMILIES = ("fwp_lm", "fwp_xl_lm", "fwp_fwl_lm")
ARCHITECTURES = [arch for family in FAMILIES for arch in (family, *PRESETS_OF_MODELS[family])]
chosen = st.lists(st.sampled_from(sorted(FLAGS)), max_size=6, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(FLAGS[name]) for name in names})
)


@given(arch=st.sampled_from(ARCHITECTURES), flags=chosen)
def test_any_flags_give_a_model_that_trains_or_one_of_them_is_named(tmp_path_factory, arch, flags):
    words = ["--task", "language_modeling", "--arch", arch]
    for name, value in (SIZE | flags).items():
        words += [f"--{name}"] if value is None else [f"--{name}={value}"]
    parsed = io.StringIO()
    try:
        with contextlib.redirect_stderr(parsed):
            cfg = fairseq_config(words, tmp_path_factory.getbasetemp())
        task = Namespace(target_dictionary=make_dictionary(50))
        model = ARCH_MODEL_REGISTRY[arch].build_model(cfg.model, task)
    except SystemExit as end:
        said = parsed.getvalue().splitlines()[-1]
        assert end.code == 2 and ": error: " in said
    except ValueError as error:
        said = str(error)
        assert "\n" not in said
    else:
        tokens = torch.randint(4, 50, (2, min(6, cfg.task.tokens_per_sample)))
        loss = model.get_normalized_probs(model(tokens), log_probs=True).square().sum()
        loss.backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        assert gradients and all(x.isfinite().all() for x in (loss, *gradients))
        return
    assert any(name in said for name in flags), f"{flags}: {said}"
