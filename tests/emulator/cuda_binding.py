"""Build the binding of CUDA tensors for CPU tensors, over the emulator, and compare its results with the reference.

It takes the place of the kernels of CPU tensors, so use it in a process of its own.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from emulator import HERE, KERNELS, build, compiler, make_once
from operator_cases import ONE_OF_A_FORM
from support.pairwise import pairwise
from support.subjects import RULES, WITH_KERNEL, cotangents, operands, relative_error, results, sample_inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.cpp_extension import include_paths, library_paths

from fairseq_fwp.kernel_checks import RecurrentDeltaCheck
from fairseq_fwp.ops.kernels import library, self_check
from fairseq_fwp.ops.kernels.build import _flags

LIMITS = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SHAPE = (2, 2, 70, 16, 20)  # with chunks on tensor cores, and kept states
IN_SEGMENTS = (1, 1, 2060, 16, 20)
CASES = {
    "rule": WITH_KERNEL,
    "dtype": list(LIMITS),
    "layout": ["contiguous", "tokens_first", "odd", "expanded", "shared"],
    "state": [True, False],
    "documents": [False, True],
}


def build_binding() -> Path:
    """Return the library, whose launchers are those of the emulator that the process has loaded."""
    source, bindings = HERE / "binding" / "binding.cpp", KERNELS.parent / "bindings"
    includes = [f"-I{source.parent}", f"-I{bindings}", *(f"-isystem{path}" for path in include_paths())]
    libraries = [*(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu"]
    command = [*compiler(), *_flags("cpu"), "-O1", "-fPIC", "-shared", *includes, str(source), *libraries]
    own = (path for path in source.parent.rglob("*") if path.is_file())
    files = (*sorted(own), KERNELS.parent / "rule.h", *sorted(KERNELS.glob("*.h")), *sorted(bindings.glob("*.*")))
    return make_once("binding", [*command, f"-DPYTORCH={torch.__version__}"], files)


def build_all() -> tuple[Path, Path]:
    return build(), build_binding()


def load() -> None:
    launchers, binding = map(str, build_all())
    ctypes.CDLL(launchers, mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(binding)
    library._statuses["cpu"] = library.KernelStatus(True, binding)  # so that nothing loads the CPU's kernels


def prepare() -> None:
    """Load the binding; the memory of results is NaN until they are written."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    load()


def transposed(x: Tensor | None) -> Tensor | None:
    """Return the same matrices in memory by columns."""
    return None if x is None else x.mT.contiguous().mT


def check(
    rule: str, dtype: torch.dtype, layout: str, state: bool, documents: bool, shape: tuple[int, ...] = SHAPE
) -> None:
    """Check outputs and all gradients. With the layout "shared", two heads have the same queries and keys."""
    inputs = sample_inputs(rule, shape, dtype, layout=layout, state=state)
    of_out, of_state = cotangents(inputs)
    first = torch.zeros(shape[0], shape[2], dtype=torch.bool)
    first[0, [0, 9, 33]] = first[-1, 40] = True
    if layout == "tokens_first":
        inputs["state"], of_out, of_state, first = map(transposed, (inputs["state"], of_out, of_state, first))
    if layout == "shared":
        inputs |= {name: inputs[name][:, :1] for name in "qk"}
    if not documents:
        first = None
    gradients = (of_out, of_state)
    found = results(partial(RULES[rule].function, first=first, backend="kernel"), inputs, gradients)
    exact = {name: None if x is None else x.double() for name, x in inputs.items()}
    of_exact = tuple(x.double() for x in gradients)
    truth = results(partial(RULES[rule].reference, first=first), exact, of_exact)
    for name, x in truth.items():
        case = f"{name} of {rule}, {dtype}, {layout}, state={state}, documents={documents}"
        assert found[name].shape == x.shape, case
        assert (error := relative_error(found[name], x)) < LIMITS[found[name].dtype], f"{case}: {error:.3g}"


def check_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check that the results of the operator lie in memory as those of its fake implementation on a GPU."""
    arguments = operands("delta", sample_inputs("delta", shape, dtype))

    def shapes(of: Callable[[Tensor], Tensor]) -> list[tuple[torch.Size, tuple[int, ...]]]:
        given = (of(x) if isinstance(x, Tensor) else x for x in arguments)
        return [(x.shape, x.stride()) for x in torch.ops.fwp.fast_weights.default(*given)]

    found = shapes(torch.clone)
    with FakeTensorMode():
        expected = shapes(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"))
    assert found == expected, f"{found} for {shape}, {dtype} instead of {expected}"


def check_all(every: bool) -> None:
    """Check every combination, or pairs of values with a rule of each form, and a long sequence in segments."""
    prepare()
    some = pairwise(**CASES | {"rule": ONE_OF_A_FORM})
    for values in product(*CASES.values()) if every else (case.values() for case in some):
        check(*values)
    check("delta", torch.bfloat16, "tokens_first", True, False, IN_SEGMENTS)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in (SHAPE, IN_SEGMENTS, (1, 3, 5300, 16, 16)):  # the last could have six segments, and has four
            check_shapes(shape, dtype)


def check_recurrent_delta() -> None:
    """Check the rule that sees its last output, and that what a kernel would read wrongly is refused."""
    prepare()
    assert self_check.find_fault(RecurrentDeltaCheck(), torch.device("cpu")) == ""
    x, memory, output = torch.zeros(2, 3, 4, 196), torch.zeros(2, 4, 65, 65), torch.zeros(2, 4, 65)
    for changed, message in (
        ({}, "recurrent_delta takes heads of up to 64 numbers, got 65"),
        ({"x": x.mT.contiguous().mT}, "x must be contiguous"),
        ({"x": x.half()}, "x must have shape .* in float32 or float64, got Half"),
        ({"memory": memory.double()}, "memory must be a Float tensor"),
        ({"marks": torch.zeros(2, 3)}, "marks must be a Byte tensor of"),
    ):
        given = {"x": x, "weights": None, "z": None, "memory": memory, "output": output, "marks": None} | changed
        with pytest.raises(RuntimeError, match=message):
            torch.ops.fwp.recurrent_delta(**given, keeps=False)
