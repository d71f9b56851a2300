"""Architectures: each entry lists the differences from the model's defaults. A new size is one entry.

Sizes and settings: Schlag, Irie & Schmidhuber 2021, arXiv 2102.11174, Sec. 6.3 and App. F. Its linear Transformers
(rule sum) normalise the output, its Delta Networks the mapped keys and queries (Tables 2, 3 and 5). The rules gated and
decay are from Mao 2022, arXiv 2210.04243, which trains neither from scratch. Transformer-XL: Dai et al. 2019, arXiv
1901.02860, and its public code. Fast weight layers: Clark et al. 2022, arXiv 2212.02475, Sec. 3. What these leave open,
and what is chosen here, is in docs/papers.md.
"""

from argparse import Namespace

from fairseq.models import register_model_architecture

from fairseq_fwp.models import fwp_lm, fwp_transformer, fwp_xl_lm  # noqa: F401  (what is registered for)
from fairseq_fwp.modules import attention
from fairseq_fwp.patches.options import Settings

WT103 = {"adaptive_softmax_cutoff": "20000,40000,200000"}
SMALL = {"decoder_embed_dim": 128}
MEDIUM = {"decoder_embed_dim": 256}

SUM = {"decoder_update_rule": "sum", "attention_normalization": True}
DELTA = {"decoder_update_rule": "delta", "sum_normalization": True}
GATED = {"decoder_update_rule": "gated", "attention_normalization": True}
DECAY = {"decoder_update_rule": "decay", "decoder_feature_map": "identity"}
# Only the rules are from these papers: maps, normalisation and sizes are the Delta Networks', for comparison. Their
# whole layers are in MODERN_PRESETS below.
GLA = {**DELTA, "decoder_update_rule": "gla"}
GATED_DELTA = {**DELTA, "decoder_update_rule": "gated_delta"}
KDA = {**DELTA, "decoder_update_rule": "kda"}
SOFTMAX = {"decoder_update_rule": attention.SOFTMAX}
# Irie et al. 2021, arXiv 2106.06295: its language models have Schlag's sizes.
DELTA_RNN = {"decoder_update_rule": "delta_rnn", "sum_normalization": True}
MLSTM = {"decoder_update_rule": "mlstm"}
RECURRENT_DELTA = {"decoder_update_rule": "recurrent_delta"}
SRWM = {"decoder_update_rule": "srwm", "decoder_normalize_before": True}  # the block of arXiv 2202.05780
# m = d / 2 would give as many features as elu: Table 2.
FAVOR = {"decoder_feature_map": "favor"}
DPFP = {"decoder_feature_map": "dpfp", "dpfp_nu": 1}

PRESETS: dict[str, Settings] = {
    "sum_lm_wt103": {**SUM, **SMALL, **WT103},
    "sum_lm_wt103_medium": {**SUM, **MEDIUM, **WT103},
    "sum_favor_lm_wt103": {**SUM, **FAVOR, "favor_features": 8, **SMALL, **WT103},
    "sum_favor_lm_wt103_medium": {**SUM, **FAVOR, "favor_features": 16, **MEDIUM, **WT103},
    "sum_dpfp_lm_wt103": {**SUM, **DPFP, **SMALL, **WT103},
    "delta_lm_wt103": {**DELTA, **SMALL, **WT103},
    "delta_lm_wt103_medium": {**DELTA, **MEDIUM, **WT103},
    "delta_favor_lm_wt103": {**DELTA, **FAVOR, "favor_features": 8, **SMALL, **WT103},
    "delta_favor_lm_wt103_medium": {**DELTA, **FAVOR, "favor_features": 16, **MEDIUM, **WT103},
    "delta_dpfp_lm_wt103": {**DELTA, **DPFP, **SMALL, **WT103},
    "gla_lm_wt103": {**GLA, **SMALL, **WT103},
    "gated_delta_lm_wt103": {**GATED_DELTA, **SMALL, **WT103},
    "gated_delta_lm_wt103_medium": {**GATED_DELTA, **MEDIUM, **WT103},
    "kda_lm_wt103": {**KDA, **SMALL, **WT103},
    "kda_lm_wt103_medium": {**KDA, **MEDIUM, **WT103},
    "delta_rnn_lm_wt103": {**DELTA_RNN, **SMALL, **WT103},
    "mlstm_lm_wt103": {**MLSTM, **SMALL, **WT103},
    "recurrent_delta_lm_wt103": {**RECURRENT_DELTA, **SMALL, **WT103},
    "srwm_lm_wt103": {**SRWM, **SMALL, **WT103},
    "gated_lm_wt103": {**GATED, **SMALL, **WT103},
    "decay_lm_wt103": {**DECAY, **SMALL, **WT103},
    "softmax_lm_wt103": {**SOFTMAX, **SMALL, **WT103},
    "softmax_lm_wt103_medium": {**SOFTMAX, **MEDIUM, **WT103},
}


def decoder(**sizes: int) -> Settings:
    """Return the options of a decoder's sizes."""
    return {f"decoder_{name}": value for name, value in sizes.items()}


BLOCKS = {
    "decoder_normalize_before": True, "no_token_positional_embeddings": True, "no_scale_embedding": True,
    "output_layer": "untied", "dropout": 0.0,
}  # fmt: skip
# The whole layer of flash-linear-attention's models: names and settings are those of its configurations.
MODERN = {
    "decoder_feature_map": "silu", "decoder_conv_size": 4, "l2_normalization": True, "l2_normalization_epsilon": 1e-6,
    "scale_queries": True, "norm_read_out": True, "rms_norm": True, "norm_epsilon": 1e-6, "swiglu": True, **BLOCKS,
}  # fmt: skip
# Peng et al. 2025, arXiv 2503.14456: the whole model.
RWKV7 = {"decoder_update_rule": "time_mix", "channel_mix": True, "layernorm_embedding": True, **BLOCKS}
# Beck et al. 2025, arXiv 2503.13427: the whole model, but for the cap of its logits.
XLSTM = {**MLSTM, "rms_norm": True, "norm_epsilon": 1e-6, "swiglu": True, **BLOCKS}
# Irie et al. 2025, arXiv 2506.00744: the synchronous hybrid, as in the public configurations of language models.
HQLT = {
    "decoder_update_rule": "hybrid", "attention_window": 64, "attention_rope_theta": 10000.0,
    "negative_eigenvalues": True, "rms_norm": True, "norm_epsilon": 1e-6, "swiglu": True, **BLOCKS,
}  # fmt: skip
# DeltaNet (Yang et al. 2024, arXiv 2406.06484) does not gate its output. Gated DeltaNet (Yang et al. 2025, arXiv
# 2412.06464) does by SiLU, and Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692) by a sigmoid of a head's rank.
DELTA_NET = {**MODERN, "decoder_update_rule": "delta"}
GATED_DELTANET = {**MODERN, "decoder_update_rule": "gated_delta", "output_gate": "silu"}
KIMI = {**MODERN, "decoder_update_rule": "kda", "output_gate": "sigmoid"}
WIDE_1B = {"embed_dim": 2048, "ffn_embed_dim": 5632}
WIDE_340M = {"embed_dim": 1024, "ffn_embed_dim": 2816}
TINY = {"embed_dim": 128, "ffn_embed_dim": 384, "layers": 4}


def rwkv7(dim: int, layers: int, low: int, value: int, gate: int) -> Settings:
    """Return RWKV-7 with heads of 64 and these ranks: of decays and rates, values, and the gate."""
    ranks = {"decay_rank": low, "rate_rank": low, "value_rank": value, "output_gate_rank": gate}
    sizes = decoder(embed_dim=dim, ffn_embed_dim=4 * dim, layers=layers, attention_heads=dim // 64)
    return {**RWKV7, **sizes, **ranks}


# Sizes of 1.3b are the defaults of the configurations, 340m of delta_net is the published one. Those of the other two
# have half the width of 1.3b. tiny trains on two cores of a CPU.
MODERN_PRESETS: dict[str, Settings] = {
    "delta_net_lm_tiny": {**DELTA_NET, **decoder(**TINY, attention_heads=2)},
    "delta_net_lm_340m": {**DELTA_NET, **decoder(**WIDE_340M, layers=24, attention_heads=8)},
    "delta_net_lm_1.3b": {**DELTA_NET, **decoder(**WIDE_1B, layers=24, attention_heads=16)},
    "gated_deltanet_lm_tiny": {
        **GATED_DELTANET, **decoder(**TINY, attention_heads=3, key_dim=32, value_dim=64)
    },
    "gated_deltanet_lm_340m": {
        **GATED_DELTANET, **decoder(**WIDE_340M, layers=21, attention_heads=3, key_dim=256, value_dim=512)
    },
    "gated_deltanet_lm_1.3b": {
        **GATED_DELTANET, **decoder(**WIDE_1B, layers=21, attention_heads=6, key_dim=256, value_dim=512)
    },
    "kda_lm_tiny": {**KIMI, **decoder(**TINY, attention_heads=2), "output_gate_rank": 64},
    "kda_lm_340m": {**KIMI, **decoder(**WIDE_340M, layers=24, attention_heads=8), "output_gate_rank": 128},
    "kda_lm_1.3b": {**KIMI, **decoder(**WIDE_1B, layers=24, attention_heads=16), "output_gate_rank": 128},
    "hqlt_lm_tiny": {**HQLT, **decoder(**TINY, attention_heads=2)},
    "hqlt_lm_340m": {**HQLT, **decoder(**WIDE_340M, layers=24, attention_heads=8)},
    "hqlt_lm_1.3b": {**HQLT, **decoder(**WIDE_1B, layers=24, attention_heads=16)},
    "xlstm_lm_tiny": {**XLSTM, **decoder(**TINY, attention_heads=2, key_dim=32)},
    "xlstm_lm_7b": {
        **XLSTM,
        **decoder(embed_dim=4096, ffn_embed_dim=10944, layers=32, attention_heads=8, key_dim=256, value_dim=512),
    },
    "rwkv7_lm_tiny": rwkv7(128, 4, low=32, value=32, gate=64),
    # The published sizes, under their names.
    "rwkv7_lm_0.1b": rwkv7(768, 12, low=64, value=32, gate=128),
    "rwkv7_lm_0.4b": rwkv7(1024, 24, low=64, value=32, gate=128),
    "rwkv7_lm_1.5b": rwkv7(2048, 24, low=96, value=64, gate=256),
    "rwkv7_lm_2.9b": rwkv7(2560, 32, low=96, value=64, gate=320),
}  # fmt: skip


def noise(probability: float) -> Settings:
    """Return the options of one dropout everywhere."""
    return dict.fromkeys(["dropout", "activation_dropout", "attention_dropout"], probability)


# The memory is as long as the segment was in training (--tokens-per-sample); evaluation uses longer ones.
XL = {"activation_dropout": 0.1}
XL_LARGE = {"untie_biases": True, **decoder(layers=18, embed_dim=1024, ffn_embed_dim=4096, attention_heads=16)}
ENWIK8 = {**decoder(layers=24, embed_dim=1024, ffn_embed_dim=3072), **noise(0.15), "mem_len": 768}

XL_PRESETS: dict[str, Settings] = {
    "xl_lm_wt103": {**XL, **SMALL, "mem_len": 256, **WT103},
    "xl_lm_wt103_medium": {**XL, **MEDIUM, "mem_len": 384, **WT103},
    "xl_lm_wt103_base": {
        **XL, **decoder(embed_dim=410, ffn_embed_dim=2100, attention_heads=10), "mem_len": 150, **WT103
    },
    "xl_lm_wt103_ablation": {**XL, **decoder(embed_dim=352, ffn_embed_dim=2100), "mem_len": 128, **WT103},
    "xl_lm_wt103_large": {**XL_LARGE, **noise(0.2), "mem_len": 384, "div_val": 4, **WT103},
    "xl_lm_enwik8_base": {**XL, **decoder(layers=12, embed_dim=512, ffn_embed_dim=2048), "mem_len": 512},
    "xl_lm_enwik8_medium": {"untie_biases": True, **ENWIK8, **decoder(layers=18, embed_dim=640, ffn_embed_dim=2200)},
    "xl_lm_enwik8_large": {"untie_biases": True, **ENWIK8},
}  # fmt: skip

FWL_PRESETS: dict[str, Settings] = {
    "fwl_xl_lm_wt103": {"fwl_base": "fwp_xl_lm", **XL_PRESETS["xl_lm_wt103_large"]},
    "fwl_local_lm_wt103": {
        **SOFTMAX, **decoder(layers=12, embed_dim=768, ffn_embed_dim=3072, attention_heads=12), "attention_window": 256,
        "div_val": 4, **WT103,
    },
}  # fmt: skip

# Translation: Schlag et al. 2021, Sec. 6.2, Table 1 and App. E. All three attentions are linear, with one map; *big*
# is Vaswani's, with its dropout, as in fairseq's transformer_vaswani_wmt_en_de_big. FAVOR+ and DPFP have the 512
# features of Table 1's last column; the other columns are m = 32 (64 features) and 128 (256), and nu = 2 (256).
WIDE = {"embed_dim": 1024, "ffn_embed_dim": 4096, "attention_heads": 16}
BIG = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in WIDE.items()} | {"dropout": 0.3}
MT_SIZES: dict[str, Settings] = {"": {}, "_big": BIG}
MT_MAPS: dict[str, Settings] = {"elu": {}, "favor": {"favor_features": 256}, "dpfp": {"dpfp_nu": 4}}

MT_PRESETS: dict[str, Settings] = {
    f"softmax_mt_wmt14_en_de{size}": {
        **SOFTMAX, "encoder_feature_map": attention.SOFTMAX, "cross_feature_map": attention.SOFTMAX, **sizes
    }
    for size, sizes in MT_SIZES.items()
} | {
    f"{rule}{'' if name == 'elu' else f'_{name}'}_mt_wmt14_en_de{size}": {
        **rules,
        **{f"{position}_feature_map": name for position in ("encoder", "decoder", "cross")},
        **features,
        **sizes,
    }
    for rule, rules in (("sum", SUM), ("delta", DELTA))
    for name, features in MT_MAPS.items()
    for size, sizes in MT_SIZES.items()
}  # fmt: skip

PRESETS_OF_MODELS = {
    "fwp_lm": PRESETS | MODERN_PRESETS,
    "fwp_xl_lm": XL_PRESETS,
    "fwp_fwl_lm": FWL_PRESETS,
    "fwp_transformer": MT_PRESETS,
}


def register(name: str, preset: Settings, model: str = "fwp_lm") -> None:
    """Register `--arch name` with fairseq; flags of the command line override the preset."""

    def fill_in(args: Namespace) -> None:
        for key, value in preset.items():
            setattr(args, key, getattr(args, key, value))

    register_model_architecture(model, name)(fill_in)


def register_presets(model: str) -> None:
    """Register the presets of a model, which must be registered before."""
    for name, preset in PRESETS_OF_MODELS[model].items():
        register(name, preset, model)


for _model in ("fwp_lm", "fwp_xl_lm", "fwp_transformer"):
    register_presets(_model)
