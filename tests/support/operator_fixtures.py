"""Shared fixtures of the tests of operators: one thread, and memory without accidental zeros."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# On a GPU, cuBLAS refuses to run under poisoned_memory's deterministic algorithms without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: the reference has thousands of tiny operations, whose threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on_one_and_three_threads(call: Callable[[], Any]) -> list[Any]:
    """Return the results of two calls, for tests that have `one_thread`."""
    results = [call()]
    torch.set_num_threads(3)
    try:
        return [*results, call()]
    finally:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill the memory of torch.empty with NaN, in C++ too, so that reads before a write are found."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(before)
