"""The CPU kernels, built with AddressSanitizer and UndefinedBehaviorSanitizer, run the laws of the operators.

The sanitizers are flags of the compiler, CXX, so that the library lies next to the others in the cache. The one for
addresses has to be in the process before Python is, but not in the compiler's, which it would slow down. Tensors then
come from its memory, with guards around each.
"""

import os
import shutil
import subprocess
import sys

import pytest
from nightly.run import ROOT, insert, mutants
from support.isolated import PREAMBLE

LAWS = ["laws/test_operators.py", "ops/test_operator.py", "test_unusual_inputs.py"]
# These do not test kernels, and are slow under a sanitizer.
OTHERS = (
    "not compiles and not opcheck and not second and not slow and not fwm and not huge and not beyond and not drift "
    "and not gradcheck and not error_is and not map and not layer and not flags"
)
FLAGS = {
    "address": "-fsanitize=address -fno-omit-frame-pointer -g1",
    "undefined": "-fsanitize=undefined -fno-sanitize-recover=undefined -fno-sanitize=vptr -g1",
}
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the sanitizers' libraries are asked of g++")


def library_path(name):
    asked = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def run(kind, *arguments, **more):
    watched = {**os.environ, "CXX": f"env -u LD_PRELOAD g++ {FLAGS[kind]}", "OMP_NUM_THREADS": "1", **more}
    if kind == "address":
        # The second one too: at the start the sanitizer needs the library that throws exceptions.
        watched["LD_PRELOAD"] = f"{library_path('libasan.so')} {library_path('libstdc++.so')}"
        watched["ASAN_OPTIONS"] = "detect_leaks=0:abort_on_error=0"
    watched["UBSAN_OPTIONS"] = "print_stacktrace=1"
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=watched, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("laws", LAWS)
@pytest.mark.parametrize("kind", FLAGS)
def test_nothing_is_found(kind, laws):
    # -s: a sanitizer ends the process, and captured output would be lost.
    found = run(kind, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "-k", OTHERS, f"tests/{laws}")
    assert found.returncode == 0, found.stderr[:4000] + found.stdout[-4000:]
    assert "passed" in found.stdout and "runtime error" not in found.stderr


SCRIPT = """
from pathlib import Path
import torch
from fairseq_fwp import ops
from fairseq_fwp.ops.kernels import build
build._source_folder = lambda: Path("cuda_ext").resolve()
x = torch.rand(1, 1, 3, 5)
print(ops.sum_rule(x, x, x, backend="kernel")[0].shape)
"""


@pytest.mark.parametrize("kind", FLAGS)
def test_a_mistake_is_found(tmp_path, kind):
    """A write of one number too many, or a shift wider than its number."""
    shutil.copytree(ROOT / "cuda_ext", tmp_path / "cuda_ext")
    (mutant,) = (mutant for mutant in mutants() if mutant.how.startswith(kind))
    insert(mutant, tmp_path)
    script = SCRIPT.replace('"cuda_ext"', repr(str(tmp_path / "cuda_ext")))
    found = run(kind, "-c", PREAMBLE + script, FWP_CACHE_DIR=str(tmp_path / "cache"))
    assert found.returncode != 0 and mutant.how.partition(": ")[2] in found.stderr, found.stdout + found.stderr
