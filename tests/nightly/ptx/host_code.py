"""Run nvcc's host code of the kernels, with runtime.cpp in place of CUDA's runtime."""

import ctypes
from pathlib import Path

from emulator import KERNELS, Emulator, make_once, sources_of, units_of
from interpreter import Interpreter

RUNTIME = Path(__file__).with_name("runtime.cpp")
# What nvcc makes of host code does not depend on the code for the GPU, which takes minutes.
COMMAND = ("nvcc", "-std=c++17", "-arch=sm_90a", "-fdevice-syntax-only", "-Werror", "all-warnings", "-cudart", "none")


def compile_host_code(kernels: Path = KERNELS) -> Path:
    sources = [RUNTIME, *units_of(kernels)]
    command = [*COMMAND, "-shared", "-Xcompiler", "-fPIC", f"-I{kernels}", *map(str, sources)]
    return make_once("host_code", command, (RUNTIME, *sources_of(kernels)))


class HostCode(Emulator):
    """The operator, as nvcc has made it: its host code launches its PTX on an interpreter."""

    def __init__(self, library: Path, interpreter: Interpreter) -> None:
        super().__init__(library)
        self._interpreter = interpreter  # which must outlive the launches
        self._library.runtime_connect(interpreter._library.interpreter_launch)
        self._library.runtime_kernels.restype = ctypes.c_char_p

    def kernels(self) -> set[str]:
        """Return the names of the kernels that the host code registers."""
        return set(self._library.runtime_kernels().decode().split())
