"""The paths of docs/architecture.md, held against the code: every function, and the words in it that lead on."""

import ast
import re
from pathlib import Path

import pytest
from support.subjects import sample_inputs

from fairseq_fwp.modules.update_rules import UPDATE_RULES
from fairseq_fwp.ops import fast_weights

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Five paths through the code")[2].partition("\n## ")[0]
LINE = re.compile(r"^(\d+)\. `([\w/.]+):([\w.]+)` .*: `([^`]+)`$", re.MULTILINE)
LINES = LINE.findall(SECTION)


def source_of(path, name):
    """Return the text of a function of this name, with its decorators; of C++, from its name to the next one's end."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if not path.endswith(".py"):
        bodies = re.findall(rf"^[^\n]*\b{name}\(.*?^ ?}}|^  [^\n]*\b{name}\(.*?^  }}", text, re.MULTILINE | re.DOTALL)
        return "\n".join(bodies)
    node = ast.parse(text)
    for part in name.split("."):
        node = next(x for x in node.body if getattr(x, "name", None) == part)
    first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


@pytest.mark.parametrize("number, path, name, words", LINES, ids=lambda x: x if x.isdigit() else "")
def test_a_path_leads_on(number, path, name, words):
    source = " ".join(source_of(path, name).split())
    assert source and words.strip() in source, f"line {number}: {path}:{name} must contain {words!r}"


def test_paths_are_whole():
    """Lines are numbered, and none is left out by the expression that reads them."""
    assert len(LINES) == len(re.findall(r"^\d+\. ", SECTION, re.MULTILINE)) == 53
    numbers = [int(number) for number, *_ in LINES]
    assert numbers == [*range(1, 14), *range(1, 15), *range(1, 9), *range(1, 11), *range(1, 9)]


def test_the_names_of_a_rule_on_each_floor(monkeypatch):
    """The table of the page, from the tensors with which each rule calls the operator."""
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| ([^|]*) \| ([^|]*) \|$", PAGE, re.MULTILINE)
    kinds = set(
        re.search(r"enum class Rule \{(.*?)\}", (ROOT / "cuda_ext/rule.h").read_text())[1].replace(",", "").split()
    )
    found, calls, forward = [], [], fast_weights._forward
    monkeypatch.setattr(fast_weights, "_forward", lambda *given: calls.append(given) or forward(*given))
    for name, rule in UPDATE_RULES.items():
        calls.clear()
        rule.operation(**sample_inputs(rule.operation.name.removesuffix("_rule"), (1, 1, 3, 4, 4)))
        optional = zip(fast_weights.OPTIONAL, calls[0][3:8], strict=True) if calls else ()
        terms = [term for term, x in optional if x is not None] + ["erases"] * bool(calls and calls[0][10])
        found.append((name, rule.operation.name, ", ".join(terms) or ("none" if calls else "not of this family")))
    assert found == [row[:3] for row in rows]
    assert {kind for *_, words in rows for kind in re.findall(r"\w+", words)} >= kinds
