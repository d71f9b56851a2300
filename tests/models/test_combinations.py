"""Every combination of the tables is built, trained, resumed and decoded, or refused with one sentence."""

import itertools
from argparse import Namespace

import pytest
import torch
from pairwise import looped
from small_models import SMALL, by_steps, check_resumed, configure, log_probs, make_dictionary

from fairseq_fwp.models.fwp_lm import FwpLanguageModel
from fairseq_fwp.modules.feature_maps import FEATURE_MAPS
from fairseq_fwp.modules.update_rules import UPDATE_RULES

NORMALIZATIONS = {
    "neither": {},
    "sum": {"sum_normalization": True},
    "attention": {"attention_normalization": True},
    "both": {"sum_normalization": True, "attention_normalization": True},
    "output": {"attention_normalization": True, "attention_normalization_read_out_only": True},
}
COMBINATIONS = [
    kind
    for kind in itertools.product(UPDATE_RULES, FEATURE_MAPS, NORMALIZATIONS)
    if kind[0] in ("sum", "gated", "decay", "delta", "fwm") or kind[1] in ("dpfp", "identity")
]


def refusal_of(rule, feature_map, normalization):
    """Return the error of a combination, or None."""
    attention = normalization in ("attention", "both", "output")
    if attention and not UPDATE_RULES[rule].normalizes:
        return f"--attention-normalization must be left out for the update rule {rule}, where it is not defined"
    if attention and UPDATE_RULES[rule].normalizer and normalization != "output":
        return "it erases and forgets, so only its output can be normalised"
    if normalization != "neither" and not FEATURE_MAPS[feature_map].positive:
        return "features must not be negative for sum and attention normalisation"
    return None


@looped(("rule", "feature_map", "normalization"), COMBINATIONS)
def test_it_trains_resumes_and_decodes_or_is_refused(rule, feature_map, normalization):
    def build():
        flags = {"decoder_update_rule": rule, "decoder_feature_map": feature_map, "dropout": 0.0}
        config = configure("fwp_lm", **{**SMALL, "decoder_layers": 1}, **NORMALIZATIONS[normalization], **flags)
        return FwpLanguageModel.build_model(config, Namespace(target_dictionary=make_dictionary(20)))

    refusal = refusal_of(rule, feature_map, normalization)
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            build()
        return
    batches = torch.randint(4, 20, (4, 2, 9))
    model = check_resumed(build, batches, carry=False)
    torch.testing.assert_close(by_steps(model, batches[0]), log_probs(model, batches[0]), rtol=1e-4, atol=1e-4)
