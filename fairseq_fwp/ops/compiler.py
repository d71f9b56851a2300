"""The command lines that compile the kernels, and the key of all that their machine code depends on."""

import contextlib
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .build_error import BuildError
from .cuda_toolkit import architectures, find_nvcc, toolkit_version

# What nvcc takes from the environment on its own.
NVCC_VARIABLES = ("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


def build_key(device_type: str) -> str:
    """Hash of sources, flags, compiler, PyTorch and processor or GPUs. Raises BuildError where there is no GPU."""
    key = hashlib.sha256()
    for source in _sources(device_type):
        key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    parts = {"cpu": _cpu_parts, "cuda": _cuda_parts}[device_type]()
    for part in (device_type, torch.__version__, platform.machine(), *parts):
        key.update(part.encode() + b"\0")
    return key.hexdigest()[:16]


def check_compiler(device_type: str) -> None:
    """Raises BuildError where a build for this device cannot even begin."""
    if device_type == "cuda":
        find_nvcc(architectures())
    elif shutil.which(_compiler()[0]) is None:
        raise BuildError(
            f"there is no C++ compiler ({_compiler()[0]} is not on PATH)", "install g++ 10 or later, or set CXX"
        )


def compile_library(device_type: str, library: Path) -> None:
    """Compile the kernels of a device into ``library``, with its object files beside it. Raises BuildError."""
    check_compiler(device_type)
    COMPILE[device_type](library)


def _compile_cpu(library: Path) -> None:
    compiler = _compiler()
    command = [*compiler, *_cpu_flags(), *_openmp(compiler), *_torch_includes()]
    programs = _compile_each(dict.fromkeys(_torch_sources("cpu"), command), library)
    _run([*compiler, "-shared", *programs, *_torch_libraries(), "-o", str(library)])


def _compile_cuda(library: Path) -> None:
    """nvcc compiles what knows PyTorch as well, and links: it knows where the toolkit's headers and libraries are."""
    targets = architectures()
    nvcc = find_nvcc(targets)
    for_torch = [nvcc, *_binding_flags(), *_torch_includes()]
    for_gpus = [nvcc, *_kernel_flags(), *(flag for target in targets for flag in target.flags)]
    commands = dict.fromkeys(_torch_sources("cuda"), for_torch)
    commands |= dict.fromkeys(sorted((_source_folder() / "cuda").glob("*.cu")), for_gpus)
    programs = _compile_each(commands, library)
    _run([nvcc, "-shared", "--cudart=shared", *programs, *_torch_libraries(), "-lc10_cuda", "-o", str(library)])


def _compile_each(commands: dict[Path, list[str]], library: Path) -> list[str]:
    """Compile sources side by side, each by its command. Returns the object files, which lie beside the library."""
    programs = [str(library.with_name(f"{source.stem}.o")) for source in commands]
    with ThreadPoolExecutor() as threads:
        whole = ([*command, "-c", str(source)] for source, command in commands.items())
        list(threads.map(lambda command, program: _run([*command, "-o", program]), whole, programs))
    return programs


COMPILE: dict[str, Callable[[Path], None]] = {"cpu": _compile_cpu, "cuda": _compile_cuda}


def _source_folder() -> Path:
    """``cuda_ext`` inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "cuda_ext"
    return installed if installed.is_dir() else package.parent / "cuda_ext"


def _sources(device_type: str) -> list[Path]:
    folder = _source_folder()
    patterns = {
        "cpu": ["cpu/*.h", "bindings/*.h"],
        "cuda": ["bindings/arguments.h", "cuda/*.h", "cuda/*.cuh", "cuda/*.cu"],
    }
    found = [source for pattern in patterns[device_type] for source in folder.glob(pattern)]
    return sorted([*found, *_torch_sources(device_type)])


def _torch_sources(device_type: str) -> list[Path]:
    """What is compiled with PyTorch's headers."""
    folder = _source_folder() / "bindings"
    return [*sorted(folder.glob(f"{device_type}*.cpp")), folder / "autograd.cpp"]


def _cpu_parts() -> list[str]:
    # The compiler counts by name, not version: a cached library must load where there is no compiler to ask.
    return [*_compiler(), *_cpu_flags(), _cpu_features()]


def _cuda_parts() -> list[str]:
    targets = [flag for target in architectures() for flag in target.flags]
    environment = [os.environ.get(name, "") for name in NVCC_VARIABLES]
    return [str(torch.version.cuda), toolkit_version(), *targets, *_binding_flags(), *_kernel_flags(), *environment]


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def _cpu_flags() -> list[str]:
    native = "-march=native" if platform.machine() in ("x86_64", "i686") else "-mcpu=native"
    return ["-O3", native, "-std=c++20", "-fPIC", *_torch_macros("CPU")]


def _binding_flags() -> list[str]:
    # Its headers of CUDA ask for a file that only some builds of PyTorch have, and only Windows needs.
    macros = [*_torch_macros("CUDA"), "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"]
    return ["-O2", *(word for flag in ("-std=c++20", "-fPIC") for word in ("-Xcompiler", flag)), *macros]


def _kernel_flags() -> list[str]:
    return ["-O3", "-std=c++17", "-Xcompiler", "-fPIC"]


def _torch_macros(dispatch_key: str) -> list[str]:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return ["-DAT_PER_OPERATOR_HEADERS", abi, f"-DFWP_AUTOGRAD_KEY=Autograd{dispatch_key}"]


def _cpp_extension() -> Any:
    # It warns where there is a CUDA toolkit and no GPU: what needs one asks for it itself.
    logging.getLogger("torch.utils.cpp_extension").addFilter(_says_more_than_no_gpu)
    # Imported here: it takes half a second, and loading a cached library needs nothing of it.
    from torch.utils import cpp_extension

    return cpp_extension


def _says_more_than_no_gpu(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("No CUDA runtime is found")


def _torch_includes() -> list[str]:
    return [word for path in _cpp_extension().include_paths() for word in ("-isystem", path)]


def _torch_libraries() -> list[str]:
    return [*(f"-L{path}" for path in _cpp_extension().library_paths()), "-lc10", "-ltorch_cpu", "-ltorch"]


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
        said = (result.stderr + result.stdout).splitlines()
        errors = [line for line in said if re.search("error|fatal|cannot find", line)]
        reason = errors[0].strip() if errors else f"exit status {result.returncode}"
        raise BuildError(f"{command[0]} failed: {reason}", "cuda_ext/README.md says which compilers are known to work")
