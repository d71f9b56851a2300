"""What every test shares: random numbers from one seed, and a reason for each skipped GPU test."""

import os
import random

import numpy as np
import pytest
import torch

# The laws hold for any inputs: FWP_TEST_SEED=$RANDOM bash tests/run.sh tries others.
SEED = int(os.environ.get("FWP_TEST_SEED", "0"))


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def pytest_report_header():
    return f"FWP_TEST_SEED={SEED}"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)
