"""AddressSanitizer watches every access of the kernels, to shared memory and to arrays of their exact sizes."""

import os
import subprocess

import pytest
from emulator import CACHE, KERNELS, build

# B, H, L, Dk, Dv; the last two are long enough for tensor cores.
SIZES = [
    (1, 2, 1, 5, 7),
    (2, 1, 37, 17, 33),
    (1, 3, 6, 128, 3),
    (1, 1, 3, 300, 20),
    (1, 1, 2, 20, 257),
    (1, 2, 77, 20, 33),
    (1, 1, 66, 128, 16),
]


def run_watched(kernels=KERNELS, flags=("-Wall", "-Werror"), folder=CACHE):
    """All rules at all sizes, in all types and both orders of threads, with documents and without."""
    flags = ("-O0", "-g1", "-fsanitize=address", *flags)
    program = build(kernels, program=True, flags=flags, folder=folder)
    arguments = [str(n) for size in SIZES for n in size]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_nothing_is_accessed_beyond_its_ends():
    found = run_watched()
    assert found.returncode == 0, found.stderr
