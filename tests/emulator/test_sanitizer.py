"""AddressSanitizer and UndefinedBehaviorSanitizer watch every access of the kernels.

The first sees what lies beyond shared memory and beyond arrays of their exact sizes; the second what is misaligned,
which a GPU refuses and a CPU does not, and what C++ leaves open: shifts, overflows, conversions.
"""

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
    flags = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", *flags)
    program = build(kernels, program=True, flags=flags, folder=folder)
    arguments = [str(n) for size in SIZES for n in size]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_every_access_is_inside_and_aligned():
    found = run_watched()
    assert found.returncode == 0, found.stderr
