"""The table of patches is what is patched, and each has a test and a reason."""

import sys
from pathlib import Path

import fairseq.models
import pytest

from fairseq_fwp import patches
from fairseq_fwp.patches import PATCHES

ROOT = Path(__file__).parents[2]
REPLACED = [entry for entry in PATCHES if "fairseq." in entry.symbol and "*" not in entry.symbol]


@pytest.mark.parametrize("entry", PATCHES, ids=lambda entry: entry.symbol)
def test_an_entry_has_a_reason_and_a_test_that_is_there(entry):
    file, _, name = entry.test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
    assert entry.reason.endswith(".") and entry.since


def patched():
    """Everything in fairseq's modules and their classes that a patch has replaced: its patches by its symbol."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] not in ("fairseq", "fairseq_cli") or module is None:
            continue
        owners = [module]
        for owner in owners:
            for name, value in list(vars(owner).items()):
                if names := getattr(getattr(value, "__func__", value), "patches", ()):
                    found[id(owner), name] = names
                if isinstance(value, type) and value.__module__ == module_name and value not in owners:
                    owners.append(value)
    return found


def test_the_table_is_what_is_patched():
    """A function that another module has imported under its name is found there as well."""
    expected = {}
    for entry in REPLACED:
        owner, name = patches.find(entry.symbol)
        expected[id(owner), name] = (*expected.get((id(owner), name), ()), entry.patch.__name__)
    found = patched()
    assert expected.items() <= found.items()
    assert set(found.values()) <= set(expected.values())
    assert fairseq.models.transformer_lm.eval is patches.configuration.evaluate


def test_a_second_call_changes_nothing():
    before = patched()
    assert before
    patches.apply()
    assert patched() == before


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "fairseq_on_current_python.md").read_text(encoding="utf-8")
    assert patches.table() in page, "python -m fairseq_fwp.patches prints what belongs there"
