"""Every architecture builds, has the published number of parameters, and can be overridden by flags."""

import re
from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from pairwise import looped

from fairseq_fwp.models.fwp_lm import FwpLanguageModel
from fairseq_fwp.models.fwp_xl_lm import FwpXlLanguageModel
from fairseq_fwp.models.presets import PRESETS, XL_PRESETS
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

from .conftest import configure, make_dictionary

WIKITEXT103_WORDS = 267_735
ENWIK8_CHARACTERS = 204


@pytest.fixture(scope="module")
def wikitext103():
    """Build with the papers' vocabulary; fairseq's dictionary has a few more symbols, and so more rows and biases."""
    return Namespace(target_dictionary=make_dictionary(WIKITEXT103_WORDS))


@pytest.fixture(scope="module")
def enwik8():
    return Namespace(target_dictionary=make_dictionary(ENWIK8_CHARACTERS))


def count_parameters(arch, task, **flags):
    with torch.device("meta"):
        model = ARCH_MODEL_REGISTRY[arch].build_model(configure(arch, **flags), task)
    return sum(parameter.numel() for parameter in model.parameters())


@looped("arch", [arch for arch in PRESETS if "_lm_wt103" in arch])
def test_published_number_of_parameters(arch, wikitext103):
    """Schlag et al. 2021, Table 2: 40 M and 90 M; Table 4: 89.8 M with the sum rule, 89.9 M with the delta rule.

    Gates are extra: one a head (delta, gated), or one with a bias for every key and value dimension (decay).
    """
    medium = arch.endswith("_medium")
    dim, ffn = (256 if medium else 128), 2048
    layer = 4 * dim * dim + 2 * dim * ffn + ffn + dim + 2 * 2 * dim
    output = WIKITEXT103_WORDS * (dim + 1) + 3 * (dim + 1)
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
    count = count_parameters(arch, wikitext103)
    assert count == output + 16 * (layer + gates)
    if gates > 8 * dim:
        return  # none of the paper's
    if medium:
        assert round(count / 1e6, 1) == (89.9 if "delta" in arch else 89.8)
    else:
        assert round(count / 1e7) == 4


def test_delta_has_exactly_the_published_gates_more_than_sum(wikitext103):
    for size, extra in (("", 16_384), ("_medium", 32_768)):
        delta, plain = (count_parameters(f"{rule}_lm_wt103{size}", wikitext103) for rule in ("delta", "sum"))
        assert delta - plain == extra


def count_xl(layers, dim, ffn, embeddings, pairs=1):
    """Count five projections a layer (q, k, v, W_kR, output), feed-forward, two layer norms; pairs of u and v."""
    return layers * (5 * dim * dim + 2 * dim * ffn + ffn + dim + 4 * dim) + 2 * dim * pairs + embeddings


def count_adaptive(dim, clusters=3):
    """Count embeddings shared with the softmax, its biases, and clusters of the head."""
    return WIKITEXT103_WORDS * (dim + 1) + clusters * (dim + 1)


def test_transformer_xl_medium_has_the_published_size(wikitext103):
    """Schlag et al. 2021, Table 4: 90.9 M."""
    count = count_parameters("xl_lm_wt103_medium", wikitext103)
    assert count == count_xl(16, 256, 2048, count_adaptive(256)) and round(count / 1e6, 1) == 90.9


def test_transformer_xl_without_a_size_is_as_large_as_the_small_models(wikitext103):
    count = count_parameters("xl_lm_wt103", wikitext103)
    assert count == count_xl(16, 128, 2048, count_adaptive(128)) and round(count / 1e6, 1) == 44.3


def test_transformer_xl_base_has_the_published_size(wikitext103):
    """Dai et al. 2019, Table 1: 151 M; with 9 more words and untied biases fairseq's example counts 151,123,537."""
    count = count_parameters("xl_lm_wt103_base", wikitext103)
    assert count == count_xl(16, 410, 2100, count_adaptive(410)) and round(count / 1e6) == 151
    untied = count_parameters("xl_lm_wt103_base", wikitext103, untie_biases=True)
    assert untied + 9 * (410 + 1) == 151_123_537


@looped(
    ("flags", "millions"),
    [
        ({}, 128),
        ({"decoder_positions": "shaw", "clamp_len": 255}, 128),
        # Without W_kR; and as many learned numbers for 128 positions as for 128 distances.
        ({"decoder_positions": "absolute", "mem_len": 0}, 126),
        ({"decoder_positions": "layerwise", "mem_len": 0, "tokens_per_sample": 128}, 127),
    ],
)
def test_transformer_xl_of_the_ablation_has_the_published_size(wikitext103, flags, millions):
    """Dai et al. 2019, Table 6: 128 M."""
    count = count_parameters("xl_lm_wt103_ablation", wikitext103, **flags)
    positions = {"shaw": 256, "layerwise": 128}.get(flags.get("decoder_positions"), 0) * 352
    projections = 352 * (2 + 16 * 352) if not flags else 0  # u, v and W_kR
    layers = count_xl(16, 352, 2100, count_adaptive(352), pairs=0) - 16 * 352 * 352
    assert count == layers + projections + 16 * positions and round(count / 1e6) == millions


def test_transformer_xl_large_has_the_size_of_its_script(wikitext103):
    """Dai et al. 2019, Table 1, says 257 M. Its script and its published weights have 18 layers, which are more."""
    tables = sum(words * dim for words, dim in ((20_000, 1024), (20_000, 256), (160_000, 64), (67_735, 16)))
    projections = 1024 * (2 * 1024 + 256 + 64 + 16)
    embeddings = tables + projections + WIKITEXT103_WORDS + 3 * (1024 + 1)
    count = count_parameters("xl_lm_wt103_large", wikitext103)
    assert count == count_xl(18, 1024, 4096, embeddings, pairs=18) and round(count / 1e6) == 285
    sixteen = count_parameters("xl_lm_wt103_large", wikitext103, decoder_layers=16)
    assert round(sixteen / 1e6, 1) == 257.9


def test_transformer_xl_on_characters_has_the_published_sizes(enwik8):
    """Dai et al. 2019, Table 2: 41 M, 88 M and 277 M."""
    base, medium, large = (count_parameters(f"xl_lm_enwik8_{size}", enwik8) for size in ("base", "medium", "large"))
    assert base == count_xl(12, 512, 2048, ENWIK8_CHARACTERS * (512 + 1)) and round(base / 1e6) == 41
    assert medium == count_xl(18, 640, 2200, ENWIK8_CHARACTERS * (640 + 1), pairs=18) and round(medium / 1e6) == 88
    assert large == count_xl(24, 1024, 3072, ENWIK8_CHARACTERS * (1024 + 1), pairs=24) and round(large / 1e6) == 277


PUBLISHED_XL = {
    "xl_lm_wt103_medium": {"heads": 8, "dropouts": (0.1, 0.1, 0.0), "mem_len": 384},
    "xl_lm_wt103_base": {"heads": 10, "dropouts": (0.1, 0.1, 0.0), "mem_len": 150},
    "xl_lm_wt103_large": {"heads": 16, "dropouts": (0.2, 0.2, 0.2), "mem_len": 384},
    "xl_lm_enwik8_base": {"heads": 8, "dropouts": (0.1, 0.1, 0.0), "mem_len": 512},
    "xl_lm_enwik8_large": {"heads": 8, "dropouts": (0.15, 0.15, 0.15), "mem_len": 768},
}


@looped("arch", PUBLISHED_XL)
def test_transformer_xl_has_the_published_settings(arch):
    """The scripts have heads, dropout of blocks, activations and attention weights, and memory, but no clamping."""
    config, published = configure(arch), PUBLISHED_XL[arch]
    assert ARCH_MODEL_REGISTRY[arch] is FwpXlLanguageModel
    assert config.decoder_attention_heads == published["heads"] and config.mem_len == published["mem_len"]
    assert (config.dropout, config.activation_dropout, config.attention_dropout) == published["dropouts"]
    assert (config.clamp_len, config.same_length, config.decoder_normalize_before) == (-1, False, False)


@looped("arch", PRESETS)
def test_names_follow_the_grammar_and_belong_to_the_model(arch):
    assert re.fullmatch(
        rf"(softmax|delta_rnn|({'|'.join(UPDATE_RULES)})(_({'|'.join(FEATURE_MAPS)}))?)_lm_[a-z0-9]+(_[a-z]+)?", arch
    )
    assert ARCH_MODEL_REGISTRY[arch] is FwpLanguageModel


def test_the_names_of_transformer_xl():
    assert set(XL_PRESETS) == {*PUBLISHED_XL, "xl_lm_wt103", "xl_lm_wt103_ablation", "xl_lm_enwik8_medium"}


def test_flags_win_over_presets():
    config = configure("delta_lm_wt103", decoder_embed_dim=64, decoder_layers=3)
    assert (config.decoder_embed_dim, config.decoder_layers, config.sum_normalization) == (64, 3, True)
    assert configure("fwp_lm").sum_normalization is False


@pytest.mark.parametrize(
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
