"""The backend fla with flash-linear-attention's own kernels, in Triton's interpreter on the CPU."""

import os
import sys
from importlib.util import find_spec

import pytest
from support.isolated import run_isolated
from support.subjects import IN_FLA

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (find_spec("triton") and find_spec("fla")), reason="needs triton and fla-core"),
]


@pytest.mark.parametrize("rule", IN_FLA)
def test_results_and_gradients_are_those_of_the_reference(rule):
    script = f"import fla_kernels; fla_kernels.prepare(); fla_kernels.check({rule!r})"
    run_isolated(script, PYTHONPATH=os.pathsep.join(sys.path), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
