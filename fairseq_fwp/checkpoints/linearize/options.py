"""The options of a linearisation: those of the new attention, and how it is made."""

from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from fairseq_fwp.checkpoints.convert.conversion import Option
from fairseq_fwp.models.attention_options import AttentionOptions
from fairseq_fwp.models.fwp_lm import FwpLanguageModelConfig
from fairseq_fwp.models.fwp_transformer import FastWeightOptions
from fairseq_fwp.modules.attention import SOFTMAX
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.ops.checks import check, look_up
from fairseq_fwp.patches.options import Settings, flag, read_options

BY_DIVERGENCE = "kl:"

# The options that may change, by model.
ATTENTION_OPTIONS = {
    "fwp_lm": [*(field.name for field in fields(AttentionOptions)), "attention_window", "decoder_attention_heads"],
    "fwp_transformer": [field.name for field in fields(FastWeightOptions)],
}

# The options of a new causal attention, unless they are given.
DEFAULTS = {
    "decoder_feature_map": "identity",
    "sum_normalization": False,
    "attention_normalization": False,
    "attention_normalization_read_out_only": False,
}

# Options of parts and sizes that softmax attention does not have.
WITHOUT_WEIGHTS = (
    "decoder_value_dim", "decoder_value_heads", "decoder_conv_size", "output_gate", "output_gate_rank",
    "decay_lower_bound",
)  # fmt: skip


class Method(NamedTuple):
    """The options of a conversion that are not options of the new attention: see `METHOD`."""

    state_size: int | None = None
    decay_spans: int | None = None
    keep_softmax_layers: str | None = None
    kl_text: Path | None = None


METHOD = {
    "state-size": Option(int, "number of features of a head's keys; default: that of the map", "M"),
    "decay-spans": Option(
        int, "with decay: start with memories of 1 to T tokens; default: uniform gates, as in Mao 2022", "T"
    ),
    "keep-softmax-layers": Option(
        str, "layers that keep softmax, numbered from 0, such as 0,3; kl:N: the N whose conversion costs most", "LAYERS"
    ),
    "kl-text": Option(Path, "with kl:N: text on which the cost is measured, in dictionary words", "FILE"),
}


def check_options(arch: str, chosen: Settings, method: Method) -> None:
    """Check the options of a new attention, by field, before a checkpoint is read; raise ValueError otherwise."""
    if others := [name for name in chosen if name not in ATTENTION_OPTIONS[arch]]:
        raise ValueError(f"{flag(others[0])} must be left out: only options of attention can change")
    if parts := [name for name in WITHOUT_WEIGHTS if name in chosen]:
        raise ValueError(f"{flag(parts[0])} must be left out: the pretrained weights are for attention without it")
    if arch == "fwp_transformer":
        check_translation(chosen, method)
        return
    rule, spans, softmax_layers = chosen.get("decoder_update_rule"), method.decay_spans, method.keep_softmax_layers
    if rule is None:
        raise ValueError("--decoder-update-rule must be given with options of a new attention, such as --state-size")
    if rule == SOFTMAX:
        if chosen.keys() != {"decoder_update_rule", "attention_window"} or method != Method():
            expected = "--attention-window and no other option of the new attention (to keep softmax: without any)"
            raise ValueError(f"--decoder-update-rule softmax must be given with {expected}")
        return
    if "attention_window" in chosen:
        raise ValueError("--attention-window needs --decoder-update-rule softmax: fast weights have no window")
    look_up("update rule", rule, UPDATE_RULES, "softmax or ")
    if spans is not None and (rule, {**DEFAULTS, **chosen}["decoder_feature_map"]) != ("decay", "identity"):
        needed = "--decoder-update-rule is decay and --decoder-feature-map is identity (the default)"
        raise ValueError(f"--decay-spans must be left out unless {needed}")
    check(spans is None or spans >= 1, f"--decay-spans must be at least 1 token, got {spans}")
    if softmax_layers == "":
        raise ValueError("--keep-softmax-layers must be layers such as 0,3, or kl:N, got nothing: or leave it out")
    if softmax_layers and "decoder_attention_heads" in chosen:
        raise ValueError("--decoder-attention-heads must be left out with --keep-softmax-layers: it changes all layers")
    by_divergence = (softmax_layers or "").startswith(BY_DIVERGENCE)
    has_text = method.kl_text is not None
    check(has_text or not by_divergence, f"--kl-text FILE must be given with --keep-softmax-layers {softmax_layers}")
    check(by_divergence or not has_text, "--kl-text must be left out without --keep-softmax-layers kl:N")


def check_translation(chosen: Settings, method: Method) -> None:
    """Check the options of a conversion of a translation model; raise ValueError otherwise."""
    for name in ("decay_spans", "keep_softmax_layers", "kl_text"):
        given = getattr(method, name) is not None
        check(not given, f"{flag(name)} must be left out for translation: only language models have it")
    places = ("encoder_feature_map", "cross_feature_map", "decoder_update_rule")
    if all(chosen.get(place, SOFTMAX) == SOFTMAX for place in places):
        names = "--encoder-feature-map, --cross-feature-map and --decoder-update-rule"
        raise ValueError(f"one of {names} must be other than softmax, got none: name one, or leave out all options")
    if chosen.get("decoder_update_rule", SOFTMAX) == SOFTMAX:
        for name in chosen.keys() - {*places}:
            shared = name.split("_")[0] in FEATURE_MAPS  # such as dpfp_nu, which the other attentions use too
            of_decoder = f"{flag(name)}, which changes the decoder's self-attention"
            check(shared, f"--decoder-update-rule must be given with {of_decoder}")


def fwp_lm_config(flags: Settings) -> FwpLanguageModelConfig:
    """Return the configuration of a language model with these flags."""
    of_task = {"max_target_positions": None, "add_bos_token": False}
    cfg = OmegaConf.merge(OmegaConf.structured(FwpLanguageModelConfig), {**of_task, **flags})
    return read_options(FwpLanguageModelConfig, cfg)
