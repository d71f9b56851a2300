"""Architectures of the synthetic retrieval task: each entry lists the differences from the model's defaults.

Schlag, Irie & Schmidhuber 2021, arXiv 2102.11174, Sec. 6.1 and App. D: the models of Figures 2 to 5, all with keys of
size 64. Rules that do not retrieve a value before they write normalise the output. delta normalises the mapped keys and
queries. fwm, the paper's "Schlag (2021)", only has the layer normalisation of its public code. The rules gated and
decay of Mao 2022, arXiv 2210.04243, are normalised as sum, and later rules as delta.
"""

from typing import Any

from fairseq_fwp.models.presets import register
from fairseq_fwp.modules.attention import SOFTMAX

SUM = {"update_rule": "sum", "attention_normalization": True}
GATED = {"update_rule": "gated", "attention_normalization": True}
DECAY = {"update_rule": "decay", "attention_normalization": True}
DELTA = {"update_rule": "delta", "sum_normalization": True}
FWM = {"update_rule": "fwm", "norm_read_out": True}
FAVOR = {"feature_map": "favor"}
DPFP = {"feature_map": "dpfp"}

RETRIEVAL_PRESETS: dict[str, dict[str, Any]] = {
    "softmax_retrieval": {"update_rule": SOFTMAX},
    "sum_retrieval": SUM,
    "sum_favor64_retrieval": {**SUM, **FAVOR, "favor_features": 64},
    "sum_favor128_retrieval": {**SUM, **FAVOR, "favor_features": 128},
    "sum_favor512_retrieval": {**SUM, **FAVOR, "favor_features": 512},
    "sum_dpfp1_retrieval": {**SUM, **DPFP, "dpfp_nu": 1},
    "sum_dpfp2_retrieval": {**SUM, **DPFP, "dpfp_nu": 2},
    "sum_dpfp3_retrieval": {**SUM, **DPFP, "dpfp_nu": 3},
    "sum_tanh_retrieval": {"update_rule": "sum", "feature_map": "tanh"},
    "sum_relu_retrieval": {**SUM, "feature_map": "relu"},
    "delta_retrieval": DELTA,
    "delta_favor64_retrieval": {**DELTA, **FAVOR, "favor_features": 64},
    "delta_favor128_retrieval": {**DELTA, **FAVOR, "favor_features": 128},
    "delta_dpfp1_retrieval": {**DELTA, **DPFP, "dpfp_nu": 1},
    "delta_dpfp2_retrieval": {**DELTA, **DPFP, "dpfp_nu": 2},
    "gated_dpfp1_retrieval": {**GATED, **DPFP, "dpfp_nu": 1},
    "decay_dpfp1_retrieval": {**DECAY, **DPFP, "dpfp_nu": 1},
    "gla_dpfp1_retrieval": {**DELTA, **DPFP, "dpfp_nu": 1, "update_rule": "gla"},
    "gated_delta_dpfp1_retrieval": {**DELTA, **DPFP, "dpfp_nu": 1, "update_rule": "gated_delta"},
    "kda_dpfp1_retrieval": {**DELTA, **DPFP, "dpfp_nu": 1, "update_rule": "kda"},
    "rwkv7_dpfp1_retrieval": {**DELTA, **DPFP, "dpfp_nu": 1, "update_rule": "rwkv7"},
    "fwm_tanh_retrieval": {**FWM, "feature_map": "tanh"},
    "fwm_dpfp1_retrieval": {**FWM, **DPFP, "dpfp_nu": 1},
}

for _name, _preset in RETRIEVAL_PRESETS.items():
    register(_name, _preset, "fwp_associative_retrieval")
