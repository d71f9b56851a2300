"""Laws of models that check the options of their weights."""

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY
from support.pairwise import looped
from support.small_models import (
    SMALL,
    SMALL_TRANSLATION,
    build_model,
    build_translation,
    configure,
    random_tokens,
)

from fairseq_fwp.models.fast_weight_layer.model import FwpFwlLanguageModel
from fairseq_fwp.models.fwp_lm import FwpLanguageModel
from fairseq_fwp.models.fwp_transformer import FwpTransformerModel
from fairseq_fwp.models.fwp_xl_lm import FwpXlLanguageModel
from fairseq_fwp.patches.hooks import Saved
from fairseq_fwp.patches.options import plain

FAVOR = {"decoder_feature_map": "favor", "decoder_update_rule": "sum", "attention_normalization": True}
SOFTMAX = {"decoder_update_rule": "softmax"}
# Models that can load each other's weights: the options of the one in training, and those of the other.
LANGUAGE_MODELS = {
    "map": ({}, {"decoder_feature_map": "tanh"}),
    "size of a map": ({"decoder_feature_map": "dpfp"}, {"dpfp_nu": 2}),
    "draw": (FAVOR, {"favor_draw": "gaussian"}),
    "redraw": (FAVOR, {"favor_redraw": 0}),
    "ReLU of the same vectors": ({**FAVOR, "favor_features": 8}, {"favor_relu": True}),
    "rule": ({"decoder_update_rule": "delta"}, {"decoder_update_rule": "fwm"}),
    "sum normalisation": ({}, {"sum_normalization": True}),
    "attention normalisation": ({}, {"attention_normalization": True}),
    "output only": ({"attention_normalization": True}, {"attention_normalization_read_out_only": True}),
    "epsilon": ({"sum_normalization": True}, {"normalization_epsilon": 30.0}),
    "epsilon without a normalisation": ({}, {"normalization_epsilon": 30.0}),
    "scale": ({}, {"scale_read_out": True}),
    "scale of queries": ({}, {"scale_queries": True}),
    "epsilon of lengths": ({"l2_normalization": True}, {"l2_normalization_epsilon": 0.5}),
    "epsilon of norms": ({}, {"norm_epsilon": 0.5}),
    "function of a gate": ({"output_gate": "silu"}, {"output_gate": "sigmoid"}),
    "bound of a decay": ({"decoder_update_rule": "gated_delta"}, {"decay_lower_bound": -1.0}),
    "heads of values": (
        {"decoder_value_heads": 4, "decoder_value_dim": 4},
        {"decoder_attention_heads": 2, "decoder_key_dim": 8},
    ),
    "heads": ({"decoder_update_rule": "sum"}, {"decoder_attention_heads": 2}),
    "post-norm": ({"no_decoder_final_norm": True}, {"decoder_normalize_before": True}),
    "input of srwm": ({"decoder_update_rule": "srwm"}, {"srwm_softmax_input": True}),
    "initial rates": ({"decoder_update_rule": "srwm"}, {"srwm_rate_mean": 0.0, "srwm_query_scale": 0.01}),
    "positions": ({}, {"no_token_positional_embeddings": True}),
    "positions from the end": ({}, {"positions_from_end": True}),
    "activation": ({}, {"activation_fn": "gelu"}),
    "embeddings": ({}, {"no_scale_embedding": True}),
    "window": (SOFTMAX, {"attention_window": 2}),
    "heads of softmax": (SOFTMAX, {"attention_softmax_heads": 2}),
    "rotation": (SOFTMAX, {"attention_rope_theta": 100.0}),
    "scaled rotation": (
        {**SOFTMAX, "attention_rope_theta": 100.0},
        {"attention_rope_scaling": "8,1,4,16"},
    ),
    "softmax in a layer": ({"decoder_update_rule": "sum"}, {"softmax_layers": "1"}),
    "window of a layer": ({"softmax_layers": "1"}, {"attention_window": 2}),
    "noise of a layer": ({"softmax_layers": "1"}, {"attention_dropout": 0.5}),
    "a map that no layer has": ({"softmax_layers": "0,1"}, {"decoder_feature_map": "tanh"}),
    "another map's size": ({}, {"dpfp_nu": 3, "favor_features": 9}),
    "a map without attention to it": (SOFTMAX, {"decoder_feature_map": "tanh"}),
    "noise": ({}, {"dropout": 0.5, "activation_dropout": 0.5, "final_dropout": 0.5, "adaptive_softmax_dropout": 0.1}),
    "noise of softmax": (SOFTMAX, {"attention_dropout": 0.5}),
    "sizes of samples": ({}, {"tokens_per_sample": 64, "max_target_positions": 99}),
    "backend": ({"fwp_backend": "reference"}, {"fwp_backend": "auto"}),
    "nothing": ({}, {}),
}
ALL_SOFTMAX = {**SOFTMAX, "encoder_feature_map": "softmax", "cross_feature_map": "softmax"}
TRANSLATIONS = {
    "map of the encoder": ({}, {"encoder_feature_map": "dpfp"}),
    "map to the source": ({}, {"cross_feature_map": "dpfp"}),
    "map of the decoder": ({}, {"decoder_feature_map": "dpfp"}),
    "size of a map": ({"cross_feature_map": "dpfp"}, {"dpfp_nu": 2}),
    "rule": ({"decoder_update_rule": "delta"}, {"decoder_update_rule": "fwm"}),
    "sum normalisation": ({}, {"sum_normalization": True}),
    "attention normalisation": ({}, {"attention_normalization": True}),
    "epsilon": ({}, {"normalization_epsilon": 30.0}),
    "heads": ({"decoder_update_rule": "sum"}, {"encoder_attention_heads": 2, "decoder_attention_heads": 2}),
    "post-norm": ({"no_decoder_final_norm": True}, {"decoder_normalize_before": True}),
    "positions": ({}, {"no_token_positional_embeddings": True}),
    "activation": ({}, {"activation_fn": "gelu"}),
    "embeddings": ({}, {"no_scale_embedding": True}),
    "another map's size": ({}, {"dpfp_nu": 3, "favor_features": 9}),
    "maps of softmax": (ALL_SOFTMAX, {"decoder_feature_map": "tanh", "sum_normalization": True}),
    "noise": ({}, {"dropout": 0.5, "activation_dropout": 0.5, "relu_dropout": 0.5, "encoder_layerdrop": 0.5}),
    "noise of softmax": (ALL_SOFTMAX, {"attention_dropout": 0.5}),
    "sizes and memory": ({}, {"max_source_positions": 99, "checkpoint_activations": True}),
    "nothing": ({}, {}),
}


def options_of(arch, **flags):
    """Return the options as in a checkpoint, or of a command line for translations."""
    if arch in ("fwp_transformer", "transformer"):
        return {**SMALL_TRANSLATION, "share_all_embeddings": True, "arch": arch, **flags}
    return plain(configure(arch, **{**SMALL, **flags}))


@looped("case", LANGUAGE_MODELS | {f"translation: {case}": pair for case, pair in TRANSLATIONS.items()})
def test_options_are_named_where_weights_compute_something_else(case):
    """It names all differing options that change scores, and no others."""
    translates = case.startswith("translation")
    trained, others = TRANSLATIONS[case.removeprefix("translation: ")] if translates else LANGUAGE_MODELS[case]
    given, tokens = (trained, {**trained, **others}), random_tokens(2, 9)
    if translates:
        kind, arch, models = FwpTransformerModel, "fwp_transformer", [build_translation(**flags) for flags in given]
    else:
        kind, arch, models = FwpLanguageModel, "fwp_lm", [build_model("fwp_lm", **flags) for flags in given]
    models[1].load_state_dict(models[0].state_dict())
    before, after = (options_of(arch, **flags) for flags in given)
    found = kind.differences(before, after)
    if case == "draw":  # what is drawn next: these weights have been
        assert found == {"favor_draw": ("orthogonal", "gaussian")}
        return
    assert found.keys() == (others.keys() if found else set())
    assert translates or found == {name: (before[name], after[name]) for name in found}
    inputs = (tokens, None, tokens) if translates else (tokens,)
    scores = [model.get_normalized_probs(model(*inputs), log_probs=True) for model in models]
    assert bool(found) == (not torch.allclose(*scores))


def test_a_checkpoint_of_fairseqs_own_transformer_has_softmax_attention():
    saved = options_of("transformer")
    assert FwpTransformerModel.differences(saved, options_of("fwp_transformer", **ALL_SOFTMAX)) == {}
    given = options_of("fwp_transformer", **{**ALL_SOFTMAX, "encoder_feature_map": "elu"})
    assert FwpTransformerModel.differences(saved, given) == {"encoder_feature_map": ("softmax", "elu")}


@looped("arch", ["fwp_lm", "fwp_xl_lm", "fwp_fwl_lm"])
def test_an_earlier_version_had_the_defaults(arch):
    models = (FwpLanguageModel, FwpXlLanguageModel, FwpFwlLanguageModel)
    model = next(model for model in models if model.config is MODEL_DATACLASS_REGISTRY[arch])
    given = plain(configure(arch, **SMALL))
    saved = {name: given[name] for name in (*SMALL, "_name") if name in given}
    assert model.differences(saved, given) == {}
    assert model.differences(saved, {**given, "no_scale_embedding": True}) == {"no_scale_embedding": (False, True)}


def test_what_a_new_layer_is_was_not_trained_otherwise():
    """Only options of a base model can differ, and the base must be of its own name."""
    saved = {**plain(configure("fwp_lm", **SMALL)), "_name": "fwp_lm"}
    layer = {"fwl_hidden_dim": 40, "fwl_gradients_at": "carried"}
    given = plain(configure("fwp_fwl_lm", **SMALL, **layer, decoder_feature_map="tanh"))
    assert FwpFwlLanguageModel.differences(saved, given) == {"decoder_feature_map": ("elu", "tanh")}
    given["_name"] = "fwp_fwl_lm"
    found = FwpFwlLanguageModel.differences(given, {**given, "fwl_gradients_at": "trained"})
    assert found == {"fwl_gradients_at": ("carried", "trained")}
    for base, other in (("fwp_lm", "fwp_xl_lm"), ("fwp_xl_lm", "fwp_lm")):
        saved = {**plain(configure(base, **SMALL)), "_name": base}
        for flags, expected in (
            ({"fwl_base": base}, {}),
            ({"fwl_base": other}, {"fwl_base": (base, other)}),
            ({"fwl_base": base, "decoder_layers": 3}, {"decoder_layers": (2, 3)}),
        ):
            given = plain(configure("fwp_fwl_lm", **{**SMALL, **flags}))
            assert FwpFwlLanguageModel.differences(saved, given) == expected


def test_a_model_says_which_options_its_weights_go_with(caplog):
    """It names them if weights cannot be loaded, or compute another function; requested options are not named."""
    weights = build_model("fwp_lm").state_dict()
    weights.saved = Saved("some.pt", plain(configure("fwp_lm", **SMALL)), overridden=False)
    given = {**SMALL, "decoder_feature_map": "tanh", "dropout": 0.5}
    other = build_model("fwp_lm", **given)
    other.load_state_dict(weights, model_cfg=configure("fwp_lm", **given))
    assert [record.getMessage() for record in caplog.records if record.name.endswith("language_model")] == [
        "some.pt was trained with --decoder-feature-map elu, but is loaded with --decoder-feature-map tanh: its "
        "weights now compute another function; if you do not want this, give the flags of its training"
    ]
    caplog.clear()
    weights.saved = weights.saved._replace(overridden=True)
    other.load_state_dict(weights, model_cfg=configure("fwp_lm", **given))
    assert not caplog.records
    for flags, saved, asked in (
        ({"decoder_layers": 3}, "--decoder-layers 2", "--decoder-layers 3"),
        ({"softmax_layers": "1"}, "no --softmax-layers", "--softmax-layers 1"),
    ):
        given = {**SMALL, **flags}
        for overridden, whose in ((False, "this model has"), (True, "--model-overrides asks for")):
            weights.saved = weights.saved._replace(overridden=overridden)
            sentence = f"^some.pt holds a model with {saved}, but {whose} {asked}, which its weights do not fit"
            with pytest.raises(ValueError, match=sentence):
                build_model("fwp_lm", **given).load_state_dict(weights, model_cfg=configure("fwp_lm", **given))
    del weights.saved
    with pytest.raises(RuntimeError, match="loading state_dict"):
        build_model("fwp_lm", **given).load_state_dict(weights, model_cfg=configure("fwp_lm", **given))
