"""Helpers and the table of rules from the tests of the operators."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
