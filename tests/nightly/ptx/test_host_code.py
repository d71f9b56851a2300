"""nvcc's host code launches its PTX with the right arguments: results have the bits of another compiler's launches."""

import pytest
import torch
from host_code import HostCode, compile_host_code
from interpreter import Interpreter, translate
from nvcc import compiled_kernels, needs_nvcc
from operator_cases import CASES, cotangents_of, make_case
from test_kernels import HOPPER
from test_maps import make_case as make_map
from test_maps import run_all, sample
from test_ptx import RECURRENT, launch_all
from test_recurrent_delta import run as run_recurrent
from test_recurrent_delta import sample as sample_recurrent
from test_recurrent_kernel import use_kernel

pytestmark = needs_nvcc


@pytest.fixture(scope="module")
def interpreter():
    return Interpreter(translate(compiled_kernels("90a").ptx))


@pytest.fixture(scope="module")
def host_code(interpreter):
    return HostCode(compile_host_code(), interpreter)


def test_every_kernel_is_registered_and_launched(host_code, interpreter):
    assert host_code.kernels() == launch_all(interpreter, host_code).keys() == interpreter.kernels.keys()


# Scans with kept states, chunks, and segments in bfloat16.
CASES_BY_TYPE = {
    torch.float64: [(1, 2, 35, 9, 12)],
    torch.float32: [(1, 2, 35, 9, 12), (1, 1, 70, 16, 24)],
    torch.bfloat16: [(1, 1, 70, 16, 24), (1, 1, 2060, 16, 16)],
}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("rule", CASES)
def test_launches_give_the_bits_of_other_launches(host_code, interpreter, rule, documents):
    """Of the same PTX, in host code that nvcc has not rewritten."""
    for dtype, shapes in CASES_BY_TYPE.items():
        for shape in shapes:
            given, erases = make_case(rule, shape, dtype)
            if documents:
                given["first"] = torch.rand(shape[0], shape[2]) < 0.1
            gradients = cotangents_of(given)
            found = host_code.results(given, erases, gradients, shared_kib=HOPPER)
            for name, x in interpreter.results(given, erases, gradients, shared_kib=HOPPER).items():
                assert torch.equal(found[name], x), (name, shape, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_launches_of_the_recurrent_delta_rule(host_code, interpreter, monkeypatch, dtype):
    for case in RECURRENT:
        given, found = sample_recurrent(*case, dtype), []
        for operator in (host_code, interpreter):
            use_kernel(monkeypatch, operator)
            found.append(run_recurrent(given))
        assert all(map(torch.equal, *found)), case


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_launches_of_maps(host_code, interpreter, dtype):
    case = make_map("favor", "sum")
    given = sample(case.layout, dtype)
    found = run_all(host_code, case, *given)
    for name, x in run_all(interpreter, case, *given).items():
        assert torch.equal(found[name], x), name
