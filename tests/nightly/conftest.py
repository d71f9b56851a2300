"""Nightly tests use the tables and helpers of the other tests."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("ops", "kernels", "emulator", "recipes")]
