"""Every architecture builds, has the published number of parameters, and can be overridden by flags."""

import functools
import re
from argparse import Namespace

import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from support.pairwise import looped
from support.small_models import configure, make_dictionary

from fairseq_fwp.models.fwp_lm import FwpLanguageModel
from fairseq_fwp.models.fwp_xl_lm import FwpXlLanguageModel
from fairseq_fwp.models.presets import FWL_PRESETS, MODERN_PRESETS, PRESETS, XL_PRESETS
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

# Words of the corpus, or of the published model; fairseq's dictionary has a few more symbols.
WORDS = {"wt103": 267_735, "enwik8": 204, "rwkv7": 65_536, "xlstm": 50_304}
dictionary = functools.cache(make_dictionary)


def build(arch, words=50, **flags):
    """Return a model without memory for its parameters."""
    with torch.device("meta"):
        task = Namespace(target_dictionary=dictionary(words))
        return ARCH_MODEL_REGISTRY[arch].build_model(configure(arch, **flags), task)


def numbers(module):
    return sum(parameter.numel() for parameter in module.parameters())


# Of the rules with Schlag et al. 2021's sizes, small and medium, with any map. Later papers' have more gates.
SCHLAG = {
    "softmax": (44_018_394, 89_833_434), "sum": (44_018_394, 89_833_434), "delta": (44_034_778, 89_866_202),
    "gated": (44_034_778,), "decay": (44_546_778,), "delta_rnn": (44_575_450,), "gla": (44_085_978,),
    "gated_delta": (44_051_418, 89_899_226), "kda": (44_102_490, 90_132_570), "recurrent_delta": (44_135_130,),
    "mlstm": (44_315_610,), "srwm": (43_338_714,),
}  # fmt: skip
SHAW, POSITIONS = {"decoder_positions": "shaw", "clamp_len": 255}, {"mem_len": 0, "decoder_positions": "absolute"}
LAYERWISE = {"mem_len": 0, "decoder_positions": "layerwise", "tokens_per_sample": 128}
TABLES_2_AND_4 = {
    **dict.fromkeys((44_018_394, 44_034_778), (40e6, 10e6)), 89_833_434: (89.8e6, 0.1e6), 89_866_202: (89.9e6, 0.1e6),
}  # fmt: skip
# Flags, the number of parameters, and the published one with its last place.
PUBLISHED = [
    *((arch, {}, n, *TABLES_2_AND_4.get(n, (None, 0)))
      for arch in PRESETS for n in [SCHLAG[re.split("_lm_|_dpfp|_favor", arch)[0]]["medium" in arch]]),
    ("xl_lm_wt103", {}, 44_280_794, 44.3e6, 0.1e6),
    ("xl_lm_wt103_medium", {}, 90_882_522, 90.9e6, 0.1e6),  # Schlag et al. 2021, Table 4
    ("xl_lm_wt103_base", {}, 151_107_538, 151e6, 1e6),  # Dai et al. 2019, Table 1
    ("xl_lm_wt103_base", {"untie_biases": True}, 151_123_537 - 9 * 411, None, 0),  # fairseq's example has 9 more words
    ("xl_lm_wt103_ablation", {}, 128_140_698, 128e6, 1e6),  # Table 6, also below
    ("xl_lm_wt103_ablation", SHAW, 127_599_322, 128e6, 1e6),
    ("xl_lm_wt103_ablation", POSITIONS, 126_157_530, 126e6, 1e6),
    ("xl_lm_wt103_ablation", LAYERWISE, 126_878_426, 127e6, 1e6),
    # Table 1 says 257 M. The script and the published weights have 18 layers, which are more.
    ("xl_lm_wt103_large", {}, 285_205_322, 285e6, 1e6),
    ("xl_lm_wt103_large", {"decoder_layers": 16}, 257_919_818, 257.9e6, 0.1e6),
    ("xl_lm_enwik8_base", {}, 41_055_436, 41e6, 1e6),  # Table 2, also below
    ("xl_lm_enwik8_medium", {}, 87_803_004, 88e6, 1e6),
    ("xl_lm_enwik8_large", {}, 277_278_924, 277e6, 1e6),
    # Yang et al. 2024, 2025 and Kimi Team 2025, as configured in flash-linear-attention, with 32,000 words twice.
    ("delta_net_lm_340m", {}, 374_362_112, 3.8e8, 0.2e8),
    ("delta_net_lm_1.3b", {}, 1_365_677_056, 1.4e9, 0.1e9),
    ("gated_deltanet_lm_340m", {}, 379_764_350, 3.8e8, 0.2e8),
    ("gated_deltanet_lm_1.3b", {}, 1_387_348_732, 1.4e9, 0.1e9),
    ("kda_lm_340m", {}, 386_994_368, 3.8e8, 0.2e8),
    ("kda_lm_1.3b", {}, 1_390_941_568, 1.4e9, 0.1e9),
    ("hqlt_lm_340m", {}, 399_233_024, None, 0),  # Irie et al. 2025, as configured in their code
    ("hqlt_lm_1.3b", {}, 1_465_750_528, None, 0),
    ("xlstm_lm_7b", {}, 6_865_424_896, 6_865_424_896, 1),  # Beck et al. 2025, as counted in transformers
    ("rwkv7_lm_0.1b", {}, 191_034_624, 191_034_624, 1),  # Peng et al. 2025, Table 2
    ("rwkv7_lm_0.4b", {}, 450_767_872, 450_767_872, 1),
    ("rwkv7_lm_1.5b", {}, 1_527_404_544, 1_527_404_544, 1),
    ("rwkv7_lm_2.9b", {}, 2_947_735_040, 2_947_735_040, 1),
]  # fmt: skip


@looped("arch, flags, expected, published, last_place", PUBLISHED)
def test_published_number_of_parameters(arch, flags, expected, published, last_place):
    """The numbers were derived from the papers' layers: projections, gates, feed-forward, norms, words and clusters."""
    model = build(arch, next((n for corpus, n in WORDS.items() if corpus in arch), 32_000), **flags)
    assert numbers(model) == expected
    assert published is None or abs(expected - published) <= last_place / 2
    if "rwkv7" in arch:
        assert model.decoder.layers[0].self_attn.num_heads * 64 == model.decoder.embed_tokens.embedding_dim


@looped("arch", FWL_PRESETS)
def test_fast_weight_layers_have_the_papers_sizes(arch):
    """Clark et al. 2022, Sec. 3: 121 M parameters (119 M with the layer), and Transformer-XL large."""
    model, dim = build(arch, WORDS["wt103"]), 1024 if "xl" in arch else 768
    layer = numbers(model.decoder.fast_weight_layer)
    assert layer == 8 * dim * dim + 7 * dim + 12
    assert round((numbers(model) - layer) / 1e6) == (285 if "xl" in arch else 114)


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


def test_names_follow_the_grammar_and_belong_to_the_model():
    rules, maps = "|".join(UPDATE_RULES), "|".join(FEATURE_MAPS)
    for arch in PRESETS:
        rule = rf"softmax|delta_rnn|recurrent_delta|mlstm|srwm|({rules})(_({maps}))?"
        assert re.fullmatch(rf"({rule})_lm_[a-z0-9]+(_[a-z]+)?", arch)
        assert ARCH_MODEL_REGISTRY[arch] is FwpLanguageModel
    tiny = {f"{name}_lm_tiny" for name in ("delta_net", "gated_deltanet", "hqlt", "kda", "rwkv7", "xlstm")}
    assert tiny | {arch for arch, *_ in PUBLISHED} == {*PRESETS, *XL_PRESETS, *MODERN_PRESETS}


def test_flags_win_over_presets():
    config = configure("delta_lm_wt103", decoder_embed_dim=64, decoder_layers=3)
    assert (config.decoder_embed_dim, config.decoder_layers, config.sum_normalization) == (64, 3, True)
    assert configure("fwp_lm").sum_normalization is False
    model = build("gated_deltanet_lm_tiny", decoder_layers=2, softmax_layers="1", attention_softmax_heads=2)
    assert [layer.self_attn.num_heads for layer in model.decoder.layers] == [3, 2]  # of a width of 128


# Tables 2 and 5: m = 8 and 16, and DPFP with nu = 1.
FEATURES = {"sum_favor_lm_wt103": 16, "delta_favor_lm_wt103_medium": 32, "sum_dpfp_lm_wt103": 32}


@looped("arch, features", [*FEATURES.items(), ("delta_dpfp_lm_wt103", 32), ("delta_lm_wt103", 16)])
def test_published_number_of_features(arch, features):
    assert build(arch).decoder.layers[0].self_attn.feature_map.feature_dim == features
