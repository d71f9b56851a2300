"""The laws with vectors of other widths than the machine's own, which tests/laws/test_operators.py has.

All widths that the machine can run; others are in tests/nightly/test_other_processors.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_fwp.ops.kernels import build
from fairseq_fwp.ops.kernels.error import BuildError

TESTS = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_laws_hold_for_other_vectors(monkeypatch, arch):
    features = build._cpu_features().split()
    own = "x86-64-v4" if "avx512f" in features else "x86-64-v3" if "avx" in features else "x86-64-v2"
    if arch == own:
        pytest.skip(f"the vectors of {arch} are this machine's own: tests/laws/test_operators.py has them")
    monkeypatch.setenv("FWP_CPU_ARCH", arch)
    try:
        build._cpu_arch()
    except BuildError as error:
        pytest.skip(str(error))
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-k", "not drift"]
    command = [sys.executable, "-m", "pytest", *options, "laws/test_operators.py"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
