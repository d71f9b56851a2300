"""The CPU kernels for processors unlike this one, without PyTorch: a program compares them with a loop."""

import shutil
import subprocess
from pathlib import Path

import pytest

from fairseq_fwp.ops.kernels import build
from fairseq_fwp.ops.kernels.error import BuildError

HERE = Path(__file__).parent / "widths"
KERNELS = build._source_folder() / "bindings" / "cpu"
SOURCES = [HERE / "program.cpp", *(KERNELS / f"{name}.cpp" for name in ("sum", "delta", "forget", "retrieve"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "compiler", "emulator", "width"),
    [
        ("x86-64-v2", "x86_64-linux-gnu-g++", None, 16),
        ("x86-64-v3", "x86_64-linux-gnu-g++", None, 32),
        ("x86-64-v4", "x86_64-linux-gnu-g++", None, 64),
        ("armv8-a", "aarch64-linux-gnu-g++", "qemu-aarch64", 16),
    ],
)
def test_the_kernels_without_pytorch(monkeypatch, tmp_path, arch, compiler, emulator, width):
    """AVX-512 is only compiled where the processor has none: qemu has none either."""
    for tool in (compiler, *([emulator] if emulator else [])):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is missing: on Debian, apt install g++-aarch64-linux-gnu qemu-user")
    command = [compiler, "-std=c++20", "-O2", f"-march={arch}", "-static", f"-I{HERE}"]
    subprocess.run([*command, *SOURCES, "-o", tmp_path / "program"], check=True)
    if not emulator:
        monkeypatch.setenv("FWP_CPU_ARCH", arch)
        try:
            build._cpu_arch()
        except BuildError as error:
            pytest.skip(f"compiled, not run: {error}")
    run = subprocess.run([*filter(None, [emulator]), tmp_path / "program"], capture_output=True, text=True, check=False)
    assert run.stdout == f"vectors of {width} bytes: 0 failures\n" and run.returncode == 0, run.stdout + run.stderr
