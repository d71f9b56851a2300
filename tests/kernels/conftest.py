"""These tests use the helpers and the table of rules of those of the operators."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
