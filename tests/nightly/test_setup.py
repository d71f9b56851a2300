"""The installed files (setup.py), and the script that installs it (recipes/setup.sh, recipes/env.sh)."""

import email
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SCRIPTS = [ROOT / ".ci/run", *sorted(ROOT.glob("tests/*.sh")), *sorted(ROOT.glob("recipes/**/*.sh"))]
COMMANDS = [
    "fwp-add-layer",
    "fwp-convert",
    "fwp-eval-lm",
    "fwp-export",
    "fwp-harness",
    "fwp-info",
    "fwp-linearize",
    "fwp-plot",
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the sdist, built while importing torch is an error."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("fairseq_fwp", "cuda_ext"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    (out / "torch.py").write_text("raise SystemExit('setup.py imports torch')")
    build = "import sys; from setuptools import build_meta as b; o = sys.argv[1]; b.build_sdist(o); b.build_wheel(o)"
    how = {"check": True, "cwd": source, "env": os.environ | {"PYTHONPATH": str(out)}, "stdout": subprocess.DEVNULL}
    subprocess.run([sys.executable, "-c", build, out], **how)
    return out


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def metadata(wheel, name):
    (path,) = (path for path in wheel.namelist() if path.endswith(f"/{name}"))
    return wheel.read(path).decode()


def test_requirements(wheel):
    found = [*map(Requirement, email.message_from_string(metadata(wheel, "METADATA")).get_all("Requires-Dist"))]

    def required(extra="", python="3.11"):
        environment = {"python_version": python, "extra": extra}
        return {one.name: one.specifier for one in found if not one.marker or one.marker.evaluate(environment)}

    for python in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        assert required(python=python)["fairseq-fixed"] == "==0.12.3.1" and "fairseq" not in required(python=python)
    plain = required()
    assert {"torch", "numpy", "ninja", "setuptools", "sacrebleu", "sacremoses", "subword-nmt"} <= plain.keys()
    assert [version in plain["torch"] for version in ("2.3", "2.4", "2.13.1", "3.0")] == [False, True, True, True]
    assert not {"matplotlib", "pytest"} & plain.keys()
    assert "matplotlib" in required("plots") and {"tensorboardX", "wandb"} <= required("logging").keys()
    assert {"pytest", "ruff", "mypy", "hypothesis"} <= required("dev").keys()


def test_every_module_and_kernel_source_is_shipped(wheel, built):
    paths = [path for path in ROOT.glob("cuda_ext/**/*") if path.suffix in (".h", ".cuh", ".cpp", ".cu")]
    kernels = {str(path.relative_to(ROOT)) for path in paths}
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("fairseq_fwp/**/*.py")}
    names = set(wheel.namelist())
    assert kernels and {f"fairseq_fwp/{name}" for name in kernels} | modules <= names
    assert not [name for name in names if name.startswith(("tests/", "recipes/", "cuda_ext/"))]
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert kernels | {"setup.py", "pyproject.toml", "LICENSE"} <= {x.partition("/")[2] for x in archive.getnames()}


def test_commands_exist(wheel):
    lines = [line.split(" = ") for line in metadata(wheel, "entry_points.txt").splitlines() if "=" in line]
    assert [name for name, _ in lines] == COMMANDS
    assert all((ROOT / f"{place.split(':')[0].replace('.', '/')}.py").exists() for _, place in lines)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_script_is_valid_bash(script):
    subprocess.run(["bash", "-n", script], check=True)


def stub(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def run(tmp_path):
    """A function run(script, *arguments, **environment) in a path with a space; stubs are first on PATH."""
    for name in ("setup.py", "recipes/setup.sh", "recipes/env.sh"):
        (tmp_path / "a checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "a checkout" / name)
    plain = {name: x for name, x in os.environ.items() if name not in ("VIRTUAL_ENV", "CXX") and "CONDA" not in name}
    plain |= {"PATH": f"{tmp_path}/stubs:{plain['PATH']}"}

    def run(script, *arguments, **environment):
        command = ["bash", run.checkout / script, *arguments]
        return subprocess.run(command, cwd="/", env=plain | environment, capture_output=True, text=True)

    run.checkout, run.stubs = tmp_path / "a checkout", tmp_path / "stubs"
    run.stubs.mkdir()
    return run


# What python3 does, arguments, and words of the sentence.
PYTHON = shlex.quote(sys.executable)
REFUSALS = [
    *((f"echo {version}", "", f"Python {version}, but 3.10 or later") for version in ("3.8", "3.9", "2.7")),
    ("exit 127", "", "python3 does not run: install Python"),
    (f'case "$*" in *venv*) exit 1 ;; esac; exec {PYTHON} "$@"', "", "venv module is missing: install it"),
    (f'exec {PYTHON} "$@"', "train", "an extra must be one of plots dev onnx tokenizers transformers peers, got"),
    (f'exec {PYTHON} "$@"', "plots", "g++ is missing: install it"),
]


@pytest.mark.parametrize("python, extra, words", REFUSALS)
def test_a_machine_that_cannot_be_set_up(run, python, extra, words):
    """It is refused in one line, and nothing is made."""
    stub(run.stubs / "python3", python)
    if "g++" in words:
        for name in ("awk", "bash", "cat", "cksum", "df", "dirname", "grep"):
            (run.stubs / name).symlink_to(shutil.which(name))
    done = run("recipes/setup.sh", *extra.split(), **({"PATH": str(run.stubs)} if "g++" in words else {}))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("setup: ") and line.endswith(".") and words in line
    assert sorted(path.name for path in run.checkout.iterdir()) == ["recipes", "setup.py"]


def test_an_environment_of_another_checkout_or_with_another_fairseq_is_left_alone(run, tmp_path):
    env, other = tmp_path / "env", tmp_path / "other/fairseq_fwp"
    other.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    (site,) = env.glob("lib/python3.*/site-packages")
    (site / "fairseq_fwp").symlink_to(other)
    done = run("recipes/setup.sh", VIRTUAL_ENV=str(env))
    assert done.returncode == 1 and f"runs the fairseq_fwp of {other.parent}: deactivate it" in done.stderr
    (site / "fairseq_fwp").unlink()
    (site / "fairseq-0.12.2.dist-info").mkdir()
    (site / "fairseq-0.12.2.dist-info/METADATA").write_text("Name: fairseq\nVersion: 0.12.2\n")
    done = run("recipes/setup.sh", VIRTUAL_ENV=str(env))
    assert done.returncode == 1 and "env has fairseq==0.12.2, and fairseq-fixed==0.12.3.1 would replace" in done.stderr
    assert [*site.iterdir()] == [site / "fairseq-0.12.2.dist-info"]


def test_env_gives_root_and_run(run):
    stub(run.checkout / "recipes/setup.sh", 'echo "extras: $*"')
    stub(run.checkout / ".venv/bin/activate", "activated=yes")
    stub(
        run.checkout / "recipes/x/run.sh",
        """set -euo pipefail
        . "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" ${NONE-plots dev}
        echo "$root, $activated, $GOMP_SPINCOUNT, $*"
        run echo 'two words'
        run false
        echo not reached""",
    )
    done = run("recipes/x/run.sh", "train", "--lr", "1")
    assert done.stdout == f"extras: plots dev\n{run.checkout}, yes, 100000, train --lr 1\ntwo words\n"
    assert done.stderr == "+ echo two\\ words\n+ false\n" and done.returncode == 1
    stub(run.checkout / "recipes/setup.sh", "exit 3")
    done = run("recipes/x/run.sh")
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.parametrize(
    "script", [*sorted(ROOT.glob("recipes/*/run.sh")), ROOT / "tests/run.sh"], ids=lambda x: x.parent.name
)
def test_help_is_the_header_and_sets_nothing_up(tmp_path, script):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (tmp_path / "recipes/setup.sh").write_text("exit 7\n")
    copy = tmp_path / script.relative_to(ROOT)
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(script, copy)
    for arguments in (["--help"], ["operators" if script.parent.name == "benchmarks" else "all", "-h"]):
        shown = subprocess.run(["bash", copy, *arguments], capture_output=True, text=True)
        assert shown.returncode == 0 and not shown.stderr and "shellcheck" not in shown.stdout
        assert script.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ") in shown.stdout
    assert subprocess.run(["bash", copy], capture_output=True).returncode == 7
