"""Combinations of the tables are built, trained, resumed and decoded, or refused with one sentence."""

from argparse import Namespace
from functools import partial

import pytest
import torch
from pairwise import looped, pairwise
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
TABLES = {"rule": UPDATE_RULES, "feature_map": FEATURE_MAPS, "normalization": NORMALIZATIONS}


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


def build(rule, feature_map, normalization):
    flags = {"decoder_update_rule": rule, "decoder_feature_map": feature_map, "dropout": 0.0}
    config = configure("fwp_lm", **{**SMALL, "decoder_layers": 1}, **NORMALIZATIONS[normalization], **flags)
    return FwpLanguageModel.build_model(config, Namespace(target_dictionary=make_dictionary(20)))


@looped("case", pairwise(lambda case: refusal_of(**case), **TABLES))
def test_it_is_refused(case):
    with pytest.raises(ValueError, match=refusal_of(**case)):
        build(**case)


@looped("case", pairwise(lambda case: not refusal_of(**case), **TABLES))
def test_it_trains_resumes_and_decodes(case):
    """Every pair of values of two tables."""
    batches = torch.randint(4, 20, (4, 2, 9))
    model = check_resumed(partial(build, **case), batches, carry=False)
    torch.testing.assert_close(by_steps(model, batches[0]), log_probs(model, batches[0]), rtol=1e-4, atol=1e-4)
