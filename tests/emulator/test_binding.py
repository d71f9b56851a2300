"""Operators and autograd of CUDA tensors in C++: bindings/cuda*.cpp, for CPU tensors over the emulator."""

import os
import sys

import pytest
from support.isolated import run_isolated


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_results_and_gradients_are_those_of_the_reference(every):
    run_isolated(f"import cuda_binding; cuda_binding.check_all({every})", PYTHONPATH=os.pathsep.join(sys.path))


def test_maps_around_a_rule():
    run_isolated("import map_binding; map_binding.check_all()", PYTHONPATH=os.pathsep.join(sys.path))


def test_the_recurrent_delta_rule():
    run_isolated("import cuda_binding; cuda_binding.check_recurrent_delta()", PYTHONPATH=os.pathsep.join(sys.path))
