"""Nightly tests use the tables and helpers of the other tests, and one thread."""

import sys
from pathlib import Path

from support.operator_fixtures import one_thread  # noqa: F401

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("nightly", "ops", "kernels", "emulator", "recipes")]
