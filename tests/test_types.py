"""The seams of the package have types: untyped values, and guesses about what they have, may only become fewer."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fairseq_fwp"
# Of the package without patches of fairseq's objects and without commands. Lower them with the lines; never raise them.
MOST_ANY, MOST_GUESSES = 140, 12
GUESS = re.compile(r"hasattr\(|getattr\([^)]*, [^)]*, |signature\(")


def lines():
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.relative_to(PACKAGE).parts[0] not in ("cli", "patches"):
            yield from file.read_text(encoding="utf-8").splitlines()


def test_values_without_a_type_become_fewer():
    assert 0 < sum(bool(re.search(r"\bAny\b", line)) for line in lines()) <= MOST_ANY


def test_guesses_about_attributes_become_fewer():
    assert 0 < sum(bool(GUESS.search(line)) for line in lines()) <= MOST_GUESSES
