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
PYTHON = shlex.quote(sys.executable)
SCRIPTS = [ROOT / ".ci/run", *sorted(ROOT.glob("tests/*.sh")), *sorted(ROOT.glob("recipes/**/*.sh"))]


# ---- the package


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
    subprocess.run(
        [sys.executable, "-c", build, out],
        check=True, cwd=source, env={**os.environ, "PYTHONPATH": str(out)}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def requirements(wheel, version, extra=""):
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    required = map(Requirement, email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist"))
    environment = {"python_version": version, "extra": extra}
    return {one.name: one.specifier for one in required if not one.marker or one.marker.evaluate(environment)}


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_one_fairseq_for_every_python(wheel, version):
    required = requirements(wheel, version)
    assert required["fairseq-fixed"] == "==0.12.3.1" and "fairseq" not in required


def test_requirements(wheel):
    plain = requirements(wheel, "3.11")
    assert {"torch", "numpy", "ninja", "setuptools", "sacrebleu", "sacremoses", "subword-nmt"} <= plain.keys()
    assert [version in plain["torch"] for version in ("2.3", "2.4", "2.13.1", "2.14")] == [False, True, True, False]
    assert "matplotlib" not in plain and "pytest" not in plain
    assert "matplotlib" in requirements(wheel, "3.11", "plots")
    assert {"tensorboardX", "wandb"} <= requirements(wheel, "3.11", "logging").keys()
    assert {"pytest", "ruff", "mypy", "hypothesis"} <= requirements(wheel, "3.11", "dev").keys()


def kernel_sources():
    paths = [path for path in ROOT.glob("cuda_ext/**/*") if path.suffix in (".h", ".cuh", ".cpp", ".cu")]
    return {str(path.relative_to(ROOT)) for path in paths}


def test_wheel_ships_every_kernel_source(wheel):
    assert kernel_sources()
    assert {f"fairseq_fwp/{name}" for name in kernel_sources()} <= set(wheel.namelist())
    assert not [name for name in wheel.namelist() if name.startswith(("tests/", "recipes/", "cuda_ext/"))]


def test_sdist_ships_every_kernel_source(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert kernel_sources() | {"setup.py", "pyproject.toml", "LICENSE"} <= names


def test_wheel_ships_every_module(wheel):
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("fairseq_fwp/**/*.py")}
    assert modules - set(wheel.namelist()) == set()


def test_commands_exist(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    lines = [line for line in wheel.read(name).decode().splitlines() if "=" in line]
    assert [line.split(" = ")[0] for line in lines] == [
        "fwp-add-layer",
        "fwp-convert",
        "fwp-eval-lm",
        "fwp-info",
        "fwp-plot",
    ]
    for line in lines:
        module = line.split(" = ")[1].split(":")[0]
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()


# ---- the scripts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_script_is_valid_bash(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.fixture
def checkout(tmp_path):
    """A checkout to set up, in a path with a space, and a folder `stubs` at the start of PATH."""
    root = tmp_path / "a checkout"
    (root / "recipes").mkdir(parents=True)
    (tmp_path / "stubs").mkdir()
    for name in ("setup.py", "recipes/setup.sh", "recipes/env.sh"):
        shutil.copy(ROOT / name, root / name)
    return root


def stub(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def environment(checkout: Path, **more: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VIRTUAL_ENV", "CXX", "TORCH_SPEC") and not name.startswith("CONDA")
    }
    return {**kept, "PATH": f"{checkout.parent}/stubs:{kept['PATH']}", **more}


def set_up(checkout: Path, *extras: str, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", checkout / "recipes/setup.sh", *extras],
        cwd="/", env=environment(checkout, **more), capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def assert_refused(done: subprocess.CompletedProcess, checkout: Path, *words: str) -> None:
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("setup: ") and line.endswith(".")
    assert all(word in line for word in words), line
    assert sorted(path.name for path in checkout.iterdir()) == ["recipes", "setup.py"]


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.14", "2.7"])
def test_refuses_another_python(checkout, version):
    stub(checkout.parent / "stubs/python3", f"echo {version}")
    assert_refused(set_up(checkout), checkout, f"Python {version}", "3.10 to 3.13")


def test_refuses_without_python(checkout):
    stub(checkout.parent / "stubs/python3", "exit 127")
    assert_refused(set_up(checkout), checkout, "python3 does not run", "install Python")


def test_refuses_without_venv_module(checkout):
    stub(checkout.parent / "stubs/python3", f'case "$*" in *venv*) exit 1 ;; esac; exec {PYTHON} "$@"')
    assert_refused(set_up(checkout), checkout, "venv module is missing", "install it")


def test_refuses_without_compiler(checkout):
    stubs = checkout.parent / "stubs"
    for name in ("awk", "bash", "cat", "cksum", "df", "dirname", "grep"):
        (stubs / name).symlink_to(shutil.which(name))
    stub(stubs / "python3", f'exec {PYTHON} "$@"')
    assert_refused(set_up(checkout, PATH=str(stubs)), checkout, "g++ is missing", "install it")


def test_refuses_a_full_disk(checkout):
    stub(checkout.parent / "stubs/df", "echo Filesystem; echo /dev/x 9000000 7000000 2000000 78% /")
    assert_refused(set_up(checkout), checkout, "has 1 GB free", "3 GB are needed", "make room")


def test_refuses_an_unknown_extra(checkout):
    assert_refused(set_up(checkout, "train"), checkout, "no extra 'train'", "plots, dev or peers")


@pytest.fixture
def active(checkout):
    """An active environment whose pip only records its calls, and fails if the file `broken` exists.

    It has torch if the file `torch` exists; pip makes that file when it installs torch, and refuses `+cpu`. With a file
    `torchaudio` or `alignment_train_cpu_binding`, that module cannot be loaded. For peers it records whether nvcc is
    found, and fails if the file `no peers` exists.
    """
    env = checkout.parent / "env"
    stub(
        env / "bin/python",
        f"""case "$*" in
          "-m pip --version") ;;
          "-m pip "*+cpu*) echo "$*" >>"{env}/calls"; exit 1 ;;
          "-m pip "*" torch"*) echo "$*" >>"{env}/calls"; touch "{env}/torch" ;;
          "-m pip "*fast-transformers*)
            echo "$* nvcc=$(command -v nvcc)" >>"{env}/calls"; [ ! -e "{env}/no peers" ] ;;
          "-m pip "*) echo "$*" >>"{env}/calls"; cat "{env}/broken" 2>/dev/null; [ ! -e "{env}/broken" ] ;;
          *"import torchaudio"*) [ ! -e "{env}/torchaudio" ] ;;
          *alignment_train*) [ ! -e "{env}/alignment_train_cpu_binding" ] ;;
          *"import version"*) echo 2.13.0+local ;;
          *cuda.is_available*) cat "{env}/cuda" 2>/dev/null || true ;;
          *"import torch"*) [ -e "{env}/torch" ] ;;
          *) exec {PYTHON} "$@" ;;
        esac""",
    )
    (env / "torch").touch()
    return env


def calls(env: Path) -> list[str]:
    return (env / "calls").read_text().splitlines()


@pytest.mark.parametrize("kind", ["venv", "conda"])
def test_keeps_the_torch_of_an_active_environment(checkout, active, kind):
    conda = {"CONDA_DEFAULT_ENV": "mine", "CONDA_PREFIX": str(active)}
    done = set_up(checkout, "plots", **(conda if kind == "conda" else {"VIRTUAL_ENV": str(active)}))
    assert done.returncode == 0, done.stderr
    assert not [call for call in calls(active) if " torch" in call]
    assert all("--constraint" in call for call in calls(active))
    assert (active / ".fairseq_fwp/constraints.txt").read_text() == "torch==2.13.0+local\n"
    assert calls(active)[-1].endswith(f"--editable {checkout}[plots]")
    assert not (checkout / ".venv").exists()


def test_an_environment_of_another_checkout_is_left_alone(checkout, active):
    site = active / "lib/python3.11/site-packages"
    other = checkout.parent / "other/fairseq_fwp"
    for folder in (site, other):
        folder.mkdir(parents=True)
    (site / "fairseq_fwp").symlink_to(other)
    done = set_up(checkout, VIRTUAL_ENV=str(active))
    assert_refused(done, checkout, str(other.parent), "deactivate it")
    other.rmdir()  # a checkout that is gone has no claim
    assert set_up(checkout, VIRTUAL_ENV=str(active)).returncode == 0


def test_base_of_conda_is_left_alone(checkout, active):
    stub(checkout.parent / "stubs/python3", "echo 3.9")
    done = set_up(checkout, CONDA_DEFAULT_ENV="base", CONDA_PREFIX=str(active))
    assert_refused(done, checkout, "python3 is Python 3.9")
    assert not (active / "calls").exists()


def test_without_a_cpu_build_says_what_comes_instead(checkout, active):
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        pytest.skip("looks for a CPU build only where there is no NVIDIA driver")
    (active / "torch").unlink()
    stub(checkout.parent / "stubs/df", "echo Filesystem; echo /dev/x 90000000 7000000 20000000 8% /")
    done = set_up(checkout, VIRTUAL_ENV=str(active))
    assert done.returncode == 0 and "several GB of CUDA packages" in done.stderr
    assert [call.split()[-2] for call in calls(active)[:2]] == ["torch==2.13.0+cpu", "torch==2.13.0"]


def test_torch_spec_chooses_torch(checkout, active):
    (active / "torch").unlink()
    stub(checkout.parent / "stubs/df", "echo Filesystem; echo /dev/x 90000000 7000000 20000000 8% /")
    assert set_up(checkout, VIRTUAL_ENV=str(active), TORCH_SPEC="torch==2.9.1").returncode == 0
    assert calls(active)[0].split()[-2] == "torch==2.9.1"


@pytest.mark.parametrize(
    ("broken", "more"),
    [
        ("", []),
        ("torchaudio", ["-m pip uninstall --yes torchaudio"]),
        ("alignment_train_cpu_binding", ["--force-reinstall --no-cache-dir --no-binary fairseq-fixed"]),
    ],
)
def test_what_does_not_fit_the_torch_is_removed_or_built_anew(checkout, active, broken, more):
    (active / (broken or "nothing")).touch()
    assert set_up(checkout, VIRTUAL_ENV=str(active)).returncode == 0
    found = [call for call in calls(active) if "uninstall" in call or "--force-reinstall" in call]
    assert len(found) == len(more) and all(map(str.__contains__, found, more))
    built = [call for call in calls(active) if "fairseq-fixed" in call]
    assert all(call.endswith("--no-deps --no-build-isolation fairseq-fixed==0.12.3.1") for call in built)


@pytest.mark.parametrize(
    ("cuda", "nvcc", "installed", "said"),
    [
        ("", "", False, ""),  # no GPU
        ("99.0", "99.2", False, ""),
        ("99.0", "12.8", True, "installing nvcc"),
        ("10.8", "99.0", False, "no nvcc of CUDA 10, and pip has none: install that CUDA toolkit"),
    ],
)
def test_nvcc_of_pytorch_for_a_gpu(checkout, active, cuda, nvcc, installed, said):
    (active / "cuda").write_text(cuda)
    stub(checkout.parent / "stubs/nvcc", f"echo 'Cuda compilation tools, release {nvcc}, V{nvcc}.1'")
    done = set_up(checkout, VIRTUAL_ENV=str(active), CUDA_HOME="", CUDA_PATH="")
    assert done.returncode == 0 and said in done.stderr
    packages = [f"nvidia-{part}==99.0.*" for part in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-cccl")]
    assert (calls(active)[-1].split()[-4:] == packages) == installed


def test_second_run_does_nothing(checkout, active):
    set_up(checkout, "plots", "dev", VIRTUAL_ENV=str(active))
    before = calls(active)
    for extras in ((), ("dev",), ("plots", "dev")):
        done = set_up(checkout, *extras, VIRTUAL_ENV=str(active))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert calls(active) == before


def test_further_extra_keeps_the_others(checkout, active):
    set_up(checkout, "dev", VIRTUAL_ENV=str(active))
    set_up(checkout, "plots", VIRTUAL_ENV=str(active))
    assert calls(active)[-1].endswith("[plots,dev]")


def test_peers_are_built_without_nvcc_and_do_not_hold_up_the_rest(checkout, active):
    stub(checkout.parent / "stubs/nvcc", "")
    (active / "no peers").touch()
    done = set_up(checkout, "dev", "peers", VIRTUAL_ENV=str(active))
    assert done.returncode == 1 and "pytorch-fast-transformers" in done.stderr.splitlines()[-1]
    before = calls(active)
    assert before[-1].endswith("nvcc=") and before[-2].endswith("[dev]")
    assert set_up(checkout, "dev", VIRTUAL_ENV=str(active)).returncode == 0
    assert calls(active) == before
    assert set_up(checkout, "peers", VIRTUAL_ENV=str(active)).returncode == 1
    before = calls(active)
    assert set_up(checkout, "dev", VIRTUAL_ENV=str(active)).returncode == 0
    assert calls(active) == before
    (active / "no peers").unlink()
    assert set_up(checkout, "peers", VIRTUAL_ENV=str(active)).returncode == 0
    assert set_up(checkout, "dev", "peers", VIRTUAL_ENV=str(active)).stderr == ""


def test_changed_requirements_are_installed(checkout, active):
    set_up(checkout, VIRTUAL_ENV=str(active))
    before = len(calls(active))
    (checkout / "setup.py").open("a").write("# changed\n")
    set_up(checkout, VIRTUAL_ENV=str(active))
    assert len(calls(active)) == 2 * before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ERROR: No matching distribution found for x", "No matching distribution found for x"),
        ("WARNING: Retrying (Retry(total=0, connect=None)) after ...", "check the network"),
    ],
)
def test_failure_of_pip_is_said_and_redone(checkout, active, words, said):
    (active / "broken").write_text(words)
    done = set_up(checkout, VIRTUAL_ENV=str(active))
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1]
    (active / "broken").unlink()
    assert set_up(checkout, VIRTUAL_ENV=str(active)).returncode == 0
    assert calls(active)[-1].endswith(f"--editable {checkout}")


def test_two_runs_at_once_work_once(checkout, active):
    command = ["bash", checkout / "recipes/setup.sh"]
    env = environment(checkout, VIRTUAL_ENV=str(active))
    runs = [subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [run.wait() for run in runs] == [0, 0]
    assert len([call for call in calls(active) if "--editable" in call]) == 1


def test_env_gives_root_and_run(checkout):
    stub(checkout / "recipes/setup.sh", 'echo "extras: $*"')
    stub(checkout / ".venv/bin/activate", "activated=yes")
    stub(
        checkout / "recipes/x/run.sh",
        """set -euo pipefail
        . "$(dirname -- "${BASH_SOURCE[0]}")/../env.sh" ${NONE-plots dev}
        echo "$root, $activated, $GOMP_SPINCOUNT, $*"
        run echo 'two words'
        run false
        echo not reached""",
    )
    command = ["bash", checkout / "recipes/x/run.sh", "train", "--lr", "1"]
    done = subprocess.run(command, cwd="/", env=environment(checkout), capture_output=True, text=True)
    assert done.stdout == f"extras: plots dev\n{checkout}, yes, 100000, train --lr 1\ntwo words\n"
    assert done.stderr == "+ echo two\\ words\n+ false\n"
    assert done.returncode == 1


def test_env_passes_on_a_failed_set_up(checkout):
    stub(checkout / "recipes/setup.sh", "exit 3")
    command = ["bash", "-euc", '. "$0" plots; echo not reached', checkout / "recipes/env.sh"]
    done = subprocess.run(command, env=environment(checkout), capture_output=True, text=True)
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
        assert shown.returncode == 0 and not shown.stderr
        assert script.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ") in shown.stdout
        assert "shellcheck" not in shown.stdout and not shown.stderr
    assert subprocess.run(["bash", copy], capture_output=True).returncode == 7
