"""The table of patches is complete, and each patch has a test and a reason."""

import inspect
import subprocess
import sys
from pathlib import Path

from pairwise import looped

from fairseq_fwp import patches
from fairseq_fwp.patches import PATCHES

ROOT = Path(__file__).parents[2]


@looped("entry", PATCHES)
def test_an_entry_has_a_reason_and_a_test_that_is_there(entry):
    file, _, name = entry.test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
    assert entry.reason.endswith(".") and entry.since


def attributes():
    """Return all attributes of fairseq's modules and their classes by full name, without modules."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] in ("fairseq", "fairseq_cli") and module.__name__ == module_name:
            owners = [(module_name, module)]
            for path, owner in owners:
                for name, value in list(vars(owner).items()):
                    if inspect.isclass(value) and value.__module__ == module_name:
                        owners += [(f"{path}.{name}", value)] * (value not in dict(owners).values())
                    if not inspect.ismodule(value):
                        found[f"{path}.{name}"] = value
    return found


def full_name(symbol):
    owner, name = patches.find(symbol)
    return (
        ".".join([owner.__name__] if inspect.ismodule(owner) else [owner.__module__, owner.__qualname__]) + f".{name}"
    )


def test_the_table_is_what_is_patched():
    """In fairseq's modules, the package replaces only the symbols of the table."""
    code = f"""
import inspect, sys
import fairseq_cli.train, fairseq_cli.eval_lm, fairseq
{inspect.getsource(attributes)}
before = attributes()
owners = before.keys() | sys.modules.keys()
import fairseq_fwp
for name, value in attributes().items():
    if before.get(name, before) is not value and name.rpartition(".")[0] in owners:
        print(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("fairseq")]
    evaluated = {name for name in found if name.endswith(".eval")}
    assert {"fairseq.utils.eval", "fairseq.models.transformer_lm.eval"} <= evaluated
    symbols = [entry.symbol for entry in PATCHES if entry.symbol.startswith("fairseq.") and "*" not in entry.symbol]
    assert set(found) - evaluated == set(map(full_name, symbols))


def test_a_second_call_changes_nothing():
    import fairseq_cli.train  # noqa: F401

    patches.apply()  # of modules that other tests have imported since the first call
    before = attributes()
    patches.apply()
    after = attributes()
    assert len(before) > 1000 and after.keys() == before.keys()
    assert all(after[name] is value for name, value in before.items())


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "fairseq_on_current_python.md").read_text(encoding="utf-8")
    assert patches.table() in page, "python -m fairseq_fwp.patches prints what belongs there"
