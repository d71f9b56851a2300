"""Every option is described once: docs/flags.md, and errors, with arguments in modules and flags in models.

Flags without effect are named, and those that cannot be are refused.
"""

import ast
import re
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import pytest
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from support.pairwise import looped
from support.small_models import SMALL, build, build_model, configure, make_dictionary

from fairseq_fwp.cli import flags
from fairseq_fwp.models.attention_options import naming_flags
from fairseq_fwp.models.attentions import is_of_attention
from fairseq_fwp.patches.options import flag

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_code():
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == flags.page() + "\n", "docs/flags.md is not of this code: run `fwp-info --flags > docs/flags.md`"


def test_every_option_of_every_model_stands_once_on_the_page():
    registered = {name for name, model in MODEL_REGISTRY.items() if model.__module__.startswith("fairseq_fwp.")}
    assert set(flags.MODELS) == registered
    of_models = flags.page().partition("## Flags of the task")[0]
    listed = re.findall(r"^\| `(--[a-z0-9-]+)`", of_models, re.MULTILINE)
    described = [option for options in flags.MODELS.values() for option in fields(options) if "help" in option.metadata]
    assert {flag(option.name) for option in described} == set(listed)
    assert len(listed) == len(set(listed)), "two classes have an option of one name"


def test_tasks_and_criterions_stand_on_the_page():
    rows = ("## Flags of the task fwp_language_modeling", "| `--carry-state` | switch | off |", "| `--teacher` |")
    assert all(row in flags.page() for row in rows)
    cutoff = {"adaptive_softmax_cutoff": "20000,40000,200000"}
    assert flags.differences("delta_lm_wt103") == {"sum_normalization": True} | cutoff


def test_attentions_that_use_a_flag_are_those_that_the_models_have():
    of = {
        option.name: set(flags.users(option.name, models))
        for owner, models in flags.owners(flags.MODELS).items()
        for option in flags.own(owner)
    }
    assert of["attention_window"] == {"softmax", "hybrid"}
    assert of["attention_dropout"] == {"softmax", "relative", "hybrid"}
    assert of["feature_map"] == {"fast_weight"}
    assert of["attention_bias"] == {"fast_weight", "softmax", "linear"}
    assert of["favor_draw"] == {"map favor"}
    assert of["fwl_decay"] == {"fast weight layer"}
    assert of["add_normalization_epsilon"] == {"`--sum-normalization`", "`--attention-normalization`", "linear"}
    assert all(users for name, users in of.items() if is_of_attention(name)), "no attention has the argument"
    assert not of["decoder_embed_dim"] and not of["dropout"] and not of["softmax_layers"]


def raised(path):
    """Return the words of every exception that a file raises."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise):
            texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            yield " ".join(text for text in texts if isinstance(text, str))


BELOW = [path for room in ("ops", "modules", "kernels") for path in (ROOT / "fairseq_fwp" / room).rglob("*.py")]


@looped("path", BELOW)
def test_errors_below_models_name_arguments_and_no_flags(path):
    for words in raised(path):
        assert not re.search(r"--[a-z]", words), words


def test_arguments_become_flags():
    names = {"features": "favor_features"}
    with pytest.raises(ValueError, match=r"^--favor-features must be at least 1; `plain` stays$"), naming_flags(names):
        raise ValueError("`features` must be at least 1; `plain` stays")


# Flags without effect are named.
UNUSED = [
    ("delta_lm_wt103", {"dpfp_nu": 2}, ["dpfp_nu"]),
    ("sum_favor_lm_wt103", {"decoder_feature_map": "elu"}, ["favor_features"]),
    ("softmax_lm_wt103", {"sum_normalization": True}, ["sum_normalization"]),
    ("delta_lm_wt103", {"attention_dropout": 0.5}, ["attention_dropout"]),
    ("softmax_lm_wt103", {"decoder_conv_size": 4, "output_gate": "silu"}, ["decoder_conv_size", "output_gate"]),
    ("delta_rnn_lm_wt103", {"decay_lower_bound": -5.0, "output_gate_rank": 2},
     ["output_gate_rank", "decay_lower_bound"]),
    ("kda_lm_tiny", {}, []),
    ("decay_lm_wt103", {"normalization_epsilon": 0.1}, ["normalization_epsilon"]),
    ("sum_lm_wt103", {"attention_normalization_read_out_only": True}, ["attention_normalization_read_out_only"]),
    ("delta_dpfp_lm_wt103", {"dpfp_nu": 2}, []),
    ("softmax_lm_wt103", {"attention_window": 3}, []),
    ("delta_lm_wt103", {"attention_rope_theta": 9.0, "attention_kv_heads": 2},
     ["attention_kv_heads", "attention_rope_theta"]),
    ("softmax_lm_wt103", {"attention_rope_theta": 9.0, "attention_kv_heads": 2, "attention_qkv_bias": True,
                          "attention_head_dim": 6, "attention_qk_norm": True, "attention_rope_scaling": "8,1,4,64"},
     []),
    ("softmax_lm_wt103", {}, []),
    ("fwp_lm", {"softmax_layers": "1", "attention_window": 3, "attention_dropout": 0.5, "sum_normalization": True}, []),
    ("fwp_lm", {"softmax_layers": "0", "dpfp_nu": 2}, ["dpfp_nu"]),
    ("fwp_lm", {"softmax_layers": "0,1", "sum_normalization": True, "attention_dropout": 0.5}, ["sum_normalization"]),
    *(
        ("fwp_lm", {"decoder_update_rule": rule, "decoder_feature_map": "elu", "attention_normalization": True,
                    "attention_normalization_read_out_only": True}, unused)
        for rule, unused in (
            ("sum", ["attention_normalization_read_out_only"]), ("delta", []), ("gated_delta", []), ("kda", []),
        )
    ),
    ("fwp_xl_lm", {"decoder_positions": "shaw", "clamp_len": 5, "untie_biases": True}, ["untie_biases"]),
    *(
        ("fwp_xl_lm", {"decoder_positions": positions, "mem_len": 0, "untie_biases": True, "clamp_len": 3},
         ["untie_biases", "clamp_len"])
        for positions in ("absolute", "layerwise")
    ),
    ("fwp_xl_lm", {"untie_biases": True, "clamp_len": 3}, []),
    ("fwp_fwl_lm", {"decoder_update_rule": "softmax", "attention_window": 4}, []),
    ("fwp_fwl_lm", {"decoder_update_rule": "softmax", "mem_len": 3}, ["mem_len"]),
    ("fwp_fwl_lm", {"fwl_base": "fwp_xl_lm", "mem_len": 3}, []),
    ("fwp_fwl_lm", {"fwl_base": "fwp_xl_lm", "attention_window": 4, "mem_len": 3}, ["attention_window"]),
    ("fwp_fwl_lm", {"softmax_layers": "1", "attention_window": 4}, []),
    ("fwp_fwl_lm", {"fwl_base": "fwp_xl_lm", "softmax_layers": "1"}, ["softmax_layers"]),
]  # fmt: skip


@looped(("arch", "flags", "unused"), UNUSED)
def test_flags_without_effect_are_named(caplog, arch, flags, unused):
    caplog.clear()
    build_model(arch, **flags)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    named = [message.split()[0] for message in warnings if "has no effect on the chosen attention" in message]
    assert named == [f"--{flag.replace('_', '-')}" for flag in unused]


# Refused, in one sentence that names the flag and what it must be.
REFUSED = [
    ("softmax", {"decoder_embed_dim": 0}, "--decoder-embed-dim .* got 0"),
    ("softmax", {"decoder_ffn_embed_dim": 0}, "--decoder-ffn-embed-dim .* got 0"),
    ("softmax", {"decoder_layers": -1}, "--decoder-layers .* got -1"),
    ("softmax", {"attention_dropout": 2.0}, "--attention-dropout .* got 2.0"),
    ("softmax", {"final_dropout": -0.5}, "--final-dropout .* got -0.5"),
    ("softmax", {"dropout": -0.1}, "--dropout .* got -0.1"),
    *(
        ("delta", {"adaptive_softmax_cutoff": cutoffs}, "--adaptive-softmax-cutoff must be whole numbers .*, got .*")
        for cutoffs in ("abc", "10;20", "5.5", "10,,x")
    ),
    *(
        ("delta", {"softmax_layers": layers},
         f"--softmax-layers must be ascending numbers from 0 to 1, separated by commas, got {re.escape(repr(layers))}")
        for layers in ("", "2", "-1", "0,0", "1,0", "0,", "0, 1", "00", "first", "0-1")
    ),
    *(
        (kind, {"softmax_layers": "1"}, "--softmax-layers must be left out with --decoder-update-rule softmax, got .*")
        for kind in ("softmax", "local")
    ),
    ("delta", {"positions_from_end": True, "no_token_positional_embeddings": True},
     ".*must be off with --no-token-positional-embeddings.*"),
    ("learned positions", {"positions_from_end": True}, ".* must be off with --decoder-learned-pos.*"),
    *(
        ("sum", {"output_layer": "untied", "adaptive_softmax_cutoff": cutoffs, "div_val": div_val},
         "--output-layer untied must be left out with .*: choose biased or tied")
        for cutoffs, div_val in (("10,30", 1), ("", 2))
    ),
    ("relative", {"mem_len": -1}, "--mem-len must be at least 0, got -1"),
    ("softmax", {"norm_epsilon": 0.0}, "--norm-epsilon must be above 0, got 0.0"),
    ("DeltaNet", {"decoder_conv_size": -1}, "--decoder-conv-size must be at least 1 token, or 0 .*, got -1"),
    ("RWKV-7", {"swiglu": True}, "--swiglu must be off with --channel-mix, got on"),
    ("relative", {"channel_mix": True}, "--channel-mix must be off with Transformer-XL, got on: .*"),
    ("RWKV-7", {"decoder_attention_heads": 3}, "--decoder-embed-dim must be divisible by .*, got 16 and 3"),
    ("RWKV-7", {"l2_normalization_epsilon": -1.0}, "--l2-normalization-epsilon must be at least 0, got -1.0"),
    *(
        ("RWKV-7", {name: 0}, f"--{name.replace('_', '-')} must be at least 1, got 0")
        for name in ("decay_rank", "rate_rank", "value_rank", "output_gate_rank")
    ),
    ("DeltaNet", {"decoder_value_heads": 5}, "--decoder-value-heads must be a multiple of .* = 4, got 5"),
    ("layer on delta", {"rms_norm": True}, "--rms-norm must be off with a fast weight layer, got on: .*"),
    ("relative", {"mem_len": 0, "same_length": True}, "--mem-len must be at least 1 with --same-length, got 0"),
    ("absolute", {"mem_len": 6}, "--mem-len must be 0 with --decoder-positions absolute, got .*"),
    ("layerwise", {"mem_len": 6}, "--mem-len must be 0 with --decoder-positions layerwise, got .*"),
    ("shaw_biased", {"clamp_len": -1}, "--clamp-len must be at least 1 with --decoder-positions shaw_biased.*"),
    ("relative", {"decoder_attention_heads": 3},
     "--decoder-embed-dim must be divisible by --decoder-attention-heads, got 16 and 3"),
    ("delta", {"attention_normalization": True, "decoder_update_rule": "rwkv7"},
     "--attention-normalization must be left out for the update rule rwkv7, where it is not defined: .*"),
    ("delta", {"attention_normalization": True, "decoder_update_rule": "kda"},
     ".* it erases and forgets, so only its output can be normalised"),
    ("delta", {"decoder_feature_map": "tanh"}, ".*features must not be negative for sum and attention normalisation.*"),
    ("relative", {"div_val": 0, "adaptive_softmax_cutoff": "10"}, "--div-val must be at least 1, got 0"),
    ("relative", {"div_val": 17, "adaptive_softmax_cutoff": "10"},
     "--decoder-embed-dim must be at least 17, which is --div-val to the power of the number of cutoffs, got 16"),
]  # fmt: skip


@looped(("kind", "flags", "sentence"), REFUSED)
def test_flags_that_cannot_be_are_refused(kind, flags, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$") as error:
        build(kind, **flags)
    assert "\n" not in str(error.value)


@looped("arch", ["fwp_lm", "fwp_xl_lm", "fwp_fwl_lm"])
def test_a_smaller_output_dictionary_is_refused(arch):
    task = Namespace(source_dictionary=make_dictionary(50), target_dictionary=make_dictionary(30))
    with pytest.raises(ValueError, match=r"--output-dictionary-size must be left out .* got 30"):
        ARCH_MODEL_REGISTRY[arch].build_model(configure(arch, **SMALL), task)
