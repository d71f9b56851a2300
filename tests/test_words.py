"""Private words, and docstrings that begin with "What", do not come back."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("fairseq_fwp", "recipes", "tests")
FILES = sorted(path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

# Words with only one meaning here, and what to write instead.
PRIVATE = {
    r"learnt": "learned",
    r"anew": "again",
    r"misfits?": "incompatible",
    r"mend(s|ed|ing)?": "patch or fix",
    r"twins?": "emulator or copy",
}

# Files that may have what this test forbids, with the reason.
EXCEPTIONS = {"tests/test_words.py": "it names the words", "tests/test_readme.py": "it names them too"}


def checked(folder):
    return [file for file in FILES if file.startswith(f"{folder}/") and not file.startswith(tuple(EXCEPTIONS))]


def docstrings(tree):
    """Yield (line, text) of every docstring of a module."""
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def begins_with_what(source):
    """Return the lines of docstrings that begin with What."""
    return [line for line, text in docstrings(ast.parse(source)) if re.match(r"What\b", text)]


def private_words(source):
    """Return (line, word, replacement) of every private word in code, comments and strings."""
    return [
        (number, found[0], instead)
        for number, line in enumerate(source.splitlines(), 1)
        for word, instead in PRIVATE.items()
        for found in re.finditer(rf"\b{word}\b", line, re.IGNORECASE)
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    """Such as "Return ...", "Compute ..." or "The state of ...", not "What ..."."""
    assert checked(folder)
    assert [f"{file}:{line}" for file in checked(folder) for line in begins_with_what(read(file))] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_words_are_those_of_the_field(folder):
    found = [
        f"{file}:{line}: {word}, write {instead}"
        for file in checked(folder)
        for line, word, instead in private_words(read(file))
    ]
    assert found == []


def test_exceptions_are_of_files_that_exist():
    assert [name for name in EXCEPTIONS if not (ROOT / name).exists()] == []


def test_findings():
    """The look finds what it is for, and only whole words."""
    assert begins_with_what('"""What it is."""\n\n\ndef f():\n    """What it does."""\n') == [1, 5]
    assert begins_with_what('"""Whatever."""\n\n\ndef f():\n    """Return what it does."""\n') == []
    assert private_words("x = 1  # Learnt anew\n") == [(1, "Learnt", "learned"), (1, "anew", "again")]
    assert private_words("recommended, twined, MISFITS_OF") == []


def read(file):
    return (ROOT / file).read_text(encoding="utf-8")
