"""Another attention replaces softmax: the part of the pretrained one that is kept, and other initial values."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.attentions import rule_inputs
from support.pairwise import looped
from support.refusals import refused
from support.small_models import make_dictionary

from checkpoints.convert.conftest import Command, load
from fairseq_fwp.checkpoints.convert import checkpoint
from fairseq_fwp.checkpoints.convert.conversion import Conversion
from fairseq_fwp.checkpoints.linearize import linearize
from fairseq_fwp.checkpoints.linearize.costs import read_text
from fairseq_fwp.checkpoints.linearize.options import WITHOUT_WEIGHTS, Method
from fairseq_fwp.checkpoints.linearize.projections import SCORE_SCALE, fewer_features
from fairseq_fwp.cli.linearize import main as fwp_linearize
from fairseq_fwp.modules.attention import FastWeightAttention, SoftmaxAttention
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.patches.options import flag

DIM, HEADS, HEAD, LENGTH = 16, 2, 8, 12
# Of scores without a map.
SCALE = SCORE_SCALE / math.sqrt(HEAD)
WORDS = [f"w{index}" for index in range(46)]
FLAGS = {
    "decoder_update_rule": "softmax", "decoder_layers": 2, "decoder_embed_dim": DIM, "decoder_ffn_embed_dim": 24,
    "decoder_attention_heads": HEADS, "decoder_normalize_before": True, "attention_dropout": 0.1,
    "tokens_per_sample": LENGTH,
}  # fmt: skip


of_both = looped("biases", [True, False])


def build(conversion):
    """Return the model of a conversion, in evaluation."""
    return checkpoint.build_converted(conversion).eval()


def make_source(biases=True, **more):
    """Return a softmax model with large random weights, in float64."""
    bare = Conversion("fwp_lm", {**FLAGS, "attention_bias": biases, **more}, {}, WORDS, [])
    model = checkpoint.build_empty(bare).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return bare._replace(weights=dict(model.named_parameters()))


@pytest.fixture
def source():
    return make_source()


def target(rule, feature_map=None, state_size=None, **settings):
    """Return the options of the new attention, and how it is made."""
    method = Method(state_size, **{name: settings.pop(name) for name in Method._fields if name in settings})
    given = {"decoder_update_rule": rule, "decoder_feature_map": feature_map, **settings}
    return {name: value for name, value in given.items() if value is not None}, method


def keeping(layers, text=None, **settings):
    """Return the same for the decay rule, with layers that stay softmax."""
    more = {} if text is None else {"kl_text": Path(text)}
    return target("decay", state_size=4, keep_softmax_layers=layers, **more, **settings)


def attention_of(conversion):
    return build(conversion).decoder.layers[1].self_attn


def projected(source, x):
    """Return q, k, v (B, H, L, d) of the source's second layer."""
    prefix = "decoder.layers.1.self_attn.in_proj."
    y = F.linear(x, source.weights[f"{prefix}weight"], source.weights.get(f"{prefix}bias"))
    return y.unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4).unbind(0)


def random_input():
    return torch.randn(3, LENGTH, DIM, dtype=torch.float64)


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_every_rule_and_map_takes_its_place(source, rule):
    tokens = torch.randint(4, 50, (2, LENGTH))
    for name, feature_map in FEATURE_MAPS.items():
        normalized = feature_map.positive
        of_output = normalized and UPDATE_RULES[rule].normalizer is not None
        only_it = of_output and UPDATE_RULES[rule].normalizer.output_only
        settings = {
            "sum_normalization": normalized,
            "attention_normalization": of_output,
            "attention_normalization_read_out_only": only_it,
        }
        converted = linearize(source, *target(rule, name, 4, **settings))
        model = build(converted)
        assert model.decoder.layers[0].self_attn.feature_map.feature_dim == 4
        assert model.decoder.state_size(LENGTH) == 2 * 4 * DIM  # of either layer m D numbers
        assert model(tokens)[0].isfinite().all()
        # All else is the source's.
        for key, weight in source.weights.items():
            if ".self_attn." not in key:
                assert torch.equal(converted.weights[key], weight)
        kept = "decoder.layers.1.self_attn.out_proj.weight"
        assert torch.equal(converted.weights[kept], source.weights[kept])
        assert "attention_dropout" not in checkpoint.command_line(converted)


@of_both
@looped("size", [HEAD, None, HEAD + 3])
def test_with_as_many_features_as_dimensions_the_scores_are_those_of_softmax(biases, size):
    """Features beyond the dimensions change no score."""
    source = make_source(biases)
    x = random_input()
    q, k, v = projected(source, x)
    attention = attention_of(linearize(source, *target("gated", state_size=size)))
    new_q, new_k, new_v, _ = rule_inputs(attention, x)
    torch.testing.assert_close(new_q @ new_k.transpose(-1, -2), q @ k.transpose(-1, -2) * SCALE)
    torch.testing.assert_close(new_v, v)
    assert new_q[..., HEAD:].eq(0).all() and new_k[..., HEAD:].ne(0).all()


@of_both
def test_a_map_sees_the_queries_of_softmax(biases):
    source = make_source(biases)
    x = random_input()
    q, k, _ = projected(source, x)
    attention = attention_of(linearize(source, *target("gated", "elu", attention_normalization=True)))
    mapped = [attention.feature_map(part) for part in (q / math.sqrt(HEAD), k)]
    for found, expected in zip(rule_inputs(attention, x)[:2], mapped, strict=True):
        torch.testing.assert_close(found, expected)


@of_both
def test_fewer_features_keep_the_scores_as_well_as_they_can(biases):
    """The squared distance is the sum of squares of the truncated singular values."""
    source = make_source(biases)
    prefix = "decoder.layers.1.self_attn.in_proj."
    weight = source.weights[f"{prefix}weight"].detach()
    bias = source.weights.get(f"{prefix}bias", torch.zeros(3 * DIM)).detach().double()
    q, k, _ = torch.cat([weight, bias[:, None]], 1).chunk(3)
    for size in (1, 3, HEAD):
        heads = (x.chunk(HEADS) for x in (q, k, *fewer_features(q, k, HEADS, size)))
        for of_q, of_k, new_q, new_k in zip(*heads, strict=True):
            whole = of_q.T @ of_k
            left_out = torch.linalg.svdvals(whole)[size:].square().sum()
            torch.testing.assert_close((whole - new_q.T @ new_k).square().sum(), left_out, rtol=1e-9, atol=1e-9)
            # The root of the values is on either side.
            torch.testing.assert_close(new_q.norm(), new_k.norm(), rtol=1e-9, atol=0)


@of_both
def test_one_head_has_one_state_of_the_same_size(biases):
    source = make_source(biases)
    converted = linearize(source, *target("decay", state_size=4, decoder_attention_heads=1))
    model = build(converted)
    assert model.decoder.layers[1].self_attn.num_heads == 1 and model.decoder.state_size(LENGTH) == 2 * 4 * DIM
    x = random_input()
    q, k, _ = projected(source, x)
    whole = linearize(source, *target("gated", state_size=DIM, decoder_attention_heads=1))
    new_q, new_k, *_ = rule_inputs(attention_of(whole), x)
    expected = (q @ k.transpose(-1, -2)).sum(1, keepdim=True) * SCALE
    torch.testing.assert_close(new_q @ new_k.transpose(-1, -2), expected)


@of_both
def test_decay_begins_with_uniform_gates_and_values_that_add_up_to_one(biases):
    source = make_source(biases)
    x = random_input()
    attention = attention_of(linearize(source, *target("decay", state_size=4)))
    for gate, size in (("key_decay", 4 * HEADS), ("value_decay", DIM)):
        opened = attention.gate_biases[gate].sigmoid()
        assert opened.shape == (size,) and opened.min() >= 1 / size and opened.max() <= 1 - 1 / size
        assert opened.std() > 0.15  # uniform in (0, 1): 0.29
    *_, v = projected(source, x)
    _, _, new_v, _ = rule_inputs(attention, x)
    kept = attention.gate_biases["value_decay"].sigmoid().view(HEADS, 1, HEAD)
    torch.testing.assert_close(new_v, v * (1 - kept))


@of_both
@looped("size", [4, HEAD + 1])
def test_decay_that_begins_with_spans(biases, size):
    """Scores are the nearest to softmax's, except the last feature, whose output is a mean of the values."""
    source = make_source(biases)
    longest, x = 81, random_input()
    attention = attention_of(linearize(source, *target("decay", state_size=size, decay_spans=longest)))
    q, k, v, _ = rule_inputs(attention, x)
    spans = longest ** ((torch.arange(size, dtype=torch.float64) + 0.5) / size)
    spans[-1] = 9
    biases = {name: bias.double().sigmoid() for name, bias in attention.gate_biases.items()}
    torch.testing.assert_close(biases["key_decay"], (spans / (1 + spans)).repeat(HEADS))
    torch.testing.assert_close(biases["value_decay"], torch.full((DIM,), longest / (1 + longest), dtype=torch.float64))
    old_q, old_k, old_v = projected(source, x)
    torch.testing.assert_close(v, old_v)
    weights = q * k * (1 + spans).sqrt()  # of a token with itself, by feature
    if size > HEAD:
        torch.testing.assert_close(weights[..., :-1].sum(-1), (old_q * old_k).sum(-1) * SCALE)
    rows = HEADS * size
    queries = torch.cat([attention.in_proj.weight[:rows], attention.bias[:rows, None]], dim=1)
    singular = queries.unflatten(0, (HEADS, size)).norm(dim=-1)[:, :-1]
    assert (singular.diff() <= 0).all() and (singular[:, 0] > singular[:, 2]).all()
    # Weights of the last feature sum to one: 1 / 10 of each value, times 0.9 for every later token.
    torch.testing.assert_close(q[..., -1] * k[..., -1], torch.full(q.shape[:-1], 0.1, dtype=torch.float64))


@looped(("normalized", "scale"), [(False, 1 / 512), (True, 1.0)])
def test_additive_values_without_normalisation_are_a_512th(source, normalized, scale):
    x = random_input()
    attention = attention_of(linearize(source, *target("sum", "relu", 4, attention_normalization=normalized)))
    torch.testing.assert_close(rule_inputs(attention, x)[2], projected(source, x)[2] * scale)


@looped("rule", ["delta", "fwm"])
def test_delta_begins_with_small_writes(source, rule):
    attention = attention_of(linearize(source, *target(rule, "relu", 4, sum_normalization=True)))
    k, v = rule_inputs(attention, random_input())[1:3]
    (beta,) = rule_inputs(attention, random_input())[3]
    assert beta.min() > 0.004 and beta.max() < 0.012 and beta.mean().item() == pytest.approx(0.007, abs=0.001)
    assert k.sum(-1).le(1 + 1e-6).all() and v.std() > 0.5
    gated = attention_of(linearize(source, *target("gated", state_size=4)))
    assert rule_inputs(gated, random_input())[3][0].mean().item() == pytest.approx(0.5, abs=0.05)


@looped("rule", ["gated_delta", "kda"])
def test_gated_delta_begins_with_memories_of_many_tokens(source, rule):
    """A head remembers s tokens if its decay is s / (1 + s) without an input."""
    attention = attention_of(linearize(source, *target(rule, state_size=4)))
    decay = attention.gate_activations["decay"](torch.zeros(1, 1, HEADS, 1 if rule == "gated_delta" else 4))
    spans = torch.tensor([16 * 32**0.25, 16 * 32**0.75])
    torch.testing.assert_close(decay[0, 0].float(), (spans / (1 + spans)).unsqueeze(1).expand_as(decay[0, 0]))
    beta = rule_inputs(attention, random_input())[3][1]
    assert beta.mean().item() == pytest.approx(0.007, abs=0.001)


@of_both
def test_a_rule_of_several_steps_begins_as_delta(biases):
    """The last step has the pretrained key; the step before writes very little."""
    source = make_source(biases)
    several, one = (
        attention_of(linearize(source, *target(rule, "elu", sum_normalization=True)))
        for rule in ("delta_product", "delta")
    )
    x = random_input()
    q, k, v, (beta,) = rule_inputs(several, x)
    *of_delta, _ = rule_inputs(one, x)
    torch.testing.assert_close([q, k[..., 1, :], v[..., 1, :], v[..., 0, :]], [*of_delta, of_delta[2]])
    assert beta.shape[-1] == 2 and beta[..., 0].max() < 0.012
    assert not torch.allclose(k[..., 0, :], k[..., 1, :])


ROTARY = {"attention_kv_heads": 1, "attention_qkv_bias": True, "attention_rope_theta": 9.0, "attention_window": 4}
WIDE = {**ROTARY, "attention_head_dim": 6, "attention_rope_scaling": "4,1,4,8"}
NORMALISED = {**WIDE, "attention_qk_norm": True, "rms_norm": True}


def separated(source, x, size):
    """Return q, k and v (B, H, L, d) of the source's second layer, whose heads share keys and values."""
    prefix = "decoder.layers.1.self_attn.in_proj."
    y = F.linear(x, source.weights[f"{prefix}weight"], source.weights[f"{prefix}bias"]).unflatten(-1, (-1, size))
    q, k, v = y.transpose(1, 2).split([HEADS, 1, 1], 1)
    return q, k.expand_as(q), v.expand_as(q)


@looped("options, size", [(ROTARY, HEAD), (WIDE, 6)])
@looped("rule, features", [("gated", None), ("gated", 11), ("gated_delta", None)])
def test_heads_that_share_keys_and_values_get_their_own(options, size, rule, features):
    """Scores are those of softmax without rotation; biases of q, k and v stay, also without the rule's."""
    source, x = make_source(False, **options), random_input()
    converted = linearize(source, *target(rule, state_size=features))
    assert not converted.flags.keys() & options.keys() and converted.flags["attention_bias"]
    q, k, v = separated(source, x, size)
    new_q, new_k, new_v, _ = rule_inputs(attention_of(converted), x)
    torch.testing.assert_close(new_q @ new_k.mT, q @ k.mT * SCORE_SCALE / math.sqrt(size))
    torch.testing.assert_close(new_v, v)
    assert new_q.shape[-1] == (features or size)
    one = attention_of(linearize(source, *target("gated", state_size=2 * size, decoder_attention_heads=1)))
    new_q, new_k, new_v, _ = rule_inputs(one, x)
    together = (q @ k.mT).sum(1, keepdim=True) * SCORE_SCALE / math.sqrt(size)
    torch.testing.assert_close(new_q @ new_k.mT, together)
    torch.testing.assert_close(new_v[:, 0], v.transpose(1, 2).flatten(2))


def test_as_many_heads_as_the_softmax_attention_has():
    """The source's other layers would have had another number."""
    source = make_source(decoder_attention_heads=8, attention_softmax_heads=HEADS)
    for method in ({}, {"keep_softmax_layers": "0"}):
        converted = linearize(source, *target("gated", **method))
        assert attention_of(converted).num_heads == HEADS
        new_q, new_k, *_ = rule_inputs(attention_of(converted), x := random_input())
        q, k, _ = projected(source, x)
        torch.testing.assert_close(new_q @ new_k.mT, q @ k.mT * SCALE)


@looped("pre_norm", [True, False])
def test_queries_and_keys_that_were_normalised_keep_their_sizes(pre_norm):
    """For independent inputs, with the gains of a normalisation before it, each head has a mean square of 1."""
    source = make_source(**NORMALISED, decoder_normalize_before=pre_norm)
    gains = source.weights["decoder.layers.1.self_attn_layer_norm.weight"].detach()
    x = torch.randn(1, 20000, DIM, dtype=torch.float64) * (gains if pre_norm else 1)
    attention = attention_of(linearize(source, *target("gated")))
    for found, before, name in zip(rule_inputs(attention, x), separated(source, x, 6), ("query", "key"), strict=False):
        gain = source.weights[f"decoder.layers.1.self_attn.{name}_norm.weight"]
        normal = found / gain * (math.sqrt(6) / SCORE_SCALE if name == "query" else 1)
        torch.testing.assert_close(normal.square().mean((0, 2, 3)), torch.ones(HEADS).double(), rtol=0.05, atol=0)
        factors = normal / before
        torch.testing.assert_close(factors, factors[:, :, :1, :1].expand_as(factors))  # one of each head


@looped("biases, options", [(True, {}), (False, {}), (True, ROTARY), (True, WIDE), (True, NORMALISED)])
def test_layers_that_stay_softmax(biases, options):
    """They are unchanged, with biases of zero if the others need biases; the others are converted as without them."""
    source, x = make_source(biases, **options), random_input()
    hybrid, all_new = (
        linearize(source, *target("delta", "elu", sum_normalization=True, **kept))
        for kept in ({"keep_softmax_layers": "1"}, {})
    )
    assert options.items() <= hybrid.flags.items()
    (new, kept), (_, before) = ([x.self_attn for x in build(of).double().decoder.layers] for of in (hybrid, source))
    assert (type(new), type(kept), type(before)) == (FastWeightAttention, SoftmaxAttention, SoftmaxAttention)
    assert kept.memory.window == options.get("attention_window") and kept.dropout == 0.1
    torch.testing.assert_close(kept(x)[0], before(x)[0])
    first = [name for name in hybrid.weights if "layers.0.self_attn" in name]
    assert first and all(torch.equal(hybrid.weights[name], all_new.weights[name]) for name in first)


def test_local_attention_has_the_same_weights(source):
    converted = linearize(source, *target("softmax", attention_window=5))
    whole, local = build(source), build(converted)
    tokens = torch.randint(4, 50, (2, LENGTH))
    scores, expected = (model(tokens)[0] for model in (local, whole))
    torch.testing.assert_close(scores[:, :5], expected[:, :5])
    assert (scores - expected)[:, 5:].abs().amin(-1).amax() > 1e-3
    assert local.decoder.layers[0].self_attn.dropout == 0.1


def test_one_conversion_is_like_the_other(source):
    first, second = (linearize(source, *target("decay", "relu", 4)).weights for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    first, second = (first[f"decoder.layers.{layer}.self_attn.gate_biases.key_decay"] for layer in (0, 1))
    assert not torch.equal(first, second)


ONLY_DECAY = "--decay-spans must be left out unless --decoder-update-rule is decay and --decoder-feature-map is"
HEADS_LEFT_OUT = "--decoder-attention-heads must be left out with --keep-softmax-layers"
# fmt: off
REFUSALS = [
    (target("sum", "favor", 5, attention_normalization=True), "--state-size must be 4 for the map favor, got 5"),
    (target("sum", "dpfp", 7), "--state-size must be 6 for the map dpfp, got 7"),
    (target("decay", state_size=0), "must be at least 1, got 0"),
    (target("decay", attention_window=4), "fast weights have no window"),
    (target("decay", "identity", 4, attention_normalization=True), "features must not be negative"),
    (target("decay", state_size=4, decoder_attention_heads=3), "must be divisible by --decoder-attention-heads, got"),
    (target("gated", decay_spans=8), ONLY_DECAY),
    (target("decay", "relu", decay_spans=8), ONLY_DECAY),
    (target("decay", decay_spans=0), "--decay-spans must be at least 1 token, got 0"),
    (target("leaky"), "the update rule must be softmax or one of sum, .*, got 'leaky'"),
    (target("sum", "cosine"), "the feature map must be one of elu, .*, got 'cosine'"),
    (keeping("2"), "--keep-softmax-layers must be ascending numbers from 0 to 1"),
    (keeping("0,1"), "--keep-softmax-layers must leave at least one layer to convert, got all layers"),
    (keeping("kl:2", "none"), "--keep-softmax-layers must be kl:1 to kl:1, or numbers of layers, got 'kl:2'"),
    (keeping("kl:1"), "--kl-text FILE must be given with --keep-softmax-layers kl:1"),
    (keeping("kl:1", "none"), "--kl-text must be a text, got none"),
    (keeping(""), "--keep-softmax-layers must be layers such as 0,3, or kl:N, got nothing"),
    (keeping("kl:1", __file__), "--kl-text must hold words of the dictionary, got"),
    (keeping("0", "none"), "--kl-text must be left out without --keep-softmax-layers kl:N"),
    (keeping("0", decoder_attention_heads=1), HEADS_LEFT_OUT),
    *((target("gated_delta", **{name: 2}), f"{flag(name)} must be left out: the pretrained weights are for attention")
      for name in WITHOUT_WEIGHTS),
]
# fmt: on


@looped("target, says", REFUSALS)
def test_targets_that_cannot_be(source, target, says):
    with pytest.raises(ValueError, match=says) as refusal:
        linearize(source, *target)
    assert "\n" not in str(refusal.value)


@looped("heads", [5, 0])
def test_heads_must_divide_the_size_of_all_heads(heads):
    with pytest.raises(ValueError, match=f"--decoder-attention-heads must divide 12, the size .*, got {heads}"):
        linearize(make_source(**WIDE), *target("gated", decoder_attention_heads=heads))


@looped("other", [target("decay", state_size=4), target("decay", state_size=4, keep_softmax_layers="0")])
def test_sources_without_softmax(source, other):
    with pytest.raises(ValueError, match="must have softmax attention in all layers, got a model without it"):
        linearize(linearize(source, *other), *target("decay"))


def test_as_many_heads_as_a_model_has_by_default():
    """Flags of a checkpoint do not have them."""
    flags = {name: value for name, value in FLAGS.items() if name != "decoder_attention_heads"}
    weights = {f"decoder.layers.{layer}.self_attn.{name}": torch.randn(shape) for layer in (0, 1) for name, shape in (
        ("in_proj.weight", (3 * DIM, DIM)), ("out_proj.weight", (DIM, DIM)))}  # fmt: skip
    converted = linearize(Conversion("fwp_lm", flags, weights, WORDS, []), *target("gated", state_size=2))
    name = "decoder.layers.1.self_attn.in_proj.weight"
    found, before = converted.weights[name], weights[name]
    torch.testing.assert_close(found[:16] * 2**0.5 / SCORE_SCALE, before[:16])  # as many queries as before: d = m = 2
    assert found.shape == (3 * DIM + 8, DIM)


def save(source, folder):
    """Write a softmax model as the command does, and return the command for it."""
    checkpoint.write(source, folder / "softmax")
    return Command("fwp-lm", folder / "softmax" / "checkpoint.pt", folder / "out")


DECAY = ["--decoder-update-rule", "decay", "--state-size", 4]


@of_both
def test_the_command_writes_the_converted_model(biases, tmp_path_factory):
    source = make_source(biases)
    command, tokens = save(source, tmp_path_factory.mktemp("saved")), torch.randint(4, 50, (2, LENGTH))
    same, _ = command.convert()
    torch.testing.assert_close(same(tokens)[0], build(source).double()(tokens)[0], rtol=0, atol=1e-5)
    recurrent, _ = command.convert(*DECAY)
    expected = build(linearize(source, *target("decay", state_size=4))).double()
    torch.testing.assert_close(recurrent(tokens)[0], expected(tokens)[0], rtol=0, atol=1e-5)
    assert [layer.weights.shape for layer in recurrent(tokens)[1]["state"].layers] == 2 * [(2, HEADS, 4, HEAD)]
    command.path = command.out.rename(command.out.with_name("decay")) / "checkpoint.pt"
    command.refuses("must have softmax attention in all layers, got a model without it", *DECAY)


def test_fwp_linearize_does_the_same_with_a_trained_model(source, tmp_path, capsys):
    command = save(source, tmp_path)
    expected, _ = command.convert(*DECAY)
    out, tokens = tmp_path / "linear", torch.randint(4, 50, (2, LENGTH))
    capsys.readouterr()
    fwp_linearize([*map(str, [command.path, "--out", out, *DECAY])])
    assert capsys.readouterr().out.startswith(f"wrote {out}/checkpoint.pt, dict.txt and flags.txt: --task language_mo")
    assert (out / "flags.txt").read_text() == (command.out / "flags.txt").read_text()
    assert torch.equal(load(out)[0](tokens)[0], expected(tokens)[0])
    for says, path, *flags in (
        ("flags of the new attention must be given, .*, got none", command.path),
        ("checkpoint .*none.pt cannot be read", tmp_path / "none.pt", *DECAY),
        ("--encoder-feature-map must be left out: only options", command.path, "--encoder-feature-map", "elu"),
    ):
        refused(fwp_linearize, path, "--out", tmp_path / "new", *flags, says=says, out=tmp_path / "new")


# flags, the number of features, one that the converted model has
# fmt: off
OPTIONS = [
    ("--decoder-feature-map dpfp --dpfp-nu 2", 32, "--dpfp-nu 2"),
    ("--decoder-feature-map favor --favor-features 5 --favor-draw gaussian", 10, "--favor-draw gaussian"),
    ("--decoder-key-dim 3 --l2-normalization --negative-eigenvalues", 3, "--negative-eigenvalues"),
]
ARGUMENTS = [
    ("--user-dir none", "--user-dir must be the folder of a plug-in, got .*none"),
    ("--state-size 4", "--decoder-update-rule must be given with options of a new attention"),
    ("--decoder-update-rule softmax", "softmax must be given with --attention-window and no other"),
    ("--decoder-update-rule softmax --attention-window 4 --state-size 4", "and no other option"),
]
# fmt: on


def test_options_of_the_command(source, tmp_path):
    command = save(source, tmp_path)
    for arguments, says in ARGUMENTS:
        command.refuses(says, *arguments.split())
    for flags, features, named in OPTIONS:
        model, _ = command.convert("--decoder-update-rule", "delta", *flags.split())
        assert model.decoder.layers[1].self_attn.feature_map.feature_dim == features
        assert model(torch.randint(4, 50, (2, LENGTH)))[0].isfinite().all()
        assert f"{named} " in (command.out / "flags.txt").read_text()


def test_a_text_has_the_lines_of_a_file(tmp_path):
    (tmp_path / "text").write_text("w1\u2028w2\x85w3\n\nw4", encoding="utf-8")
    dictionary = make_dictionary(20)
    found = read_text(tmp_path / "text", dictionary)
    assert [dictionary[token] for token in found] == ["w1", "w2", "w3", "</s>", "w4", "</s>"]


@torch.no_grad()
def test_layers_by_divergence(source, tmp_path):
    """The kept layer is the one whose conversion changes the distribution most, by plain sums."""
    numbers, text = torch.randint(4, 50, (3 * LENGTH,)), tmp_path / "text.txt"
    words = [WORDS[number - 4] for number in numbers]
    text.write_text(" ".join(words[:20]) + "\n\n" + " ".join(words[20:]) + "\n")
    numbers = torch.cat([numbers[:20], torch.tensor([2]), numbers[20:], torch.tensor([2])])
    converted = linearize(source, *target("decay", state_size=4, keep_softmax_layers="kl:1", kl_text=text))
    costs = []
    for layer in (0, 1):
        hybrid = build(linearize(source, *target("decay", state_size=4, keep_softmax_layers=str(1 - layer)))).double()
        total = 0.0
        for block in numbers.split(LENGTH):
            p, q = (of.get_normalized_probs(of(block[None]), True).double() for of in (build(source).double(), hybrid))
            total += F.kl_div(q, p, log_target=True, reduction="sum").item()
        costs.append(total / len(numbers))
    assert converted.flags["softmax_layers"] == str(costs.index(max(costs)))
    (note,) = converted.notes
    assert note.startswith("divergence when only this layer is converted, in nats per token: 0: ")
    assert [float(number) for number in re.findall(r"\d: ([\d.]+)", note)] == pytest.approx(costs, abs=1e-4)
