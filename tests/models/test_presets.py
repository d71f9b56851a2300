"""Every architecture builds, has the published number of parameters, and can be overridden by flags."""

import re
from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from pairwise import looped
from small_models import configure, make_dictionary

from fairseq_fwp.models.fwp_lm import FwpLanguageModel
from fairseq_fwp.models.fwp_xl_lm import FwpXlLanguageModel
from fairseq_fwp.models.presets import FWL_PRESETS, MODERN_PRESETS, PRESETS, XL_PRESETS
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

WORDS, CHARACTERS = 267_735, 204  # of WikiText-103 and of enwik8; fairseq's dictionary has a few more symbols


@pytest.fixture(scope="module")
def count():
    """A function count(arch, **flags) -> the number of parameters with the corpus's dictionary."""
    tasks = {size: Namespace(target_dictionary=make_dictionary(size)) for size in (WORDS, CHARACTERS)}

    def count(arch, **flags):
        with torch.device("meta"):
            task = tasks[CHARACTERS if "enwik8" in arch else WORDS]
            model = ARCH_MODEL_REGISTRY[arch].build_model(configure(arch, **flags), task)
        return sum(parameter.numel() for parameter in model.parameters())

    return count


@looped("arch", [arch for arch in PRESETS if "_lm_wt103" in arch])
def test_published_number_of_parameters(arch, count):
    """Schlag et al. 2021, Table 2: 40 M and 90 M; Table 4: 89.8 M with the sum rule, 89.9 M with the delta rule.

    Gates are extra: one a head (delta, gated), or one with a bias for every key and value dimension (decay).
    """
    medium = arch.endswith("_medium")
    dim, ffn = (256 if medium else 128), 2048
    layer = 4 * dim * dim + 2 * dim * ffn + ffn + dim + 2 * 2 * dim
    output = WORDS * (dim + 1) + 3 * (dim + 1)
    size = dim // 8  # of a head, and of its keys
    gates = {
        "delta": 8 * dim,
        "gated": 8 * dim,
        "delta_rnn": 8 * dim + 2 * dim * dim + 8 * dim,  # beta, and keys, values and beta of the second memory
        "decay": 2 * (dim + 1) * dim,
        "gla": 16 * (dim + dim) + dim,  # of rank 16
        "gated_delta": 8 * (dim + 2) + 8 * dim,  # decays with A and b, and beta
        "kda": size * (dim + dim) + 8 + dim + 8 * dim,  # decays of a head's rank with A and b, and beta
    }.get(arch.split("_lm_")[0].replace("_dpfp", "").replace("_favor", ""), 0)
    found = count(arch)
    assert found == output + 16 * (layer + gates)
    if gates > 8 * dim:
        return  # none of the paper's
    if medium:
        assert round(found / 1e6, 1) == (89.9 if "delta" in arch else 89.8)
    else:
        assert round(found / 1e7) == 4


def test_delta_has_exactly_the_published_gates_more_than_sum(count):
    for size, extra in (("", 16_384), ("_medium", 32_768)):
        assert count(f"delta_lm_wt103{size}") - count(f"sum_lm_wt103{size}") == extra


def adaptive(dim):
    """Embeddings shared with the softmax, its biases, and clusters of the head."""
    return WORDS * (dim + 1) + 3 * (dim + 1)


# Of Transformer-XL large: words of a cluster and their size, projections, biases and clusters.
LARGE = sum(words * dim for words, dim in ((20_000, 1024), (20_000, 256), (160_000, 64), (67_735, 16)))
LARGE += 1024 * (2 * 1024 + 256 + 64 + 16) + WORDS + 3 * (1024 + 1)
ABLATION = -16 * 352 * 352 - 2 * 352  # without W_kR, u and v
SHAW, POSITIONS = {"decoder_positions": "shaw", "clamp_len": 255}, {"mem_len": 0, "decoder_positions": "absolute"}
LAYERWISE = {"mem_len": 0, "decoder_positions": "layerwise", "tokens_per_sample": 128}
# Flags, layers, size, feed-forward size, embeddings, pairs of u and v, others; and the published number.
XL_SIZES = [
    ("xl_lm_wt103", {}, 16, 128, 2048, adaptive(128), 1, 0, "44.3"),
    ("xl_lm_wt103_medium", {}, 16, 256, 2048, adaptive(256), 1, 0, "90.9"),  # Schlag et al. 2021, Table 4
    ("xl_lm_wt103_base", {}, 16, 410, 2100, adaptive(410), 1, 0, "151"),  # Dai et al. 2019, Table 1
    ("xl_lm_wt103_ablation", {}, 16, 352, 2100, adaptive(352), 1, 0, "128"),  # Table 6, also below
    ("xl_lm_wt103_ablation", SHAW, 16, 352, 2100, adaptive(352), 1, ABLATION + 16 * 256 * 352, "128"),
    ("xl_lm_wt103_ablation", POSITIONS, 16, 352, 2100, adaptive(352), 1, ABLATION, "126"),
    ("xl_lm_wt103_ablation", LAYERWISE, 16, 352, 2100, adaptive(352), 1, ABLATION + 16 * 128 * 352, "127"),
    # Table 1 says 257 M. The script and the published weights have 18 layers, which are more.
    ("xl_lm_wt103_large", {}, 18, 1024, 4096, LARGE, 18, 0, "285"),
    ("xl_lm_wt103_large", {"decoder_layers": 16}, 16, 1024, 4096, LARGE, 16, 0, "257.9"),
    ("xl_lm_enwik8_base", {}, 12, 512, 2048, CHARACTERS * (512 + 1), 1, 0, "41"),  # Table 2, also below
    ("xl_lm_enwik8_medium", {}, 18, 640, 2200, CHARACTERS * (640 + 1), 18, 0, "88"),
    ("xl_lm_enwik8_large", {}, 24, 1024, 3072, CHARACTERS * (1024 + 1), 24, 0, "277"),
]


@looped(("arch", "flags", "layers", "dim", "ffn", "embeddings", "pairs", "more", "millions"), XL_SIZES)
def test_transformer_xl_has_the_published_size(count, arch, flags, layers, dim, ffn, embeddings, pairs, more, millions):
    """A layer has five projections (q, k, v, W_kR, output), feed-forward, and two layer norms."""
    found = count(arch, **flags)
    layer = 5 * dim * dim + 2 * dim * ffn + ffn + dim + 4 * dim
    assert found == layers * layer + 2 * dim * pairs + embeddings + more
    assert str(round(found / 1e6, len(millions.partition(".")[2]) or None)) == millions


def test_untied_biases_are_those_of_fairseqs_example(count):
    """With 9 more words it counts 151,123,537."""
    assert count("xl_lm_wt103_base", untie_biases=True) + 9 * (410 + 1) == 151_123_537


# Heads, dropout of blocks, activations and attention weights, and memory in the scripts, which have no clamping.
PUBLISHED_XL = {
    "xl_lm_wt103_medium": (8, (0.1, 0.1, 0.0), 384),
    "xl_lm_wt103_base": (10, (0.1, 0.1, 0.0), 150),
    "xl_lm_wt103_large": (16, (0.2, 0.2, 0.2), 384),
    "xl_lm_enwik8_base": (8, (0.1, 0.1, 0.0), 512),
    "xl_lm_enwik8_large": (8, (0.15, 0.15, 0.15), 768),
}


@looped("arch", PUBLISHED_XL)
def test_transformer_xl_has_the_published_settings(arch):
    config = configure(arch)
    assert ARCH_MODEL_REGISTRY[arch] is FwpXlLanguageModel
    dropouts = (config.dropout, config.activation_dropout, config.attention_dropout)
    assert (config.decoder_attention_heads, dropouts, config.mem_len) == PUBLISHED_XL[arch]
    assert (config.clamp_len, config.same_length, config.decoder_normalize_before) == (-1, False, False)


@looped("arch", FWL_PRESETS)
def test_fast_weight_layers_have_the_papers_sizes(arch, count):
    """Clark et al. 2022, Sec. 3: 121 M parameters (119 M with the layer), and Transformer-XL large."""
    with torch.device("meta"):
        task = Namespace(target_dictionary=make_dictionary(100))
        model = ARCH_MODEL_REGISTRY[arch].build_model(configure(arch), task)
    layer = sum(parameter.numel() for parameter in model.decoder.fast_weight_layer.parameters())
    dim = 1024 if "xl" in arch else 768
    assert layer == 8 * dim * dim + 7 * dim + 12
    assert round((count(arch) - layer) / 1e6) == (285 if "xl" in arch else 114)


# Layers, size, feed-forward size, heads, and sizes of a key and of a value; all with 32,000 words twice.
MODERN_SIZES = {
    "delta_net_lm_340m": (24, 1024, 2816, 8, 128, 128),
    "delta_net_lm_1.3b": (24, 2048, 5632, 16, 128, 128),
    "gated_deltanet_lm_340m": (21, 1024, 2816, 3, 256, 512),
    "gated_deltanet_lm_1.3b": (21, 2048, 5632, 6, 256, 512),
    "kda_lm_340m": (24, 1024, 2816, 8, 128, 128),
    "kda_lm_1.3b": (24, 2048, 5632, 16, 128, 128),
}


@looped("arch", MODERN_SIZES)
def test_modern_models_have_their_published_parts_and_no_other(arch):
    """Yang et al. 2024, 2025 and Kimi Team 2025, as in the configurations of flash-linear-attention."""
    with torch.device("meta"):
        task = Namespace(target_dictionary=make_dictionary(32_000))
        model = ARCH_MODEL_REGISTRY[arch].build_model(configure(arch), task)
    layers, dim, ffn, heads, key, value = MODERN_SIZES[arch]
    inner = heads * (2 * key + value)
    attention = dim * (inner + heads) + 4 * inner + value + heads * value * dim  # with beta, convolution, norm, output
    if "gated" in arch:
        attention += dim * heads + 2 * heads + dim * heads * value
    if "kda" in arch:
        low = value * (dim + heads * key) + heads + heads * key  # the decay, A and b
        attention += low + value * (dim + heads * value) + heads * value
    layer = attention + 3 * dim * ffn + 2 * dim
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == layers * layer + dim + 2 * 32_000 * dim
    assert found == pytest.approx(1.4e9 if "1.3b" in arch else 3.8e8, rel=0.05)  # with both tables of words


# Layers, size, ranks of decays, rates, values and gates, and the paper's number of parameters (Table 2), 65,536 words.
RWKV7_SIZES = {
    "rwkv7_lm_0.1b": (12, 768, (64, 64, 32, 128), 191_034_624),
    "rwkv7_lm_0.4b": (24, 1024, (64, 64, 32, 128), 450_767_872),
    "rwkv7_lm_1.5b": (24, 2048, (96, 96, 64, 256), 1_527_404_544),
    "rwkv7_lm_2.9b": (32, 2560, (96, 96, 64, 320), 2_947_735_040),
}


@looped("arch", RWKV7_SIZES)
def test_rwkv7_has_the_published_number_of_parameters(arch):
    """Peng et al. 2025; a layer also has vectors: the first mixes no values, but normalises the embeddings."""
    layers, dim, ranks, published = RWKV7_SIZES[arch]
    with torch.device("meta"):
        task = Namespace(target_dictionary=make_dictionary(65_536))
        model = ARCH_MODEL_REGISTRY[arch].build_model(configure(arch), task)
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == published
    layer = dim * (12 * dim + 2 * sum(ranks) + 19)
    assert found == 2 * 65_536 * dim + 4 * dim + layers * layer - (2 * dim * ranks[2] + dim)
    assert model.decoder.layers[0].self_attn.num_heads * 64 == dim


def test_names_follow_the_grammar_and_belong_to_the_model():
    rules, maps = "|".join(UPDATE_RULES), "|".join(FEATURE_MAPS)
    for arch in PRESETS:
        assert re.fullmatch(rf"(softmax|delta_rnn|({rules})(_({maps}))?)_lm_[a-z0-9]+(_[a-z]+)?", arch)
        assert ARCH_MODEL_REGISTRY[arch] is FwpLanguageModel
    tiny = {f"{name}_lm_tiny" for name in ("delta_net", "gated_deltanet", "kda", "rwkv7")}
    assert tiny | MODERN_SIZES.keys() | RWKV7_SIZES.keys() == MODERN_PRESETS.keys()
    assert set(XL_PRESETS) == {*PUBLISHED_XL, "xl_lm_wt103", "xl_lm_wt103_ablation", "xl_lm_enwik8_medium"}


def test_flags_win_over_presets():
    config = configure("delta_lm_wt103", decoder_embed_dim=64, decoder_layers=3)
    assert (config.decoder_embed_dim, config.decoder_layers, config.sum_normalization) == (64, 3, True)
    assert configure("fwp_lm").sum_normalization is False
    hybrid = configure("gated_deltanet_lm_tiny", decoder_layers=2, softmax_layers="1", attention_softmax_heads=2)
    model = FwpLanguageModel.build_model(hybrid, Namespace(target_dictionary=make_dictionary(50)))
    assert [layer.self_attn.num_heads for layer in model.decoder.layers] == [3, 2]  # of a width of 128


@looped(
    "arch, features",
    [
        ("sum_favor_lm_wt103", 16),  # Tables 2 and 5: m = 8 and 16, and DPFP with nu = 1
        ("delta_favor_lm_wt103_medium", 32),
        ("sum_dpfp_lm_wt103", 32),
        ("delta_dpfp_lm_wt103", 32),
        ("delta_lm_wt103", 16),
    ],
)
def test_published_number_of_features(arch, features):
    model = FwpLanguageModel.build_model(configure(arch), Namespace(target_dictionary=make_dictionary(50)))
    assert model.decoder.layers[0].self_attn.feature_map.feature_dim == features
