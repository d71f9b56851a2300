"""Compile the kernels with nvcc once for all tests: their PTX, and what ptxas reports of them."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from emulator import CACHE, KERNELS, sources_of, units_of

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc of CUDA 12 or later on PATH")


# Optimised, with the lines of the sources. The folder of the result keeps the PTX.
COMMAND = ("nvcc", "-std=c++17", "-cubin", "-keep", "-lineinfo", "-Xptxas", "-v", "-Werror", "all-warnings")


class Compiled(NamedTuple):
    """The PTX of each file, and what ptxas -v reports of all."""

    ptx: list[str]
    report: str


class Usage(NamedTuple):
    kernel: str
    stack_bytes: int  # local memory: arrays that are not in registers, and spilled registers
    spilled_bytes: int
    registers: int
    shared_bytes: int  # static: that of the kernels is dynamic, and the emulator checks it


def parse_report(report: str) -> list[Usage]:
    """Return the report of ptxas -v for each kernel."""
    entry = re.compile(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers(?:[^\n]*, (\d+) bytes smem)?",
        re.DOTALL,
    )
    found = [
        Usage(name, int(stack), int(stores) + int(loads), int(used), int(shared or 0))
        for name, stack, stores, loads, used, shared in entry.findall(report)
    ]
    assert len(found) == report.count("Compiling entry function"), report
    return found


def compile_source(source: Path, architecture: str, folder: Path) -> Compiled:
    """Compile one file. `90a` brings Hopper's own instructions."""
    code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    report = folder / f"{source.stem}.txt"  # written last
    if not report.exists():
        command = [*COMMAND, code, "-keep-dir", str(folder), str(source), "-o", str(folder / f"{source.stem}.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        report.write_text(done.stderr, encoding="utf-8")
    return Compiled([(folder / f"{source.stem}.ptx").read_text()], report.read_text(encoding="utf-8"))


def compiled_kernels(architecture: str) -> Compiled:
    """Compile the kernels, or use earlier ones if neither sources nor nvcc have changed."""
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256(repr((version, architecture, COMMAND)).encode())
    for source in sources_of(KERNELS):
        key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    folder = CACHE / f"nvcc_{key.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    # Tests in other processes wait for this compilation and use its files.
    with open(folder / "lock", "w") as lock, ThreadPoolExecutor(os.cpu_count()) as threads:
        fcntl.flock(lock, fcntl.LOCK_EX)
        of_units = list(threads.map(lambda unit: compile_source(unit, architecture, folder), units_of(KERNELS)))
    return Compiled([ptx for unit in of_units for ptx in unit.ptx], "".join(unit.report for unit in of_units))
