"""Laws of the causal attentions: every rule and map of the tables, softmax, local and Transformer-XL's."""

import copy
import pickle
from itertools import product

import pytest
import torch
from attentions import half_precision_error, memories, random, read, rule_inputs
from pairwise import looped, pairwise

from fairseq_fwp.modules.attention import FastWeightAttention, FastWeightState
from fairseq_fwp.modules.attention.base import detach, reorder
from fairseq_fwp.modules.attention.delta_rnn import DeltaRnn
from fairseq_fwp.modules.attention.normalization import AttentionNormalization, SumNormalization
from fairseq_fwp.modules.attention.relative import LearnedDistances, RelativeAttention, SinusoidalDistances
from fairseq_fwp.modules.attention.softmax import LocalAttention, SoftmaxAttention
from fairseq_fwp.modules.attention.time_mix import TimeMix
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES, uniform_gate_bias

DIM, HEADS = 12, 3
NORMALIZATIONS = {
    "neither": {},
    "sum": {"sum_normalization": SumNormalization()},
    "attention": {"attention_normalization": AttentionNormalization()},
    "both": {"sum_normalization": SumNormalization(), "attention_normalization": AttentionNormalization()},
    "output": {"attention_normalization": AttentionNormalization(read_out_only=True)},
}


def is_defined(rule, feature_map, normalization):
    """Return whether this layer exists and is tested; later rules are tested with only two maps."""
    options = NORMALIZATIONS[normalization]
    if options and not FEATURE_MAPS[feature_map].positive:
        return False
    if "attention_normalization" in options and not UPDATE_RULES[rule].normalizes:
        return False
    if "attention_normalization" in options and UPDATE_RULES[rule].normalizer and normalization != "output":
        return False
    return rule in ("sum", "gated", "decay", "delta") or feature_map in ("dpfp", "identity")


# Every pair of rule, map and normalisation for which a layer exists.
FAST_WEIGHTS = [
    tuple(case.values())
    for case in pairwise(
        lambda case: is_defined(**case), rule=UPDATE_RULES, feature_map=FEATURE_MAPS, normalization=NORMALIZATIONS
    )
]
ROTARY = {"softmax_heads": 6, "kv_heads": 2, "qkv_bias": True, "rope_theta": 30.0}
BASELINES = {
    ("softmax",): lambda: SoftmaxAttention(DIM, HEADS),
    ("local",): lambda: LocalAttention(DIM, HEADS, window=6),
    ("softmax", "rotary"): lambda: SoftmaxAttention(DIM, HEADS, **ROTARY),
    ("local", "rotary"): lambda: LocalAttention(DIM, HEADS, window=4, **ROTARY),
    ("delta_rnn",): lambda: DeltaRnn(DIM, HEADS, FEATURE_MAPS["elu"](4), sum_normalization=SumNormalization()),
    ("time_mix",): lambda: TimeMix(DIM, HEADS, backend="reference"),
    ("relative",): lambda: RelativeAttention(DIM, HEADS, SinusoidalDistances(DIM, HEADS)),
    ("relative", "window"): lambda: RelativeAttention(DIM, HEADS, SinusoidalDistances(DIM, HEADS, 3), window=6),
    ("shaw",): lambda: RelativeAttention(DIM, HEADS, LearnedDistances(HEADS, DIM // HEADS, 3, biased=True)),
}
# The layers of DeltaNet, Gated DeltaNet and Kimi Delta Attention, with other sizes, and a convolution of one token.
MODERN = {
    ("delta", "silu", "DeltaNet"): {"conv_size": 4, "rms_norm": True, "norm_read_out": True, "scale_queries": True},
    ("gated_delta", "silu", "Gated DeltaNet"): {
        "conv_size": 3, "key_dim": 5, "value_dim": 2, "value_heads": 6, "output_gate": "silu", "norm_read_out": True,
    },
    ("kda", "identity", "KDA"): {
        "conv_size": 1, "value_heads": 6, "output_gate": "sigmoid", "output_gate_rank": 2, "decay_lower_bound": -5.0,
    },
}  # fmt: skip
KINDS = FAST_WEIGHTS + list(MODERN) + list(BASELINES)
HALF_ERROR = 0.02
every_attention = pytest.mark.parametrize("kind", KINDS, ids="-".join)


def build(kind, **options):
    if kind in BASELINES:
        return BASELINES[kind]().double().eval()
    rule, feature_map, normalization = kind
    own = {"l2_normalization": True, "l2_normalization_epsilon": 1e-6, **MODERN[kind]} if kind in MODERN else {}
    options = {"backend": "reference", **own, **NORMALIZATIONS.get(normalization, {}), **options}
    key_dim = options.get("key_dim", DIM // HEADS)
    return FastWeightAttention(DIM, HEADS, FEATURE_MAPS[feature_map](key_dim), rule, **options).double().eval()


# Laws of every attention.


@every_attention
def test_pieces_with_the_carried_state_are_the_whole(kind):
    """Rows of a state can be selected, and a detached state has the same values without a graph."""
    layer, x, order = build(kind), random(3, 9, DIM).requires_grad_(), torch.tensor([2, 0, 2])
    whole, last = layer(x)
    _, state = layer(x[:, :4])
    _, state = layer(x[:, 4:5], state)
    after, end = layer(x[:, 5:], state)
    torch.testing.assert_close(after, whole[:, 5:])
    torch.testing.assert_close(layer(x[:, :4])[0], whole[:, :4])
    for ours, theirs in zip(end, last, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(layer(x[order, 5:], reorder(state, order))[0], whole[order, 5:])
    (flows,) = torch.autograd.grad(after.sum(), x)
    cut = detach(state)
    assert all(part is None or not part.requires_grad for part in cut)
    detached = layer(x[:, 5:], cut)[0]
    assert torch.equal(detached, after)
    (ends,) = torch.autograd.grad(detached.sum(), x)
    assert flows[:, :5].any() and not ends[:, :5].any()


@every_attention
def test_an_output_depends_on_no_later_token_and_on_no_padding(kind):
    """Nor do later outputs depend on padding, on either side."""
    layer, x, more = build(kind), random(2, 6, DIM), random(2, 1, DIM)
    expected, expected_state = layer(x)
    changed = x.clone()
    changed[:, 4:] += 1
    assert torch.equal(layer(changed)[0][:, :4], expected[:, :4])
    assert not torch.allclose(layer(changed)[0][:, 4:], expected[:, 4:])
    for places in (slice(3, None), slice(None, 6)):
        padded, mask = 10 * random(2, 9, DIM), torch.ones(2, 9, dtype=torch.bool)
        padded[:, places], mask[:, places] = x, False
        y, state = layer(padded, key_padding_mask=mask)
        torch.testing.assert_close(y[:, places], expected)
        assert y.isfinite().all()
        torch.testing.assert_close(layer(more, state)[0], layer(more, expected_state)[0])


@every_attention
def test_copies_and_transforms_of_functions(kind):
    """A pickled layer is the same; gradients of each sample and derivatives in forward mode are those of autograd."""
    layer, x = build(kind), random(3, 1, 5, DIM)
    for same in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert torch.equal(same(x[0])[0], layer(x[0])[0])
        assert getattr(same, "rule", None) is getattr(layer, "rule", None)
    parameters = dict(layer.named_parameters())
    values = {name: parameter.detach() for name, parameter in parameters.items()}
    along = {name: torch.randn_like(value) for name, value in values.items()}
    for module in layer.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"

    def loss(values, sample):
        return torch.func.functional_call(layer, values, (sample,))[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, x)
    _, slopes = torch.func.jvp(lambda values: torch.stack([loss(values, sample) for sample in x]), (values,), (along,))
    for i, sample in enumerate(x):
        gradients = torch.autograd.grad(loss(parameters, sample), list(parameters.values()))
        for name, expected in zip(parameters, gradients, strict=True):
            torch.testing.assert_close(found[name][i], expected)
        slope = sum((gradient * along[name]).sum() for name, gradient in zip(parameters, gradients, strict=True))
        torch.testing.assert_close(slopes[i], slope)


@looped("kind", KINDS)
@looped("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(kind, dtype):
    """A half-precision layer, and a float32 layer under autocast, are close to float32.

    The state of fast weights is in float32.
    """
    layer = build(kind, **({} if kind in BASELINES else {"backend": "auto"})).float()
    x = torch.randn(8, 12, DIM)
    expected = layer(x)[0]
    with torch.autocast("cpu", dtype):
        mixed = layer(x)
    half = copy.deepcopy(layer).to(dtype)(x.to(dtype))
    for out, state in (mixed, half):
        assert out.dtype == dtype and half_precision_error(out, expected) < HALF_ERROR
        assert kind in BASELINES or all(part is None or part.dtype == torch.float32 for part in state)


# Fast weights.


@pytest.mark.parametrize("rule", UPDATE_RULES)
@looped("carried", [False, True])
def test_it_is_the_papers_equations(rule, carried):
    """With every map and normalisation: out = W q, divided by z . q, from the layer's own projections."""
    for kind, backend in product([kind for kind in FAST_WEIGHTS if kind[0] == rule], ("reference", "auto")):
        layer, x = build(kind, backend=backend), random(2, 7, DIM)
        q, k, v, gates = rule_inputs(layer, x)
        attention = layer.attention_normalization
        size = (2, HEADS, layer.feature_map.feature_dim)
        state = (random(*size, DIM // HEADS), random(*size).abs() + 0.5) if carried else None
        given = FastWeightState(state[0], state[1] if attention else None) if carried else None
        found, last = layer(x, given)
        divided = attention and not attention.read_out_only
        outs = []
        for t, (w, z) in enumerate(memories(rule, k, v, gates, divided, state)):
            divisor = (q[:, :, t] * z).sum(-1, keepdim=True).clamp(min=1e-6) if attention else 1
            outs.append(read(q[:, :, t], w) / divisor)
        expected = layer.out_proj(torch.stack(outs, 2).transpose(1, 2).flatten(2))
        torch.testing.assert_close(found, expected, msg=lambda said, kind=kind: f"{kind}: {said}")
        torch.testing.assert_close(last.weights, w)
        if attention:
            torch.testing.assert_close(last.normalizer, z)


@looped("length, by_scores", [(6, True), (12, False)])
@looped("kind", [kind for kind in FAST_WEIGHTS if kind[0] == "sum"])
def test_short_sequences_are_read_by_their_scores(kind, length, by_scores):
    """Without a state the sum rule is attention: output, state, later outputs and gradients are the same."""
    layer = FastWeightAttention(32, 2, FEATURE_MAPS[kind[1]](16), "sum", **NORMALIZATIONS[kind[2]]).double().eval()
    x = random(2, length, 32).requires_grad_()
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, :2] = True

    def results():
        y, state = layer(x, None, padding)
        more, _ = layer(x[:, :1], state)
        gradients = torch.autograd.grad(y.square().sum() + more.square().sum(), [x, *layer.parameters()])
        torch.testing.assert_close(layer(x, None, padding, keep_state=False)[0], y)
        return [y, more, *state, *gradients]

    layer.backend = "reference"
    expected = results()
    layer.backend = "auto"
    visits, operator = [], layer.rule.operator
    layer.rule = layer.rule._replace(
        operator=lambda *tensors, **_: visits.append(1) or operator(*tensors, backend="auto")
    )
    for ours, theirs in zip(results(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    reads = (2 if layer.attention_normalization and layer.rule.forgets else 1) * (1 if by_scores else 3)
    assert len(visits) == reads  # tokens after a state visit it
    assert (layer(x, None, padding, keep_state=False)[1] is None) == by_scores


def test_refusals():
    elu, identity = FEATURE_MAPS["elu"](4), FEATURE_MAPS["identity"](4)
    for error, message, attempt in (
        (ValueError, "must be divisible by `num_heads`, got 12 and 5", lambda: FastWeightAttention(12, 5, elu, "sum")),
        (ValueError, "`embed_dim` must be divisible by `num_heads`, got 12 and 0", lambda: SoftmaxAttention(12, 0)),
        (ValueError, "rule must be one of sum, gated, .*, got 'hebb'", lambda: FastWeightAttention(12, 3, elu, "hebb")),
        (TypeError, r"must be a FeatureMap such as .*, got str", lambda: FastWeightAttention(12, 3, "elu", "sum")),
        (ValueError, r"x must have shape \(B, L, D\), got \(7, 12\)", lambda: build(FAST_WEIGHTS[0])(random(7, 12))),
        *(
            (ValueError, "features must not be negative", lambda options=NORMALIZATIONS[name]: FastWeightAttention(
                12, 3, identity, "sum", **options
            ))
            for name in ("sum", "attention")
        ),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            attempt()


def test_a_padded_token_leaves_the_memory_as_it_is():
    """Rules that forget keep everything at padding: their gates are 1 there."""
    for kind in FAST_WEIGHTS:
        layer, x = build(kind), random(2, 4, DIM)
        _, state = layer(x)
        _, after = layer(x, state, torch.ones(2, 4, dtype=torch.bool))
        for ours, theirs in zip(after, state, strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs), kind


def test_options_of_the_public_code():
    x = random(2, 5, DIM)
    plain, scaled, normed = (
        build(("delta", "elu", "both"), **options)
        for options in ({}, {"scale_read_out": True}, {"norm_read_out": True})
    )
    for layer in (plain, scaled, normed):
        layer.load_state_dict(plain.state_dict(), strict=False)
        layer.out_proj.weight.data.copy_(torch.eye(DIM))
    out = plain(x)[0]
    torch.testing.assert_close(scaled(x)[0], out / 2)  # 1 / sqrt(12 / 3)
    heads = normed(x)[0].unflatten(-1, (HEADS, -1))
    torch.testing.assert_close(heads.mean(-1), torch.zeros(2, 5, HEADS, dtype=torch.float64))
    torch.testing.assert_close(torch.nn.functional.layer_norm(out.unflatten(-1, (HEADS, -1)), (4,)), heads)


def test_epsilons_reach_every_divisor():
    """With a huge epsilon every divisor is that number, or grows by it."""
    x = random(2, 5, DIM)
    for add in (False, True):
        attention = AttentionNormalization(100.0, add)
        layer = build(
            ("delta", "elu", "both"), sum_normalization=SumNormalization(100.0, add), attention_normalization=attention
        )
        q, k, v, _ = rule_inputs(layer, x)
        bare = build(("delta", "elu", "neither"))
        bare.load_state_dict(layer.state_dict())
        plain = rule_inputs(bare, x)[0]
        sums = plain.sum(-1, keepdim=True)
        torch.testing.assert_close(q, plain / (sums + 100 if add else 100.0))
        divisor, key, value, z = attention.apply(layer.rule, q, k, v, [], None, backend="reference")
        torch.testing.assert_close(divisor, (k.cumsum(2) * q).sum(-1) + 100 if add else torch.full_like(divisor, 100))
        root = (1 + 99 * (torch.arange(5) > 0)).sqrt().double()[:, None]  # nothing is retrieved for the first token
        if not add:
            torch.testing.assert_close(key * root, k)
            torch.testing.assert_close(value, v * root)
        assert z.untyped_storage().nbytes() == z.numel() * z.element_size()  # not a slice of all sums


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


@looped("rule", ["gated", "decay"])
@looped("logit", [6.0, 8.0])
def test_long_memories_survive_half_precision(rule, logit):
    """Gates just below 1, which bfloat16 rounds to 1, over 1,000 tokens."""
    layer = build((rule, "elu", "sum"), backend="auto").float()
    rows = layer.sizes[2:]
    with torch.no_grad():
        layer.in_proj.weight[-sum(rows) :] = 0
        layer.in_proj.weight[-sum(rows) :, 0] = logit
        for bias in layer.gate_biases.values():
            bias.zero_()
    x = torch.randn(1, 1000, DIM)
    x[..., 0] = 1
    expected = copy.deepcopy(layer).double()(x.double())[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)[0].double()
    assert (found - expected).norm() < 0.01 * expected.norm(), (found - expected).norm() / expected.norm()


@looped("dtype", [torch.bfloat16, torch.float16])
@looped("normalization", NORMALIZATIONS)
def test_options_in_half_precision(normalization, dtype):
    layer = build(("delta", "elu", normalization), backend="auto", norm_read_out=True, scale_read_out=True).to(dtype)
    out = layer(torch.randn(2, 6, DIM).to(dtype))[0]
    assert out.dtype == dtype and out.isfinite().all()


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
CORRECTING = ("delta", "gated_delta", "kda", "gdn2")
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
