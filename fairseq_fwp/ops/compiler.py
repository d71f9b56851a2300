"""The command lines that compile the kernels, and the key of all that their machine code depends on."""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

BINDINGS = {"cpu": "binding_cpu.cpp"}


class BuildError(Exception):
    """Why a library cannot be built or loaded, in one clause, and in another what helps."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(reason)
        self.cure = cure


def build_key(device_type: str) -> str:
    """Hash of sources, flags, compiler, PyTorch and processor."""
    key = hashlib.sha256()
    for source in sorted(_source_folder().glob("*")):
        if source.suffix in (".h", ".cpp"):
            key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    # The compiler counts by name, not version: a cached library must load where there is no compiler to ask.
    for part in (device_type, torch.__version__, *_compiler(), *_flags(), platform.machine(), _cpu_features()):
        key.update(part.encode() + b"\0")
    return key.hexdigest()[:16]


def compile_library(device_type: str, library: Path) -> None:
    """Compile the kernels of a device into ``library``, with its object file beside it. Raises BuildError."""
    compiler = _compiler()
    if shutil.which(compiler[0]) is None:
        raise BuildError(
            f"there is no C++ compiler ({compiler[0]} is not on PATH)", "install g++ 10 or later, or set CXX"
        )
    # Imported here: it takes half a second, and loading a cached library needs nothing of it.
    from torch.utils import cpp_extension

    binding, program = str(_source_folder() / BINDINGS[device_type]), str(library.with_suffix(".o"))
    include = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    link = [f"-L{path}" for path in cpp_extension.library_paths()]
    _run([*compiler, *_flags(), *_openmp(compiler), *include, "-c", binding, "-o", program])
    _run([*compiler, "-shared", program, *link, "-lc10", "-ltorch_cpu", "-ltorch", "-o", str(library)])


def _source_folder() -> Path:
    """``cuda_ext`` inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "cuda_ext"
    return installed if installed.is_dir() else package.parent / "cuda_ext"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def _flags() -> list[str]:
    native = "-march=native" if platform.machine() in ("x86_64", "i686") else "-mcpu=native"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return ["-O3", native, "-std=c++20", "-fPIC", "-DAT_PER_OPERATOR_HEADERS", abi]


def _openmp(compiler: list[str]) -> list[str]:
    """Flags that make ``at::parallel_for`` parallel: for GCC alone, whose OpenMP runtime PyTorch brings on Linux.

    The runtime is not linked: its symbols resolve to the copy that PyTorch has loaded already. A second copy would not
    know of ``torch.set_num_threads``. What Clang emits needs another runtime, so kernels built by it use one thread.
    """
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return ["-fopenmp"] if sys.platform == "linux" and "clang" not in version else []


def _cpu_features() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.lower().startswith(("flags", "features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    return platform.processor()


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        reason = errors[0] if errors else f"exit status {result.returncode}"
        raise BuildError(f"{command[0]} failed: {reason}", "cuda_ext/README.md says which compilers are known to work")
