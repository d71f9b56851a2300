"""Every architecture builds, has the published number of parameters, and yields to the command line."""

import re
from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY

from fairseq_fwp.models.fwp_lm import FwpLanguageModel
from fairseq_fwp.models.presets import PRESETS
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

from .conftest import configure, make_dictionary

WIKITEXT103_WORDS = 267_735


@pytest.fixture(scope="module")
def wikitext103():
    return Namespace(target_dictionary=make_dictionary(WIKITEXT103_WORDS))


def count_parameters(arch, task):
    with torch.device("meta"):
        model = FwpLanguageModel.build_model(configure(arch), task)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("arch", [arch for arch in PRESETS if "_lm_wt103" in arch])
def test_published_number_of_parameters(arch, wikitext103):
    """Schlag et al. 2021, Table 2: 40 M and 90 M; Table 4: 89.8 M with the sum rule, 89.9 M with the delta rule.

    Gates are on top: one a head (delta, gated), or one with a bias for every key and value dimension (decay).
    """
    medium = arch.endswith("_medium")
    dim, ffn = (256 if medium else 128), 2048
    layer = 4 * dim * dim + 2 * dim * ffn + ffn + dim + 2 * 2 * dim
    output = WIKITEXT103_WORDS * (dim + 1) + 3 * (dim + 1)
    gates = {"delta": 8 * dim, "gated": 8 * dim, "decay": 2 * (dim + 1) * dim}.get(arch.split("_")[0], 0)
    count = count_parameters(arch, wikitext103)
    assert count == output + 16 * (layer + gates)
    if medium:
        assert round(count / 1e6, 1) == (89.9 if "delta" in arch else 89.8)
    else:
        assert round(count / 1e7) == 4


def test_delta_has_exactly_the_published_gates_more_than_sum(wikitext103):
    for size, extra in (("", 16_384), ("_medium", 32_768)):
        delta, plain = (count_parameters(f"{rule}_lm_wt103{size}", wikitext103) for rule in ("delta", "sum"))
        assert delta - plain == extra


@pytest.mark.parametrize("arch", PRESETS)
def test_names_follow_the_grammar_and_belong_to_the_model(arch):
    assert re.fullmatch(
        rf"(softmax|({'|'.join(UPDATE_RULES)})(_({'|'.join(FEATURE_MAPS)}))?)_lm_[a-z0-9]+(_[a-z]+)?", arch
    )
    assert ARCH_MODEL_REGISTRY[arch] is FwpLanguageModel


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
