"""Chunks of rules that forget compute nothing with the numbers that were in their memory before.

These may be denormal, which made heads of 48, 72 or 80 numbers ten times as slow, and change no result.
"""

import itertools
import subprocess
from pathlib import Path

from fairseq_fwp.ops.kernels import build

HERE = Path(__file__).parent


def test_padding_is_zero(tmp_path):
    include = build._source_folder()
    program = [*build._compiler(), "-std=c++20", "-O0", build._arch_flag(build._cpu_arch()), f"-I{include}"]
    subprocess.run([*program, f"-I{include / 'cpu'}", HERE / "padding.cpp", "-o", tmp_path / "padding"], check=True)
    for sizes, length, state in itertools.product([(48, 48), (72, 80), (50, 33)], [1, 16, 37, 64], [0, 1]):
        case = [*map(str, (*sizes, length, state))]
        assert subprocess.run([tmp_path / "padding", *case], check=False).returncode == 0, case
