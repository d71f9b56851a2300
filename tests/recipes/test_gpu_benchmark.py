"""The benchmark of a GPU, run on the CPU at tiny sizes: every part, its refusals, and floors computed by hand."""

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairseq_fwp.kernels import load_kernels

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "recipes" / "benchmarks"
SHAPE = "(1, 2, 24, 8, 8)"
TRAINING, SDPA = "forward + backward", "scaled_dot_product_attention"


def run(part, folder, *flags, script=BENCHMARKS / "gpu.py", **environment):
    command = [sys.executable, script, part, "--out", folder, *flags]
    environment = {**os.environ, "FWP_TINY": "1", "PYTHONPATH": str(ROOT), "FWP_COMMIT": "a1b2c3d", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def load(monkeypatch):
    """Import a file of recipes/benchmarks, and forget it afterwards."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = [path.stem for path in BENCHMARKS.glob("*.py")]  # the driver has modules of the same names
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """FWP_CACHE_DIR with our library, and a note of its check: a rule has failed."""
    folder, library = tmp_path_factory.mktemp("cache"), Path(load_kernels("cpu").path)
    copy = shutil.copytree(library.parent, folder / library.parent.name)
    found = {"library": hashlib.sha256(library.read_bytes()).hexdigest(), "faults": {"cpu:0": {"gla_rule": "is off"}}}
    (copy / "checked.json").write_text(json.dumps(found))
    return {"FWP_CACHE_DIR": str(folder)}


@pytest.fixture(scope="module")
def out(tmp_path_factory, checked):
    folder = tmp_path_factory.mktemp("out")
    for part in ("measure", "models", "laws"):
        done = run(part, folder, **checked)
        assert done.returncode == 0, done.stderr
    return folder


def test_every_part(load, out):
    read = load("record").Record.read
    record = read("gpu_measure", out)
    assert record.notes()["faults"] == "gla_rule: is off"  # and everything else was measured
    assert min(record.values("machine", "", "copy", "per second")) > 0
    names = ["delta, kernel", "gated_delta, decay per head, kernel"]
    places = [("(2, 2, 1, 8, 8)", "decoding step", x) for x in names]
    places += [(SHAPE, stage, x) for stage in (TRAINING, "forward") for x in (*names, SDPA)]
    places += [(SHAPE, TRAINING, "delta, kernel, float32")]
    assert {len(record.values(*place, "seconds as called")) for place in places} == {2}
    for kind in ("error", "error of all tokens"):
        assert 1e-4 < record.values(SHAPE, TRAINING, "delta, kernel", kind)[0] < 1e-2
        assert record.values(SHAPE, TRAINING, "delta, kernel, float32", kind)[0] < 1e-6
    why = record.values(SHAPE, TRAINING, "delta, fla", "seconds as called")
    assert "its first call: " in why and "tensors must be on a CUDA device" in why
    record = read("gpu_models", out)
    places = [("2 x 16 tokens", "update", name) for name in ("delta_lm_wt103", "gated_delta_lm_wt103")]
    places += [(context, "decoding step", "softmax_lm_wt103") for context in ("context 1", "context 9")]
    assert {len(record.values(*place, "seconds as called")) for place in places} == {2}
    notes = read("gpu_laws", out).notes()
    assert notes["laws"].startswith("passed: 3 passed") and notes["memcheck"] and notes["racecheck"]


def test_publish(load, out, tmp_path):
    """The tables come from the CSVs of all calls. A failed check, or calls of two versions, are refused."""
    page, script = tmp_path / "benchmarks" / "RESULTS.md", tmp_path / "benchmarks" / "gpu.py"
    shutil.copytree(BENCHMARKS, page.parent)
    before = page.read_text()
    for part, old, new, refused in (
        ("laws", "passed: ", "failed: ", "nothing is published: laws failed: "),
        ("models", "a1b2c3d", "another", "commit must be the same in all calls, got ['a1b2c3d', 'another']"),
    ):
        shutil.copytree(out, tmp_path / part)
        path = tmp_path / part / f"gpu_{part}.csv"
        path.write_text(path.read_text().replace(old, new))
        done = run("publish", tmp_path / part, script=script)
        assert done.returncode == 1 and refused in done.stderr and page.read_text() == before
    done = run("publish", out, script=script)
    assert done.returncode == 0, done.stderr
    after = page.read_text()
    assert "commit a1b2c3d" in after and "laws passed: " in after and "faults gla_rule: is off" in after
    for name in ("delta, kernel", "delta, kernel, float32", SDPA):
        assert f"| {SHAPE} | {TRAINING} | {name} | - | " in after
    assert f"| delta, fla vs delta, kernel | {SHAPE} | - | not available" in after


def test_without_time_all_is_named(load, checked, tmp_path):
    assert run("measure", tmp_path, "--seconds", "0", **checked).returncode == 0
    record = load("record").Record.read("gpu_measure", tmp_path)
    assert "no time was left for it" in record.values(SHAPE, TRAINING, "delta, kernel")


def test_the_cases_of_the_sanitizer_run(checked, tmp_path):
    done = run("cases", tmp_path, **checked)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 13, done.stderr
    assert "(1, 2, 2100, 128, 128)" in done.stdout and "nan" not in done.stdout


def test_jobs_end_in_time_and_say_why(load):
    jobs = {"hangs": (time.sleep, 99), "fails": (abs, "x"), "works": (int, "1")}
    found = {"hangs": "TimeoutError()", "fails": """TypeError("bad operand type for abs(): 'str'")"""}
    assert load("gpu").run(jobs, 12, 3) == found


@pytest.mark.parametrize("index, bytes_us, flops_us", [(0, 16.5, 3.2), (1, 29, 11), (2, 173, 136), (3, 345, 381)])
def test_floors_are_those_of_the_arithmetic(load, index, bytes_us, flops_us):
    """The delta rule's training step in bfloat16 at 4.3 TB/s and 790 TFLOP/s, and a decoding step, by hand."""
    gpu, place = load("gpu"), ("delta", TRAINING, load("gpu").SHAPES[index], 2)
    assert 1e6 * gpu.least_seconds(*place, 4.3e12, 1e99) == pytest.approx(bytes_us, rel=0.04)
    assert 1e6 * gpu.least_seconds(*place, 1e99, 790e12) == pytest.approx(flops_us, rel=0.04)
    # Its state twice, and two bytes for each number of q, k, v, out and beta.
    assert gpu.least_seconds("delta", "decoding step", (2, 3, 1, 16, 8), 2, 1, 1e99) == 6 * (8 * 16 * 8 + 2 * 49)


def test_the_script_installs_from_a_folder_of_wheels_and_says_what_it_takes(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\n')
    python.chmod(0o755)
    (tmp_path / "a.whl").touch()

    def call(*words):
        environment = {**os.environ, "PYTHON": str(python)}
        return subprocess.run(["bash", BENCHMARKS / "gpu.sh", *words], env=environment, capture_output=True, text=True)

    assert "must be wheels, measure, models, laws, publish or build, got 'all'" in call("all").stderr
    assert call("laws", "--wheels", str(tmp_path), "--seconds", "9").returncode == 0
    install, _, last = (tmp_path / "calls").read_text().splitlines()
    assert "--no-index --no-deps" in install and last == f"{BENCHMARKS}/gpu.py laws --seconds 9"
