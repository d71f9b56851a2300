"""Checks before our measurements: compute-sanitizer on small cases, then the tests on the GPU.

`python gpu_checks.py` only runs the cases, under compute-sanitizer. A check gives a verdict, a text for the record:
"passed: ...", "failed: ...", or the reason why it is neither.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import torch
from inputs import call, draw, training_step
from record import HERE, say

PASSED, FAILED = "passed", "failed"
LAWS, TOOLS = "laws", ("memcheck", "racecheck")
ERRORS_FOUND = 86  # compute-sanitizer's status then; with any other, it or the cases could not run
# All kinds of kernels: on tensor cores at each size of a head, scans, ragged sizes, every input of the family.
CASES = [
    ("sum", (1, 2, 70, 16, 16), torch.bfloat16),
    ("sum", (2, 1, 40, 24, 40), torch.float32),
    ("delta", (1, 2, 70, 16, 16), torch.bfloat16),
    ("delta", (1, 1, 95, 64, 40), torch.bfloat16),
    ("delta", (1, 1, 77, 128, 33), torch.bfloat16),
    ("delta", (2, 1, 40, 24, 40), torch.float32),
    ("gla, decay per key dimension", (1, 2, 40, 32, 16), torch.float32),
    ("gla, decay per key dimension", (1, 2, 70, 16, 16), torch.bfloat16),
    ("gla, decay per key dimension", (1, 1, 77, 128, 33), torch.bfloat16),
    ("decay", (1, 2, 40, 24, 17), torch.float32),
    ("gated", (1, 2, 70, 16, 16), torch.bfloat16),
    ("gated", (1, 1, 77, 128, 33), torch.bfloat16),
    ("gated_delta, decay per head", (1, 2, 70, 64, 64), torch.bfloat16),
    ("gated_delta, decay per key dimension", (1, 2, 70, 64, 64), torch.bfloat16),
    ("gated_delta, decay per key dimension", (1, 1, 77, 128, 33), torch.bfloat16),
    ("delta_product, 2 steps", (1, 2, 33, 16, 16), torch.float32),
    ("rwkv7", (1, 2, 40, 32, 32), torch.float32),
]


def limited(command, seconds, log):
    """Return the exit status of a command, None after so many seconds; kill its children. log: file of its output."""
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen([*map(str, command)], stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_line(log):
    return (Path(log).read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"])[-1].strip(
        "= "
    )[:200]


def verdict(command, seconds, log, failed=1):
    """Return the verdict of a command that exits with 0 for success, and with `failed` for a mistake it found."""
    say(f"at most {seconds:.0f} s, output in {log}: {' '.join(map(str, command))}")
    status = limited(command, seconds, log)
    if status is None:
        return f"not finished in {seconds:.0f} s"
    word = {0: PASSED, failed: FAILED}.get(status, f"ended with status {status}")
    return f"{word}: {last_line(log)}"


def sanitize(tool, folder, seconds):
    """Run the cases under a tool of compute-sanitizer, which only watches our kernels."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not program:
        return "not run: there is no compute-sanitizer"
    watched = ["--kernel-name", "kernel_substring=fwp", "--target-processes", "application-only"]
    options = [
        "--tool",
        tool,
        "--error-exitcode",
        ERRORS_FOUND,
        "--report-api-errors",
        "no",
        "--launch-timeout",
        "0",
        *watched,
    ]
    return verdict([program, *options, sys.executable, __file__], seconds, folder / f"gpu_{tool}.txt", ERRORS_FOUND)


def laws(folder, seconds):
    """Run the tests that need a GPU, in several processes if pytest can: they are thousands of small launches."""
    workers = ["-n", "auto", "--maxprocesses", "8"] if find_spec("xdist") else []
    tests = [HERE.parents[1] / "tests" / name for name in ("laws", "ops")]
    options = ["-v", "--tb=short", "-k", "cuda", f"--junitxml={folder / 'gpu_laws.xml'}", *workers]
    return verdict([sys.executable, "-m", "pytest", *tests, *options], seconds, folder / "gpu_laws.txt")


def run_cases(device="cuda"):
    for form, shape, dtype in CASES:
        # Drawn on the CPU, so that few other kernels run.
        inputs = [x.to(device).requires_grad_() for x in draw(form, shape, dtype).values()]
        out = torch.ones(*shape[:3], shape[-1], dtype=dtype).to(device)
        found = training_step(call(form), inputs, out)
        print(form, shape, *(f"{x.float().norm().item():.3g}" for x in found), flush=True)


if __name__ == "__main__":
    run_cases()
