"""Shared fixtures of the tests of operators: one thread, and memory in which nothing is zero by chance."""

import os
from collections.abc import Iterator

import pytest
import torch

# On a GPU, cuBLAS refuses to run under poisoned_memory's deterministic algorithms without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The reference is thousands of tiny operations: on a busy machine its threads wait for each other for minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns, in C++ too, with NaN: whoever reads it before writing it is found out."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(before)
