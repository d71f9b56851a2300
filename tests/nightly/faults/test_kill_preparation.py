"""Builds of kernels and preparations of texts are killed at random moments: the next start succeeds."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from isolated import run_isolated, start_isolated
from test_library import USE, cache, calls, compiler, library_folder  # noqa: F401  (a fixture)
from test_security import LANGUAGE_MODEL, RECIPES

pytestmark = pytest.mark.slow
KILLS = 6


def chooser():
    return random.Random(int(os.environ.get("FWP_TEST_SEED", "0")))


def test_builds(tmp_path, compiler):  # noqa: F811
    """The stand-in for the compiler takes longer than the start of the process."""
    environment = {"CXX": compiler, "COMPILER_SECONDS": "2", **cache(tmp_path)}
    start = time.monotonic()
    run_isolated(USE, **environment)
    longest = time.monotonic() - start
    library = library_folder(tmp_path) / "kernels.so"
    whole = library.read_bytes()
    for moment in sorted(chooser().uniform(0, longest) for _ in range(KILLS)):
        library.unlink(missing_ok=True)
        process = start_isolated(USE, **environment)
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not library.exists() or library.read_bytes() == whole
    assert run_isolated(USE, **environment).stdout == "True\n"
    assert library.read_bytes() == whole and {path.name for path in library.parent.iterdir()} == {"kernels.so", "lock"}
    assert calls(tmp_path) > 2  # some were killed during the build


def contents(folder):
    """Return the prepared files by path, without logs, which have times."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".log")
    return {path.relative_to(folder): path.read_bytes() for path in files}


def prepare(folder, out):
    """Start a recipe's preparation of a text in a separate process group."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [sys.executable, RECIPES / "driver", LANGUAGE_MODEL[0], "--recipe", RECIPES / "peps", *LANGUAGE_MODEL[1:]]
    command += ["--", "prepare", "--data", folder, "--out", out]
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(list(map(str, command)), env=environment, start_new_session=True, **silent)


def test_texts(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for split, lines in (("train", 300), ("valid", 30), ("test", 30)):
        words = chooser()
        (text / f"{split}.txt").write_text("".join(f"the word {words.randrange(99)} and more\n" for _ in range(lines)))
    start = time.monotonic()
    assert prepare(text, tmp_path / "whole").wait() == 0
    longest = time.monotonic() - start
    for moment in sorted(chooser().uniform(0, longest) for _ in range(KILLS)):
        process = prepare(text, tmp_path / "killed")
        time.sleep(moment)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert prepare(text, tmp_path / "killed").wait() == 0
    assert contents(tmp_path / "killed" / "data") == contents(tmp_path / "whole" / "data")
    assert {path.name for path in (tmp_path / "killed").iterdir()} == {"data"}
