"""Compile the kernels with ``torch.utils.cpp_extension``; a key identifies everything their machine code depends on."""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from .cuda import architecture_flags, find_nvcc, toolkit_folders, toolkit_release
from .error import BuildError

LIBRARY = "kernels.so"
SOURCES, HEADERS = (".cpp", ".cu"), (".h", ".cuh")
# Environment variables that nvcc reads by itself.
NVCC_VARIABLES = ("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
# What each level of x86-64 adds to the one before, in the names of /proc/cpuinfo.
LEVELS = {
    "x86-64": "",
    "x86-64-v2": "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512bw avx512cd avx512dq avx512f avx512vl",
}

# Run by a separate Python in the folder of the build: cpp_extension depends on the environment and on its constants,
# which must not change here. It does not quote the folders that it links from, so `cuda` is a link to one.
LOAD = """
import json, shlex, sys
from torch.utils import cpp_extension
cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)
cpp_extension.CUDA_HOME = "cuda"
cpp_extension.load(**json.loads(sys.argv[1]))
"""


def build_key(device_type: str) -> str:
    """Return a hash of sources, flags, compiler, PyTorch and processor or GPUs.

    Raises BuildError without a GPU, or if this processor cannot run FWP_CPU_ARCH.
    """
    key = hashlib.sha256()
    for file in _files(device_type, SOURCES + HEADERS):
        key.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    # The compiler's name counts, not its version: a cached library must load on machines without a compiler.
    parts = [device_type, torch.__version__, platform.machine(), *_compiler(), *_flags(device_type)]
    if device_type == "cuda":
        environment = [os.environ.get(name, "") for name in NVCC_VARIABLES]
        parts += [str(torch.version.cuda), toolkit_release(), *_cuda_flags(), *environment]
    elif _cpu_arch() == "native":
        parts.append(_cpu_features())
    key.update(os.fsencode("\0".join(parts)))
    return key.hexdigest()[:16]


def check_tools(device_type: str) -> None:
    """Check that the tools for this device exist; raise BuildError otherwise."""
    if device_type == "cuda":
        find_nvcc()
    program = _compiler()[0]
    if shutil.which(program) is None:
        raise BuildError(f"there is no C++ compiler ({program} is not on PATH)", "install g++ 10 or later, or set CXX")
    if shutil.which("ninja", path=_search_path()) is None:
        raise BuildError("there is no ninja, which runs the compilers", "pip install ninja")


def compile_library(device_type: str, folder: Path) -> Path:
    """Compile the kernels of a device in a separate folder and return the library's path. Raises BuildError."""
    check_tools(device_type)
    arguments: dict[str, Any] = {
        "name": LIBRARY,
        # In this order the longest start early, and two cores end together.
        "sources": list(map(str, reversed(_files(device_type, SOURCES)))),
        "build_directory": str(folder),
        "extra_cflags": _flags(device_type),
        "extra_ldflags": ["-shared"],
        "is_python_module": False,
        "is_standalone": True,  # linked only with PyTorch, and loaded only from its final folder
    }
    environment = {**os.environ, "PATH": _search_path(), "LC_ALL": "C", "TORCH_DONT_CHECK_COMPILER_ABI": "1"}
    if device_type == "cpu":
        arguments["extra_cflags"] += _openmp()
        environment["TMPDIR"] = "."  # there may be no other folder that can be written
    else:
        _add_toolkit(arguments, environment, folder)
    # One program in one word for any CXX: some versions of cpp_extension quote it, and others do not.
    program, *words = _compiler()
    compiler = shlex.join([os.path.abspath(str(shutil.which(program))), *words])
    (folder / "compiler").write_bytes(os.fsencode(f'#!/bin/sh\nexec {compiler} "$@"\n'))
    (folder / "compiler").chmod(0o755)
    environment["CXX"] = "./compiler"
    command = [sys.executable, "-W", "ignore", "-c", LOAD, json.dumps(arguments)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0:
        raise _build_error(done.stderr)
    return folder / LIBRARY


def _add_toolkit(arguments: dict[str, Any], environment: dict[str, str], folder: Path) -> None:
    nvcc = os.path.abspath(find_nvcc())
    includes, libraries = toolkit_folders(nvcc)
    arguments["extra_cuda_cflags"] = _cuda_flags()
    arguments["extra_include_paths"] = includes
    arguments["extra_ldflags"] += ["-L.", *(f"-L{shlex.quote(path)}" for path in libraries)]
    environment["PYTORCH_NVCC"] = shlex.quote(nvcc)
    environment.pop("CC", None)  # it would override NVCC_CCBIN
    (folder / "cuda").symlink_to(Path(nvcc).parents[1])
    # The library that pip installs lacks the name that linkers look for.
    for runtime in sorted(folder.glob("cuda/lib/libcudart.so.*"))[:1]:
        (folder / "libcudart.so").symlink_to(runtime)


def _build_error(output: str) -> BuildError:
    """Return the first error message of ninja or the compilers, or else the command that failed."""
    lines = output.splitlines()
    errors = [line for words in ("error:|fatal|cannot find", "^FAILED") for line in lines if re.search(words, line)]
    reason = [*errors, *lines[-1:], "without a word"][0].strip()
    cure = "cuda_ext/README.md says which compilers work"
    if "-std=c++20" in reason:
        cure = "install g++ 10 or later, or set CXX"
    if "-march" in reason:
        cure = "set FWP_CPU_ARCH to a value that the compiler knows"
    if "Unsupported gpu architecture" in reason:
        # The driver translates PTX for GPUs that the toolkit does not know.
        cure = "install another CUDA toolkit, or set TORCH_CUDA_ARCH_LIST to what this one knows, as in '9.0+PTX'"
    return BuildError(f"the build failed: {reason}", cure)


def _source_folder() -> Path:
    """``cuda_ext`` inside an installed package, or next to the package in a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "cuda_ext"
    return installed if installed.is_dir() else package.parent / "cuda_ext"


def _files(device_type: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files below ``cuda_ext``, except those with the other device in their path. Sources must differ in name."""
    folder, other = _source_folder(), {"cpu": "cuda", "cuda": "cpu"}[device_type]
    files = (path for path in folder.rglob("*") if path.suffix in suffixes)
    return sorted(path for path in files if other not in str(path.relative_to(folder)))


def _compiler() -> list[str]:
    """Return CXX as a program and its arguments. Raises BuildError."""
    words = os.environ.get("CXX", "")
    try:
        return shlex.split(words) or ["c++"]
    except ValueError as error:
        reason = f"CXX must be a program and its arguments, as in a shell, got {words!r}: {error}"
        raise BuildError(reason, "set CXX to a compiler, or unset it") from error


def _ask_compiler(*question: str) -> subprocess.CompletedProcess[str]:
    """Run the compiler. Raises BuildError if this machine cannot run it."""
    command = [*_compiler(), *question]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BuildError(f"the C++ compiler {command[0]} does not run: {error}", "set CXX to another one") from error


def _search_path() -> str:
    """Return PATH and the programs of this Python's environment, which may be inactive."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def _flags(device_type: str) -> list[str]:
    # PyTorch's CUDA headers include a file that only some builds have and only Windows needs.
    own = ["-O3", _arch_flag(_cpu_arch())] if device_type == "cpu" else ["-O2", "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"]
    return [*own, "-std=c++20", "-DAT_PER_OPERATOR_HEADERS", f"-DFWP_AUTOGRAD_KEY=Autograd{device_type.upper()}"]


def _cpu_arch() -> str:
    """Return FWP_CPU_ARCH, or native. Raises BuildError if this processor cannot run it.

    The levels of x86-64 need no compiler to be checked, so a library of theirs loads without one.
    """
    arch = os.environ.get("FWP_CPU_ARCH") or "native"
    if arch == "native":
        return arch
    if arch in LEVELS:
        needed = list(LEVELS.values())[: list(LEVELS).index(arch) + 1]
        missing = set(" ".join(needed).split()) - set(_cpu_features().split())
    else:
        missing = _instruction_sets(arch) - _instruction_sets("native")
    if missing:
        reason = f"FWP_CPU_ARCH must be a processor whose instructions this one has, got {arch}, which needs"
        raise BuildError(f"{reason} {', '.join(sorted(missing))}", "choose an older one, or unset FWP_CPU_ARCH")
    return arch


def _arch_flag(arch: str) -> str:
    x86 = platform.machine() in ("x86_64", "i686")
    return "-mcpu=native" if arch == "native" and not x86 else f"-march={arch}"


def _instruction_sets(arch: str) -> set[str]:
    """Return the compiler's macros for a value of -march. Those in capitals name instruction sets."""
    check_tools("cpu")
    done = _ask_compiler(_arch_flag(arch), "-dM", "-E", "-x", "c++", os.devnull)
    if done.returncode != 0:
        reason = f"FWP_CPU_ARCH must be a value of -march that {_compiler()[0]} knows, got {arch}"
        raise BuildError(reason, "try x86-64-v2 or x86-64-v3, or unset FWP_CPU_ARCH")
    return set(re.findall(r"(?m)^#define (__[A-Z0-9_]+) ", done.stdout))


def _cuda_flags() -> list[str]:
    return ["-O3", "-std=c++17", *architecture_flags()]


def _openmp() -> list[str]:
    """Return the flags that make ``at::parallel_for`` parallel: only for GCC, whose OpenMP runtime is PyTorch's.

    The runtime is not linked: its symbols resolve to the copy that PyTorch has loaded already. A second copy would
    ignore ``torch.set_num_threads``. Clang needs another runtime, so kernels built by it use one thread.
    """
    return [] if "clang" in _ask_compiler("--version").stdout else ["-fopenmp"]


def _cpu_features() -> str:
    """Return the processor features that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor()
    return " ".join(sorted(set(re.findall(r"(?im)^(?:flags|features)\s*:(.*)", lines))))
