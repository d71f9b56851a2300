"""Host code of a CUDA build of PyTorch on a GPU that computes nothing: memory, launches, and a lease rehearsed.

FWP_CUDA_PYTHON names its Python, which needs what `gpu.sh laws` needs, too. Values mean nothing here, but exceptions,
shapes, memory and launches do. The kernels are built once, in minutes.
"""

import csv
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_gpu import environment

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PYTHON = os.environ.get("FWP_CUDA_PYTHON")
pytestmark = pytest.mark.skipif(not (PYTHON and shutil.which("nvcc")), reason="needs FWP_CUDA_PYTHON, and nvcc on PATH")
BUILD = "from fairseq_fwp.ops.kernels import load_kernels; status = load_kernels('cuda'); assert status.built, status"
# Values are wrong, and the check before first use would switch all kernels off.
NO_CHECK = "from fairseq_fwp.ops.kernels import self_check; self_check.find_faults = lambda device: {}\n"


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """The environment of the fake GPU, with kernels, and without the check of their values."""
    folder = tmp_path_factory.mktemp("fake")
    found = environment(PYTHON, folder)
    (folder / "sitecustomize.py").write_text(NO_CHECK)
    found["PYTHONPATH"] = os.pathsep.join(map(str, (folder, ROOT, os.environ.get("PYTHONPATH", ""))))
    found |= {"FAKE_GPU_LOG": str(folder / "launches"), "FWP_COMMIT": "none", "PYTHON": PYTHON}
    subprocess.run([PYTHON, "-c", BUILD], env=found, check=True)
    return found


def test_memory_of_training_steps(fake):
    """PyTorch's own allocator counts it."""
    tests = ["tests/ops/test_cuda.py", "-k", "extra_memory"]
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=fake, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]


@pytest.mark.parametrize("call, parts", [("1", "check kernels"), ("2", "measure"), ("3", "models laws")])
def test_a_lease_runs_to_its_end(fake, tmp_path, call, parts):
    """Every contender of ours, in every stage, has a time. The fake GPU has neither fla's kernels nor cuDNN.

    fairseq asserts that gradients are finite: an update ends there.
    """
    command = ["bash", ROOT / "recipes/benchmarks/gpu.sh", "lease", call, "--out", tmp_path]
    done = subprocess.run(command, env=fake | {"FWP_TINY": "cuda"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    launches = Path(fake["FAKE_GPU_LOG"]).read_text()
    assert "RecurrentBackward" in launches or call == "3"
    for part in parts.split():
        rows = list(csv.reader((tmp_path / f"gpu_{part}.csv").open()))
        missed = [row for row in rows if row[3] == "not measured" and ", fla" not in row[2]]
        missed = [row for row in missed if not row[5].startswith(("RuntimeError('cuDNN", "AssertionError()"))]
        assert missed == [] and len(rows) > 8


# Calls without graphs, and after their capture. With clusters of words, the softmax and its loss need most of the last.
CALLS = {
    "update delta_lm_wt103": (920, 290),
    "update rwkv7_lm_tiny": (360, 40),
    "token delta_lm_wt103": (290, 10),
    "token gated_deltanet_lm_tiny": (185, 10),
}


@pytest.mark.parametrize("case", CALLS)
def test_graphs_need_few_calls(fake, tmp_path, case):
    """A capture fails if anything in it waits for the GPU. fairseq's own update needs 1,800 calls more."""
    benchmarks = ROOT / "recipes" / "benchmarks"
    given = fake | {"PYTHONPATH": os.pathsep.join((fake["PYTHONPATH"], str(benchmarks)))}
    for flags, most in zip(([], ["--cuda-graphs"]), CALLS[case], strict=True):
        given["FAKE_GPU_LOG"] = str(tmp_path / f"launches{len(flags)}")
        command = [PYTHON, "-O", "-W", "ignore", HERE / "count_launches.py", *case.split(), *flags]
        done = subprocess.run(command, env=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        *_, before, last = map(int, done.stdout.splitlines()[-1].split())
        assert before == last <= most, done.stdout
