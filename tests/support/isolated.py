"""Run a script in a fresh Python that has only fairseq_fwp.ops, in a separate environment."""

import os
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "fairseq_fwp"
# The package itself imports fairseq, which takes seconds and is not tested here.
PREAMBLE = f"""
import sys, types
package = types.ModuleType("fairseq_fwp")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["fairseq_fwp"] = package
"""


def start_isolated(script: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + script],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_isolated(script: str, **environment: str) -> subprocess.CompletedProcess:
    process = start_isolated(script, **environment)
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)
