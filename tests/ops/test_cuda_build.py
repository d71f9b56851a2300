"""Building the CUDA kernels where there is no GPU: what is refused and how, what nvcc is told, and that all compiles.

A stand-in for nvcc answers as a toolkit would and writes its output files; PyTorch is made to see GPUs.
"""

import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from isolated import run_isolated
from rule_cases import RULES, WITH_KERNEL, sample_inputs

from fairseq_fwp import ops
from fairseq_fwp.ops import compiler, cuda_toolkit, dispatch, jit
from fairseq_fwp.ops.cuda_toolkit import Architecture

H200, A100, T4 = ("NVIDIA H200", (9, 0)), ("NVIDIA A100", (8, 0)), ("Tesla T4", (7, 5))
KNOWN = "75 80 86 90 100 120"


LIMITS = compiler._source_folder() / "cuda" / "launchers.h"
SOURCES = (
    "autograd.cpp",
    "binding_cuda.cpp",
    "binding_arguments.h",
    "cuda/kernels.cu",
    "cuda/delta.cuh",
    "cuda/launchers.h",
)


class Machine:
    """GPUs, a toolkit, sources and an empty cache in one folder. `calls` are those that compile or link."""

    def __init__(self, monkeypatch, folder):
        self.patch, self.folder, self.loaded = monkeypatch, folder, []
        for name in ("CUDA_PATH", "TORCH_CUDA_ARCH_LIST", *compiler.NVCC_VARIABLES):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("FWP_CACHE_DIR", str(folder / "a cache"))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.ops, "load_library", self.loaded.append)
        self.sources = folder / "the sources"
        monkeypatch.setattr(compiler, "_source_folder", lambda: self.sources)
        for name in SOURCES:
            (self.sources / name).parent.mkdir(parents=True, exist_ok=True)
            (self.sources / name).write_text("1")
        self.see(H200)
        self.install("13.0")

    def see(self, *gpus):
        self.patch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        self.patch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        self.patch.setattr(torch.cuda, "get_device_name", lambda i: gpus[i][0])
        self.patch.setattr(torch.cuda, "get_device_capability", lambda i: gpus[i][1])

    def install(self, release, known=KNOWN, compiles="exit 0"):
        nvcc = self.folder / f"cuda-{release}" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True, exist_ok=True)
        nvcc.write_text(
            f"""#!/bin/sh
            case $1 in
              --version) echo 'Cuda compilation tools, release {release}, V{release}.88'; exit ;;
              --list-gpu-arch) printf 'compute_%s\\n' {known}; exit ;;
            esac
            echo "$@" >> '{self.folder}/calls.txt'
            for last; do :; done
            echo {release} > "$last"
            {compiles}
            """
        )
        nvcc.chmod(0o755)
        self.patch.setenv("CUDA_HOME", str(nvcc.parents[1]))
        return nvcc

    @property
    def calls(self):
        path = self.folder / "calls.txt"
        return path.read_text().splitlines() if path.exists() else []

    def build(self):
        return jit._load_or_build("cuda")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def refusal(machine):
    """The sentence of a build that is refused, of the status too, with nothing built or half-written."""
    status = machine.build()
    assert not status.built and status == jit._status_on_disk("cuda")
    assert not machine.calls and not machine.loaded and not list(machine.folder.glob("a cache/**/*.so"))
    return f"{status.reason}; {status.cure}"


def test_built_once_for_the_gpu_that_is_there(machine):
    first = machine.build()
    assert first.built and machine.loaded == [first.path]
    in_order = sorted(machine.calls, key=lambda call: ("-shared" in call, ".cu" in call, "binding" in call))
    autograd, binding, kernels, link = in_order
    assert "autograd.cpp" in autograd and "-DFWP_AUTOGRAD_KEY=AutogradCUDA" in autograd
    assert "binding_cuda.cpp" in binding and "-gencode" not in binding
    assert kernels.count("-gencode") == 1 and "-gencode=arch=compute_90a,code=sm_90a" in kernels
    assert "-lc10_cuda" in link and link.endswith("kernels.so")
    assert machine.build() == first and len(machine.calls) == 4
    assert not list(Path(first.path).parent.glob("build-*"))


def test_nothing_is_built_by_asking(machine):
    status = jit._status_on_disk("cuda")
    assert (status.reason, machine.calls) == ("not built yet", []) and not (machine.folder / "a cache").exists()


def test_a_cache_serves_machines_without_a_toolkit(machine, monkeypatch):
    first = machine.build()
    monkeypatch.setenv("CUDA_HOME", str(machine.folder / "nowhere"))
    assert machine.build() == first and len(machine.calls) == 4


@pytest.mark.parametrize(
    ("gpus", "listed", "flags"),
    [
        ([A100, H200], "", ["compute_80,code=sm_80", "compute_90a,code=sm_90a"]),
        ([H200, H200], "", ["compute_90a,code=sm_90a"]),
        ([A100, T4], "", ["compute_80,code=sm_80"]),
        ([H200], "8.0;9.0a", ["compute_80,code=sm_80", "compute_90a,code=sm_90a"]),
        ([H200], "7.5 8.0+PTX", ["compute_80,code=sm_80", "compute_80,code=compute_80"]),
        ([("NVIDIA L4", (8, 9))], "8.0, 8.6", ["compute_80,code=sm_80", "compute_86,code=sm_86"]),
    ],
)
def test_architectures(machine, monkeypatch, gpus, listed, flags):
    machine.see(*gpus)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    found = [flag for target in cuda_toolkit.architectures() for flag in target.flags]
    assert found == [f"-gencode=arch={flag}" for flag in flags]


def test_code_for_hopper_runs_on_hopper_alone():
    assert Architecture(9, 0).runs_on((9, 0)) and not Architecture(9, 0).runs_on((10, 0))
    assert Architecture(9, 0, ptx=True).runs_on((10, 0)) and not Architecture(9, 0, ptx=True).runs_on((8, 9))
    assert Architecture(8, 0).runs_on((8, 9)) and not Architecture(8, 9).runs_on((8, 6))


def test_refuses_pytorch_without_cuda(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    sentence = f"PyTorch {torch.__version__} is built without CUDA; install one built for CUDA, or use the CPU"
    assert refusal(machine) == sentence


def test_refuses_without_a_gpu(machine):
    machine.see()
    assert refusal(machine) == "PyTorch sees no NVIDIA GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the CPU"


def test_refuses_an_old_gpu(machine):
    machine.see(T4)
    assert refusal(machine) == (
        "the kernels need a GPU of compute capability 8.0 or later, and Tesla T4 has 7.5; use another GPU, or the CPU"
    )


def test_refuses_without_nvcc(machine, monkeypatch):
    cure = "install the CUDA toolkit 13, or set CUDA_HOME to the folder where it is"
    monkeypatch.setenv("CUDA_HOME", str(machine.folder / "cuda-12.0"))
    assert refusal(machine) == f"there is no nvcc in {machine.folder}/cuda-12.0/bin; {cure}"
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(cuda_toolkit.shutil, "which", lambda name: None)
    assert refusal(machine) == f"there is no CUDA toolkit (no nvcc); {cure}"


@pytest.mark.parametrize("release", ["12.8", "14.1"])
def test_refuses_the_toolkit_of_another_cuda(machine, release):
    nvcc = machine.install(release)
    assert refusal(machine) == (
        f"{nvcc} is of CUDA {release}, but PyTorch {torch.__version__} was built for CUDA 13.0; "
        "install the CUDA toolkit 13, or set CUDA_HOME to the folder where it is"
    )


def test_takes_another_minor_release(machine):
    machine.install("13.4")
    assert machine.build().built


@pytest.mark.parametrize(
    ("gpu", "known", "capability", "cure"),
    [(H200, "75 80 86", "9.0a", "8.6+PTX"), (("NVIDIA GB10", (12, 1)), KNOWN, "12.1", "12.0+PTX")],
    ids=["old toolkit", "new gpu"],
)
def test_refuses_a_toolkit_that_does_not_know_the_gpu(machine, gpu, known, capability, cure):
    machine.see(gpu)
    nvcc = machine.install("13.0", known=known)
    assert refusal(machine) == (
        f"{nvcc} of CUDA 13.0 does not know the compute capability {capability}; "
        f"install a newer CUDA toolkit, or set TORCH_CUDA_ARCH_LIST to '{cure}'"
    )
    machine.patch.setenv("TORCH_CUDA_ARCH_LIST", cure)
    assert machine.build().built
    (kernels,) = (call for call in machine.calls if ".cu" in call)
    architecture = f"compute_{cure.removesuffix('+PTX').replace('.', '')}"
    assert f"-gencode=arch={architecture},code={architecture}" in kernels


def test_a_gpu_that_the_toolkit_does_not_know_any_more(machine):
    machine.see(A100)
    nvcc = machine.install("13.0", known="90 100")
    assert refusal(machine) == (
        f"{nvcc} of CUDA 13.0 does not know the compute capability 8.0; install another release of the CUDA toolkit"
    )


def test_hopper_needs_cuda_12(machine, monkeypatch):
    """CUDA 11.8 lists compute_90, and does not take compute_90a."""
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    nvcc = machine.install("11.8", known="75 80 86 89 90")
    assert refusal(machine) == (
        f"{nvcc} of CUDA 11.8 does not know the compute capability 9.0a; "
        "install a newer CUDA toolkit, or set TORCH_CUDA_ARCH_LIST to '8.9+PTX'"
    )
    machine.patch.setenv("TORCH_CUDA_ARCH_LIST", "8.9+PTX")
    assert machine.build().built


def test_a_toolkit_newer_than_the_libraries_of_pytorch(machine, monkeypatch):
    def fail(path):
        raise OSError("undefined symbol: cudaNewInThisRelease")

    monkeypatch.setattr(torch.ops, "load_library", fail)
    machine.install("13.4")
    status = machine.build()
    assert "cannot be loaded: undefined symbol: cudaNewInThisRelease" in status.reason
    assert status.cure == "install the toolkit of CUDA 13.0"


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 1\n", "not a program"])
def test_refuses_an_nvcc_that_does_not_run(machine, text):
    nvcc = machine.install("13.0")
    nvcc.write_text(text)
    assert refusal(machine).startswith(
        f"{nvcc} --version does not say which CUDA it is of; install the CUDA toolkit 13"
    )


@pytest.mark.parametrize(
    ("listed", "sentence"),
    [
        ("8.0;8.6", "leaves out NVIDIA H200, whose compute capability is 9.0; add that to the list, or unset it"),
        ("7.5", "leaves out NVIDIA H200, whose compute capability is 9.0; add that to the list, or unset it"),
        ("Hopper", "holds 'Hopper'; write compute capabilities, as in '8.0 9.0+PTX'"),
    ],
)
def test_refuses_a_list_of_architectures(machine, monkeypatch, listed, sentence):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert refusal(machine) == f"TORCH_CUDA_ARCH_LIST={listed!r} {sentence}"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("kernels.cu(7): error: no such thing", "kernels.cu(7): error: no such thing"),
        ("nvcc fatal   : Unsupported gpu architecture", "nvcc fatal   : Unsupported gpu architecture"),
        ("/usr/bin/ld: cannot find -lcudart", "/usr/bin/ld: cannot find -lcudart"),
        ("", "exit status 3"),
    ],
)
def test_a_build_that_fails(machine, said, reason):
    nvcc = machine.install("13.0", compiles=f"echo '{said}' >&2; exit 3")
    status = machine.build()
    assert not status.built and status.reason == f"{nvcc} failed: {reason}" and status.cure
    assert not list(machine.folder.glob("a cache/**/build-*")) and not list(machine.folder.glob("a cache/**/*.so"))


def test_auto_says_once_why_it_runs_the_reference(machine, monkeypatch):
    machine.see()
    monkeypatch.setattr(jit, "_statuses", {})
    monkeypatch.setattr(dispatch, "_warned", set())
    with pytest.warns(RuntimeWarning, match=r"on cuda as slow loops in Python: PyTorch sees no NVIDIA GPU; check"):
        assert not dispatch.kernel_ready("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not dispatch.kernel_ready("cuda")
    with pytest.raises(RuntimeError, match="no compiled kernel for cuda: PyTorch sees no NVIDIA GPU; check"):
        dispatch._require_kernel("cuda")


def test_auto_leaves_sizes_beyond_the_kernels_to_the_reference(monkeypatch):
    (limit,) = re.findall(r"kGreatestSize = (\d+);", LIMITS.read_text())
    assert {"cuda": int(limit)} == dispatch.GREATEST_SIZE
    monkeypatch.setattr(dispatch, "GREATEST_SIZE", {"cpu": 4})
    monkeypatch.setattr(dispatch, "_warned", set())
    inputs = sample_inputs("delta", (1, 1, 3, 5, 4))
    with pytest.warns(RuntimeWarning, match=r"keys and values of up to 4, got \(5, 4\); use smaller heads"):
        found = ops.delta_rule(**inputs)
    expected = ops.delta_rule_reference(**inputs)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.delta_rule(**inputs)
        ops.delta_rule(**sample_inputs("delta", (1, 1, 3, 4, 4)))


def test_key_follows_what_the_machine_code_depends_on(machine, monkeypatch):
    keys = [compiler.build_key("cuda")]
    assert compiler.build_key("cuda") == keys[0]

    def changed():
        keys.append(compiler.build_key("cuda"))

    for name in SOURCES:
        (machine.sources / name).write_text("2")
        changed()
    (machine.sources / "binding_cpu.cpp").write_text("another device's")
    assert compiler.build_key("cuda") == keys[-1]
    machine.see(A100)
    changed()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 8.6")
    changed()
    machine.install("13.1")
    changed()
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    changed()
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    changed()
    monkeypatch.setattr(torch, "__version__", "0")
    changed()
    assert len(set(keys)) == len(keys)


# ---- with a real nvcc

# What a PyTorch for CUDA has and one for the CPU has not: all that the binding needs of it.
STREAM = """
namespace c10::cuda {
struct CUDAStream { void* stream() const; };
void* CUDAStream::stream() const { return nullptr; }
CUDAStream getCurrentCUDAStream(signed char) { return {}; }
}
"""
REGISTERED = """
import sys, torch
from fairseq_fwp import ops
torch.ops.load_library(LIBRARY)  # it raises where a function does not have the operator's schema
for key in ("CUDA", "AutogradCUDA"):
    print(*(name for name in OPERATORS if torch._C._dispatch_has_kernel_for_dispatch_key("fwp::" + name, key)))
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler, nvcc")
def test_everything_compiles_links_and_registers(monkeypatch, tmp_path):
    """In folders with spaces, and with a stub of the little that only a PyTorch for CUDA has."""
    sources, stubs = compiler._source_folder(), tmp_path / "stubs"
    machine = Machine(monkeypatch, tmp_path)
    shutil.copytree(sources, machine.sources, dirs_exist_ok=True)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(torch.version, "cuda", cuda_toolkit._release(shutil.which("nvcc")))
    stubs.mkdir()
    (stubs / "stream.cpp").write_text(STREAM)
    if torch.version.cuda and not list(Path(torch.__file__).parent.glob("lib/libc10_cuda*")):
        subprocess.run(["g++", "-shared", "-fPIC", "stream.cpp", "-o", "libc10_cuda.so"], cwd=stubs, check=True)
    monkeypatch.setenv("LIBRARY_PATH", str(stubs))
    status = machine.build()
    assert status.built, status
    said = subprocess.run(["nvcc", "-dryrun", "-shared", "x.o"], capture_output=True, text=True).stderr
    toolkit = re.findall(r'"-L([^"]+)"', said)
    operators = [RULES[rule].operator + suffix for rule in WITH_KERNEL for suffix in ("", "_backward")]
    script = REGISTERED.replace("LIBRARY", repr(status.path)).replace("OPERATORS", repr(operators))
    found = run_isolated(script, LD_LIBRARY_PATH=":".join([str(stubs), *toolkit]))
    with_kernel, with_autograd = (line.split() for line in found.stdout.splitlines())
    assert with_kernel == operators and with_autograd == operators[::2]
