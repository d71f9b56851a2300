"""Every option is described once: docs/flags.md, and errors, with arguments in modules and flags in models."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
from fairseq.models import MODEL_REGISTRY
from pairwise import looped

from fairseq_fwp.cli import flags
from fairseq_fwp.models.attention_options import flag, is_of_attention, naming_flags

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
    assert of["attention_window"] == {"local"}
    assert of["attention_dropout"] == {"softmax", "local", "relative"}
    assert of["feature_map"] == {"fast_weight"}
    assert of["attention_bias"] == {"fast_weight", "softmax", "local", "linear"}
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
