"""Table of rules and inputs, shared with the tests of the operators."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

from emulator import Emulator, build


@pytest.fixture(scope="session")
def emulator():
    return Emulator(build())


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, as for the operators: the reference has thousands of tiny operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
