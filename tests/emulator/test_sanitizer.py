"""AddressSanitizer and UndefinedBehaviorSanitizer watch every access of the kernels.

The first sees what lies beyond shared memory and beyond arrays of their exact sizes. The second sees misaligned
accesses, which a GPU refuses and a CPU does not, and what C++ leaves undefined: shifts, overflows, conversions.
"""

import os
import subprocess

import pytest
from emulator import CACHE, HERE, KERNELS, build, compiler

# B, H, L, Dk, Dv. From (1, 2, 77, ...) on they are long enough for tensor cores, and the next but one for segments. The
# last three have wide tiles, medium ones, and sums over several blocks in windows of tokens.
SIZES = [
    (1, 2, 1, 5, 7),
    (2, 1, 37, 17, 33),
    (1, 3, 6, 128, 3),
    (1, 1, 3, 300, 20),
    (1, 1, 2, 20, 257),
    (1, 2, 77, 20, 33),
    (1, 1, 66, 128, 16),
    (1, 1, 2080, 16, 16),
    (32, 16, 5, 9, 64),
    (16, 8, 5, 60, 60),
    (1, 2, 66, 260, 70),
]
WATCHED = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
# A thread reads 16 bytes at once, some bytes after the start of shared memory.
WIDE_READ = """
#include <cstdlib>
#include "device.cuh"
struct alignas(16) Wide { uint32_t x[4]; };
int main(int, char** arguments) {
  emulator::launch(1, 32, 1024, [&] {
    const unsigned char* const line = fwp::cuda::shared_memory() + std::atoi(arguments[1]);
    volatile uint32_t x = reinterpret_cast<const Wide*>(line)->x[0];
    (void)x;
  });
}
"""


def run_watched(kernels=KERNELS, flags=("-Wall", "-Werror"), folder=CACHE):
    """Run all rules at all sizes, in all types and both orders of threads, with documents and without."""
    program = build(kernels, program=True, flags=(*WATCHED, *flags), folder=folder)
    return run(program, *(str(n) for size in SIZES for n in size))


def run(program, *arguments):
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_every_access_is_inside_and_aligned():
    found = run_watched()
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_a_wide_read_must_be_aligned(tmp_path):
    (tmp_path / "wide.cpp").write_text(WIDE_READ)
    command = [*compiler(), "-std=c++17", *WATCHED, "-include", str(HERE / "emulator.h"), f"-I{KERNELS}"]
    subprocess.run([*command, "wide.cpp", "-o", "wide"], cwd=tmp_path, check=True)
    assert run(tmp_path / "wide", "32").returncode == 0
    found = run(tmp_path / "wide", "8")
    assert found.returncode != 0 and "misaligned address" in found.stderr
