"""What tests of attentions share: small layers of all kinds, the papers' equations of every rule, and errors."""

import torch
from support.pairwise import pairwise

from fairseq_fwp import ops
from fairseq_fwp.modules.attention import FastWeightAttention
from fairseq_fwp.modules.attention.base import Marks
from fairseq_fwp.modules.attention.delta_rnn import DeltaRnn
from fairseq_fwp.modules.attention.hybrid import Hybrid
from fairseq_fwp.modules.attention.mlstm import Mlstm
from fairseq_fwp.modules.attention.normalization import AttentionNormalization, SumNormalization
from fairseq_fwp.modules.attention.recurrent_delta import RecurrentDelta
from fairseq_fwp.modules.attention.relative import LearnedDistances, RelativeAttention, SinusoidalDistances
from fairseq_fwp.modules.attention.softmax import SoftmaxAttention
from fairseq_fwp.modules.attention.srwm import Srwm
from fairseq_fwp.modules.attention.time_mix import TimeMix
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

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
    if "attention_normalization" in options and UPDATE_RULES[rule].normalizer is None:
        return False
    if "attention_normalization" in options and UPDATE_RULES[rule].normalizer.output_only and normalization != "output":
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
NORMALISED = {
    "softmax_heads": 2,
    "kv_heads": 1,
    "head_dim": 4,
    "qk_norm": True,
    "rope_theta": 30.0,
    "rope_scaling": "2,0,1,9",
}
BASELINES = {
    ("softmax",): lambda: SoftmaxAttention(DIM, HEADS),
    ("local",): lambda: SoftmaxAttention(DIM, HEADS, window=6),
    ("softmax", "rotary"): lambda: SoftmaxAttention(DIM, HEADS, **ROTARY),
    ("local", "rotary"): lambda: SoftmaxAttention(DIM, HEADS, window=4, **ROTARY),
    ("softmax", "normalised"): lambda: SoftmaxAttention(DIM, HEADS, **NORMALISED),
    ("delta_rnn",): lambda: DeltaRnn(DIM, HEADS, FEATURE_MAPS["elu"](4), sum_normalization=SumNormalization()),
    ("hybrid",): lambda: Hybrid(DIM, HEADS, window=6, negative_eigenvalues=True, backend="reference"),
    ("hybrid", "rotary"): lambda: Hybrid(DIM, HEADS, window=4, rope_theta=30.0, mix="head", backend="reference"),
    ("mlstm",): lambda: Mlstm(DIM, HEADS, key_dim=5, backend="reference"),
    ("recurrent_delta",): lambda: RecurrentDelta(DIM, HEADS),
    ("srwm",): lambda: Srwm(DIM, HEADS),
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


def build(kind, **options):
    """Return a layer in float64. A baseline has no options."""
    if kind in BASELINES:
        return BASELINES[kind]().double().eval()
    rule, feature_map, normalization = kind
    own = {"l2_normalization": True, "l2_normalization_epsilon": 1e-6, **MODERN[kind]} if kind in MODERN else {}
    options = {"backend": "reference", **own, **NORMALIZATIONS.get(normalization, {}), **options}
    key_dim = options.get("key_dim", DIM // HEADS)
    return FastWeightAttention(DIM, HEADS, FEATURE_MAPS[feature_map](key_dim), rule, **options).double().eval()


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def rule_inputs(layer, x, key_padding_mask=None):
    """Return q, k, v and a list of gates of a layer in double precision: projected, mapped and normalised."""
    q, k, v, gates, _ = layer.memory_inputs(x, None, Marks(key_padding_mask))
    return q, k, v, [*gates.values()]


def half_precision_error(found, expected):
    """Return the error of outputs (B, L, D) relative to their sizes, without the worst tenth of the tokens.

    A divisor close to zero makes any error of one output large.
    """
    errors, sizes = ((x.float().norm(dim=-1).flatten()) for x in (found.float() - expected, expected))
    return (errors / (sizes + sizes.mean())).quantile(0.9)


def memories(rule, k, v, gates, divided=False, state=None):
    """Yield the memory W (B, H, Dk, Dv) and the normaliser z (B, H, Dk) after each token.

    By the rules' steps, which tests/ops/test_formulas.py compares with the papers. z forgets as the memory does: Schlag
    et al. 2021, Eqs. 17-29, Mao 2022, Eqs. 5 and 7, and the later rules.
    k (B, H, L, Dk) mapped, v (B, H, L, Dv), gates (B, H, L) or (B, H, L, size). With N steps k
    and v are (B, H, L, N, size).
    divided: retrieved values are divided by z . k (Eq. 27). state: W and z before the first token.
    """
    step, names = UPDATE_RULES[rule].operation.step, [gate.name for gate in UPDATE_RULES[rule].gates]
    w, z = state or (k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), k.new_zeros(*k.shape[:2], k.shape[-1]))
    for t in range(k.shape[2]):
        key, value = k[:, :, t], v[:, :, t]
        gate = [x[:, :, t] if x.dim() == 4 else x[:, :, t, None] for x in gates]
        if divided and UPDATE_RULES[rule].normalizer.retrieved:
            old, stored = ops.retrieve(key, w), (key * z).sum(-1, keepdim=True)
            value = value + old - torch.where(stored > 0, old / stored.clamp(min=1e-6), 0)
        w, opened = step(w, key, value, *gate), dict(zip(names, gate, strict=True))
        if rule == "gated":
            z = gate[0] * z + (1 - gate[0]) * key
        elif key.dim() == 3:
            z = opened.get("key_decay", opened.get("decay", 1)) * z + key
        yield w, z
