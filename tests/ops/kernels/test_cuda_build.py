"""Build the CUDA kernels on a machine without a GPU: errors, the arguments of nvcc, and compilation of all kernels.

Stand-ins for nvcc and the C++ compiler give the same answers and write their output files; PyTorch reports GPUs.
"""

import os
import re
import shutil
import subprocess
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from support.isolated import run_isolated
from support.pairwise import looped
from support.subjects import sample_inputs

from fairseq_fwp import ops
from fairseq_fwp.ops.kernels import backend, build, cuda
from fairseq_fwp.ops.kernels import library as loading

H200, A100, T4 = ("NVIDIA H200", (9, 0)), ("NVIDIA A100", (8, 0)), ("Tesla T4", (7, 5))
LIMITS = build._source_folder() / "cuda" / "launchers.h"
SOURCES = [f"bindings/{name}" for name in ("autograd.h", "cuda.cpp", "arguments.h")]
SOURCES += [f"cuda/{name}" for name in ("kernels.cu", "recurrent.cuh", "launchers.h")]


class Machine:
    """A folder with GPUs, a toolkit, a C++ compiler, sources and an empty cache. `calls` compile or link."""

    def __init__(self, monkeypatch, folder):
        self.patch, self.folder, self.loaded = monkeypatch, folder, []
        for name in ("CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "CC", *build.NVCC_VARIABLES):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("FWP_CACHE_DIR", str(folder / "a cache"))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.ops, "load_library", self.loaded.append)
        self.sources = folder / "the sources"
        monkeypatch.setattr(build, "_source_folder", lambda: self.sources)
        for name in SOURCES:
            (self.sources / name).parent.mkdir(parents=True, exist_ok=True)
            (self.sources / name).write_text("1")
        self.see(H200)
        self.install("13.0")
        monkeypatch.setenv("CXX", str(self.program(folder / "a compiler", "--version", "exit 0")).replace(" ", "\\ "))

    def program(self, path, question, answer, compiles="exit 0"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"""#!/bin/sh
            case $1 in {question}) {answer}; exit ;; esac
            echo "${{0##*/}} $@" >> '{self.folder}/calls.txt'
            while [ $# -gt 0 ]; do
              case $1 in -o) echo "$0" > "$2" ;; -MF) : > "$2" ;; esac
              shift
            done
            {compiles}
            """
        )
        path.chmod(0o755)
        return path

    def see(self, *gpus):
        self.patch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        self.patch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        self.patch.setattr(torch.cuda, "get_device_name", lambda i: gpus[i][0])
        self.patch.setattr(torch.cuda, "get_device_capability", lambda i: gpus[i][1])

    def install(self, release, compiles="exit 0"):
        words = f"echo 'Cuda compilation tools, release {release}, V{release}.88'"
        home = self.folder / f"cuda {release}"
        nvcc = self.program(home / "bin" / "nvcc", "--version | -dryrun", words, compiles)
        self.patch.setenv("CUDA_HOME", str(home))
        return nvcc

    @property
    def calls(self):
        path = self.folder / "calls.txt"
        return path.read_text().splitlines() if path.exists() else []

    def build(self):
        return loading._status("cuda", build=True)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def test_built_once_for_the_gpu_that_is_there(machine, monkeypatch):
    first = machine.build()
    assert first.built and machine.loaded == [first.path]
    kernels, binding, link = (
        next(call for call in machine.calls if part in call) for part in ("/kernels.cu", "/cuda.cpp", "-shared")
    )
    assert "-DFWP_AUTOGRAD_KEY=AutogradCUDA" in binding and "-gencode" not in binding
    assert kernels.startswith("nvcc") and kernels.count("-gencode") == 1
    assert "-gencode=arch=compute_90a,code=sm_90a" in kernels
    assert "-lc10_cuda" in link and "-lcudart" in link and link.endswith("kernels.so")
    assert not list(Path(first.path).parent.glob("build-*"))
    before = machine.calls
    monkeypatch.setenv("CUDA_HOME", str(machine.folder / "nowhere"))  # a cache serves machines without a toolkit
    assert machine.build() == first and machine.calls == before


# GPUs, TORCH_CUDA_ARCH_LIST, what the kernels are compiled for
# fmt: off
ARCHITECTURES = [
    ([A100, H200], "", ["compute_80,code=sm_80", "compute_90a,code=sm_90a"]),
    ([H200, H200], "", ["compute_90a,code=sm_90a"]),
    ([A100, T4], "", ["compute_80,code=sm_80"]),
    ([A100, H200], "native", ["compute_80,code=sm_80", "compute_90a,code=sm_90a"]),
    ([H200], "8.0;9.0a", ["compute_80,code=sm_80", "compute_90a,code=sm_90a"]),
    ([H200], "7.5 8.0+PTX", ["compute_80,code=sm_80", "compute_80,code=compute_80"]),
    ([("NVIDIA L4", (8, 9))], "8.0, 8.6", ["compute_80,code=sm_80", "compute_86,code=sm_86"]),
]
# fmt: on


@looped("gpus, listed, flags", ARCHITECTURES)
def test_flags_of_the_compiler_name_the_architectures(machine, monkeypatch, gpus, listed, flags):
    machine.see(*gpus)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert cuda.architecture_flags() == [f"-gencode=arch={flag}" for flag in flags]


INSTALL = "install the CUDA toolkit 13, or set CUDA_HOME to the folder where it is"
CPU, SEES = "or use the CPU", "PyTorch sees no NVIDIA GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"
OLD = "the kernels need a GPU of compute capability 8.0 or later, and Tesla T4 has 7.5; use another GPU, or the CPU"
OTHER = "nvcc must be of CUDA 13.0, as PyTorch {torch}, got {here}/cuda %s/bin/nvcc of CUDA %s; " + INSTALL
LISTED = (
    "TORCH_CUDA_ARCH_LIST must have the compute capability 9.0 of NVIDIA H200, got %r; add it to the list, or unset"
)
LISTED += " the variable"
UNKNOWN = OTHER % ("13.0", "(unknown release)")
# What is not as it should be on the machine, and the sentence.
# fmt: off
REFUSALS = [
    (lambda m: m.patch.setattr(torch.version, "cuda", None),
     f"PyTorch {{torch}} is built without CUDA; install one built for CUDA, {CPU}"),
    (lambda m: m.see(), f"{SEES}, {CPU}"),
    (lambda m: m.see(T4), OLD),
    (lambda m: m.patch.setenv("CUDA_HOME", f"{m.folder}/cuda 12.0"),
     "there is no nvcc in {here}/cuda 12.0/bin; " + INSTALL),
    (lambda m: (m.patch.delenv("CUDA_HOME"), m.patch.setattr(cuda.shutil, "which", lambda name: None)),
     "there is no nvcc on PATH; " + INSTALL),
    (lambda m: m.install("12.8"), OTHER % ("12.8", "12.8")),
    (lambda m: m.install("14.1"), OTHER % ("14.1", "14.1")),
    (lambda m: m.install("13.0").write_text("#!/bin/sh\nexit 1\n"), UNKNOWN),
    (lambda m: m.install("13.0").write_text("not a program"), UNKNOWN),
    *((lambda m, listed=listed: m.patch.setenv("TORCH_CUDA_ARCH_LIST", listed), LISTED % listed)
      for listed in ("8.0;8.6", "7.5", "10.0+PTX", "Hopper")),
]
# fmt: on


@looped("change, sentence", REFUSALS)
def test_refusals(tmp_path_factory, change, sentence):
    """The status has the error of a build, too; nothing is built or half-written."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        machine = Machine(monkeypatch, tmp_path_factory.mktemp("machine"))
        change(machine)
        status = machine.build()
        assert not status.built and status == loading._status("cuda", build=False)
        assert not machine.calls and not machine.loaded and not list(machine.folder.glob("a cache/**/*.so"))
        assert f"{status.reason}; {status.cure}" == sentence.format(here=machine.folder, torch=torch.__version__)


def test_takes_another_minor_release(machine):
    assert str(machine.install("13.4")) == cuda.find_nvcc()


def test_takes_the_nvcc_that_pip_installs(machine, monkeypatch):
    """If PATH has no nvcc of PyTorch's CUDA, the one among the libraries of PyTorch's wheels is used."""
    machine.install("14.0")
    (machine.folder / "nvidia").mkdir()
    wheel = (machine.folder / "cuda 14.0").rename(machine.folder / "nvidia" / "cu14")
    (wheel / "lib").mkdir()
    (wheel / "lib" / "libcudart.so.14").touch()
    monkeypatch.setattr(torch.version, "cuda", "14.0")
    monkeypatch.setenv("PATH", f"{machine.folder}/cuda 13.0/bin:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_HOME")
    with pytest.raises(build.BuildError, match=r"/bin/nvcc of CUDA 13\.0"):
        cuda.find_nvcc()
    monkeypatch.syspath_prepend(machine.folder)
    assert cuda.find_nvcc() == str(wheel / "bin" / "nvcc") and machine.build().built


@looped("symbol, cure", [("cudaNewInThisRelease", "install the toolkit of CUDA 13.0"), ("other", "delete its folder")])
def test_a_library_that_does_not_load(machine, monkeypatch, symbol, cure):
    """A toolkit may be newer than the libraries of PyTorch."""

    def fail(path):
        raise OSError(f"undefined symbol: {symbol}")

    monkeypatch.setattr(torch.ops, "load_library", fail)
    machine.install("13.4")
    status = machine.build()
    assert f"cannot be loaded: undefined symbol: {symbol}" in status.reason and status.cure == cure


def test_auto_says_once_why_it_runs_the_reference(machine, monkeypatch):
    machine.see()
    monkeypatch.setattr(loading, "_statuses", {})
    monkeypatch.setattr(backend, "_warned", set())
    with pytest.warns(RuntimeWarning, match=r"on cuda as slow loops in Python: PyTorch sees no NVIDIA GPU; check"):
        assert not backend.kernel_ready("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not backend.kernel_ready("cuda")
    with pytest.raises(RuntimeError, match="no compiled kernel for cuda: PyTorch sees no NVIDIA GPU; check"):
        backend.require_kernel("cuda")


def test_auto_leaves_sizes_beyond_the_kernels_to_the_reference(monkeypatch):
    (limit,) = re.findall(r"kGreatestSize = (\d+);", LIMITS.read_text())
    assert {"cuda": int(limit)} == backend.GREATEST_SIZE
    monkeypatch.setattr(backend, "GREATEST_SIZE", {"cpu": 4})
    monkeypatch.setattr(backend, "_warned", set())
    inputs = sample_inputs("delta", (1, 1, 3, 5, 4))
    says = r"keys and values must have at most 4 dimensions for its kernels, got \(5, 4\); use smaller heads"
    with pytest.warns(RuntimeWarning, match=says):
        found = ops.delta_rule(**inputs)
    expected = ops.delta_rule(**inputs, backend="reference")
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.delta_rule(**inputs)
        ops.delta_rule(**sample_inputs("delta", (1, 1, 3, 4, 4)))


def test_key_follows_what_the_machine_code_depends_on(machine, monkeypatch):
    (machine.sources / "bindings" / "cpu").mkdir()
    changes = [partial((machine.sources / name).write_text, "2") for name in SOURCES]
    changes += [partial(machine.see, A100), partial(monkeypatch.setenv, "TORCH_CUDA_ARCH_LIST", "8.0 8.6")]
    changes += [partial(machine.install, "13.1"), partial(monkeypatch.setenv, "NVCC_APPEND_FLAGS", "-lineinfo")]
    versions = ((torch.version, "cuda", "13.2"), (torch, "__version__", "0"))
    changes += [partial(monkeypatch.setattr, *version) for version in versions]
    keys = [build.build_key("cuda")]
    for change in changes:
        (machine.sources / "bindings" / "cpu" / "sum.cpp").write_text(f"another device's {len(keys)}")
        assert build.build_key("cuda") == keys[-1]
        change()
        keys.append(build.build_key("cuda"))
    assert len(set(keys)) == len(keys)


# ---- with a real nvcc

# The part of a PyTorch for CUDA that the binding needs, and that one for the CPU lacks.
STREAM = """
namespace c10::cuda {
struct CUDAStream { void* stream() const; };
void* CUDAStream::stream() const { return nullptr; }
CUDAStream getCurrentCUDAStream(signed char) { return {}; }
}
"""
REGISTERED = """
import sys, torch
from fairseq_fwp.ops import projection, recurrent_delta
torch.ops.load_library(LIBRARY)  # it raises where a function does not have the operator's schema
for key in ("CUDA", "AutogradCUDA"):
    print(*(name for name in OPERATORS if torch._C._dispatch_has_kernel_for_dispatch_key("fwp::" + name, key)))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler, nvcc")
def test_everything_compiles_links_and_registers(monkeypatch, tmp_path):
    """Compile in folders with spaces, with a stub of the part that only a PyTorch for CUDA has."""
    sources, stubs = build._source_folder(), tmp_path / "stubs"
    machine = Machine(monkeypatch, tmp_path)
    shutil.copytree(sources, machine.sources, dirs_exist_ok=True)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(torch.version, "cuda", cuda._release(shutil.which("nvcc")))
    stubs.mkdir()
    (stubs / "stream.cpp").write_text(STREAM)
    if torch.version.cuda and not list(Path(torch.__file__).parent.glob("lib/libc10_cuda*")):
        for library in ("libc10_cuda.so", "libtorch_cuda.so"):
            subprocess.run(["g++", "-shared", "-fPIC", "stream.cpp", "-o", library], cwd=stubs, check=True)
    monkeypatch.setenv("LIBRARY_PATH", str(stubs))
    status = machine.build()
    assert status.built, status
    said = subprocess.run(["nvcc", "-dryrun", "-shared", "x.o"], capture_output=True, text=True).stderr
    toolkit = re.findall(r'"-L([^"]+)"', said)
    operators = ["fast_weights", "map_projection", "fast_weights_backward"]
    operators += ["recurrent_delta", "recurrent_delta_backward"]
    script = REGISTERED.replace("LIBRARY", repr(status.path)).replace("OPERATORS", repr(operators))
    found = run_isolated(script, LD_LIBRARY_PATH=":".join([str(stubs), *toolkit]))
    with_kernel, with_autograd = (line.split() for line in found.stdout.splitlines())
    assert with_kernel == operators and with_autograd == operators[:2]
