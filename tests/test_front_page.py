"""README.md: its length, and its examples, executed as they stand there."""

import contextlib
import io
import re
import subprocess
from pathlib import Path

import pytest
from test_contributing import environment

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def block(kind: str, beginning: str) -> str:
    """Return the one block of a language that begins with these words."""
    (found,) = re.findall(rf"^```{kind}\n({re.escape(beginning)}.*?)^```", TEXT, re.M | re.S)
    return found


def test_it_is_one_page():
    assert len(TEXT.splitlines()) <= 130


def test_the_lines_of_python_print_what_they_say():
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(block("python", "import torch"), {})
    assert f"# {said.getvalue().strip()}\n" in TEXT


@pytest.mark.slow
def test_training_evaluation_and_generation(tmp_path):
    script = "set -euo pipefail\n" + block("bash", "python - <<").replace("--max-update 400", "--max-update 20")
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "num_updates 20" in done.stdout and "Perplexity" in done.stdout and "\nD-0\t" in done.stdout
