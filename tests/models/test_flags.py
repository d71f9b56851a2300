"""Every option is described once: the page of flags, and errors that name arguments below models and flags above."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
from fairseq.models import MODEL_DATACLASS_REGISTRY
from pairwise import looped

from fairseq_fwp.models import flags
from fairseq_fwp.models.attention_options import flag, naming_flags, parts

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_fields():
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == flags.page(), "python -m fairseq_fwp.models.flags > docs/flags.md"


def test_every_option_stands_once_on_the_page():
    listed = re.findall(r"^\| `(--[a-z0-9-]+)`", flags.page(), re.MULTILINE)
    for model in ("fwp_lm", "fwp_xl_lm", "fwp_fwl_lm", "fwp_associative_retrieval"):
        options = fields(MODEL_DATACLASS_REGISTRY[model])
        assert {flag(option.name) for option in options if "help" in option.metadata} <= set(listed)
    assert len(listed) == len(set(listed)), "two classes have an option of one name"


def raised(path):
    """The words of every exception that a file raises."""
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
    names = {"num_features": "favor_features"}
    with pytest.raises(ValueError, match=r"^--favor-features must be at least 1; `plain` stays$"), naming_flags(names):
        raise ValueError("`num_features` must be at least 1; `plain` stays")


@looped("options", flags.GROUPS.values())
def test_options_of_attention_say_whose_they_are(options):
    known = {
        "all",
        "attention",
        "linear",
        "sum_normalization",
        "attention_normalization",
        "division",
        "fast_weight_layer",
    }
    known |= {"dpfp", "favor", "relu"}
    for option in fields(options):
        assert set(parts(option)) <= known, option.name
