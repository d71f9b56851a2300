"""Losses of every architecture and option, built small from one seed, are those stored in scores.json.

    python tests/nightly/test_scores.py        writes them again, if a change is intended

Bits differ between processors; `compare_installations.py` compares those of two installations on one.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
from compare_installations import dictionary, scores

STORED = Path(__file__).with_name("scores.json")


def losses(folder):
    """Return the loss by case, None if it is refused."""
    for part in ("dict.txt", "dict.en.txt", "dict.de.txt"):
        dictionary(folder, part)
    return {name: float.fromhex(case["loss"]) if "loss" in case else None for name, case in scores(folder).items()}


@pytest.mark.slow
def test_losses_are_those_stored(tmp_path):
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    found = losses(tmp_path)
    assert found.keys() == stored.keys()
    assert {name for name, loss in found.items() if loss is None} == {name for name in stored if stored[name] is None}
    given = {name: loss for name, loss in stored.items() if loss is not None}
    assert {name: found[name] for name in given} == pytest.approx(given, rel=1e-5)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        STORED.write_text(json.dumps(losses(Path(name)), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {STORED}", file=sys.stderr)
