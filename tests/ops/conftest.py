"""Fixtures of the operators' tests; those of a GPU are only collected with a GPU."""

import torch
from support.operator_fixtures import one_thread, poisoned_memory  # noqa: F401

collect_ignore = [] if torch.cuda.is_available() else ["test_cuda.py"]
