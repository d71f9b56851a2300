"""Shared parts of every test: random numbers from one seed, and a reason for each skipped GPU test."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils._python_dispatch import TorchDispatchMode

try:
    # Before any test imports fairseq, so that its import prints nothing.
    from fairseq_fwp.patches.messages import silence_known_warnings
except ModuleNotFoundError:  # the tests of what needs only torch also run without fairseq

    def silence_known_warnings():
        pass


# A failed assert of a helper shows its values, too. A package's name stands for all its modules.
pytest.register_assert_rewrite(
    *(
        path.parent.name if path.stem == "__init__" or path.parent.name == "support" else path.stem
        for path in Path(__file__).parent.rglob("*.py")
        if not path.name.startswith(("test_", "conftest"))
    )
)
from support.subjects import SEED  # noqa: E402

# As in tests/run.sh: some tests fork, and a child would wait forever for threads of its parent.
torch.set_num_threads(1)

# Every run tries a few inputs, always the same ones; `--hypothesis-profile=night` looks for others.
ALWAYS = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None, "print_blob": True}
settings.register_profile("fast", max_examples=8, derandomize=True, **ALWAYS)
settings.register_profile("night", max_examples=300, **ALWAYS)
settings.load_profile("fast")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    silence_known_warnings()  # pytest has its own filters for every test, and fixtures of a module warn, too


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor that any operator returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return result


@pytest.fixture
def largest_tensor():
    """The context manager above."""
    return LargestTensor


def pytest_report_header():
    return f"FWP_TEST_SEED={SEED}"


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report):
    """Say what a process of pytest-xdist died of: a fault in its own code prints a fatal error."""
    report.longrepr += (
        "; without a fatal error above, a signal from outside ended it: SIGKILL for lack of memory (see dmesg, and use "
        "--numprocesses 1), or an alarm that an earlier test left"
    )


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)
