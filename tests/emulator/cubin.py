"""Compile the kernels with nvcc once for all tests, and read the report of ptxas."""

import fcntl
import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from emulator import CACHE, KERNELS

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc of CUDA 12 or later on PATH")


class Cubin(NamedTuple):
    path: Path
    report: str  # of ptxas -v


class Usage(NamedTuple):
    kernel: str
    stack_bytes: int  # local memory: arrays that are not in registers, and spilled registers
    spilled_bytes: int
    registers: int


def parse_report(report: str) -> list[Usage]:
    """Return the report of ptxas -v for each kernel."""
    entry = re.compile(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        re.DOTALL,
    )
    found = [
        Usage(name, int(stack), int(stores) + int(loads), int(used))
        for name, stack, stores, loads, used in entry.findall(report)
    ]
    assert len(found) == report.count("Compiling entry function"), report
    return found


def compile_cubin(source: Path, architecture: str, folder: Path) -> Cubin:
    """Compile one file. `compute_90a` brings Hopper's own instructions."""
    code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = ["nvcc", "-std=c++17", "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings", code]
    made = folder / "kernels.cubin"
    done = subprocess.run([*command, str(source), "-o", str(made)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "ptxas.txt").write_text(done.stderr, encoding="utf-8")
    return Cubin(made, done.stderr)


def kept_cubin(architecture: str) -> Cubin:
    """Compile the kernels, or use earlier ones if neither sources nor nvcc have changed."""
    version = subprocess.run(["nvcc", "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(version + architecture.encode())
    for source in sorted(KERNELS.iterdir()):
        key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    folder = CACHE / f"cubin_{key.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    # Tests in other processes wait for this compilation and use its files; the report is written last.
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ptxas.txt").exists():
            return compile_cubin(KERNELS / "kernels.cu", architecture, folder)
    return Cubin(folder / "kernels.cubin", (folder / "ptxas.txt").read_text(encoding="utf-8"))
