"""Shared by the tests of faults: the table of rules, helpers of the commands' tests, and the search effort."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_server import Commands
from hypothesis import HealthCheck, Phase, settings

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "ops"), str(TESTS / "kernels")]

# CI uses a few inputs, always the same ones; FWP_FUZZ_EXAMPLES=5000 searches for new ones.
EXAMPLES = os.environ.get("FWP_FUZZ_EXAMPLES")
settings.register_profile(
    "faults",
    max_examples=int(EXAMPLES or 25),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("faults")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, as for the operators: the reference has thousands of tiny operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """fairseq's commands, ready to start."""
    server = Commands()
    yield server
    server.close()
