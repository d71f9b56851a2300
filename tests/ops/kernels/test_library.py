"""Faults of building and caching.

A stand-in for the compiler copies the library that is built already, so a build costs nothing. One real build, in a
folder whose name has spaces, is marked slow.
"""

import errno
import os
import platform
import pwd
import shutil
import signal
import stat
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from support.isolated import PACKAGE, run_isolated, start_isolated
from support.pairwise import looped

from fairseq_fwp.ops import kernels
from fairseq_fwp.ops.kernels import build
from fairseq_fwp.ops.kernels import library as loading

USE = """
import logging, warnings
logging.basicConfig(level=logging.INFO)
warnings.simplefilter("always")
import torch
from fairseq_fwp import ops
q = torch.ones(1, 1, 2, 3)
for _ in range(2):
    out, state = ops.sum_rule(q, q, q)
    assert out[0, 0].tolist() == [[3.0] * 3, [6.0] * 3], out
    ops.delta_rule(q, q, q, q[..., 0])
print(ops.kernel_status()["cpu"].built)
"""
CPU_KERNELS_ARE_GONE = "\nassert not ops.kernel_status()['cpu'].built, ops.kernel_status()"


class Builder:
    """An empty cache, and a compiler that writes each call to calls.txt and takes $COMPILER_SECONDS.

    It builds in this process, which has the kernels already: libraries are recorded, not loaded again.
    """

    def __init__(self, monkeypatch, folder):
        self.folder, self.loaded, self.compiler, status = folder, [], folder / "compiler", kernels.load_kernels("cpu")
        assert status.built, status
        self.compiler.write_text(
            f"""#!/bin/sh
            [ "$1" = --version ] && exit
            echo "$@" >> '{folder}/calls.txt'
            sleep ${{COMPILER_SECONDS:-0}}
            while [ $# -gt 0 ]; do
              case $1 in -o) cp '{status.path}' "$2" ;; -MF) : > "$2" ;; esac
              shift
            done
            """
        )
        self.compiler.chmod(0o755)
        (folder / "temporary").mkdir()
        monkeypatch.setenv("CXX", str(self.compiler))
        monkeypatch.setenv("FWP_CACHE_DIR", str(folder / "a cache"))
        monkeypatch.setattr(torch.ops, "load_library", self.loaded.append)
        monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))

    def __call__(self):
        self.loaded.clear()
        return loading._status("cpu", build=True)

    @property
    def library(self):
        (folder,) = (self.folder / "a cache").iterdir()
        return folder / "kernels.so"

    @property
    def calls(self):
        """The number of builds: each calls the compiler once for this source."""
        path, source = self.folder / "calls.txt", build._files("cpu", build.SOURCES)[0].name
        return path.read_text().count(f"/{source} ") if path.exists() else 0

    def wait_for_a_call(self):
        deadline = time.monotonic() + 60
        while not self.calls and time.monotonic() < deadline:
            time.sleep(0.05)


@pytest.fixture
def builder(monkeypatch, tmp_path):
    return Builder(monkeypatch, tmp_path)


def test_built_once_then_loaded_without_compiler_or_ninja(tmp_path, builder):
    script = "from fairseq_fwp import ops; status = ops.kernel_status()['cpu']; print(status.built, status.reason)"
    assert run_isolated(script).stdout == "False not built yet\n"  # nothing is built by importing and asking
    assert builder.calls == 0 and not (tmp_path / "a cache").exists()
    first = run_isolated(USE)
    assert first.stdout == "True\n" and "building the cpu kernels" in first.stderr and builder.calls == 1
    builder.compiler.unlink()
    again = run_isolated(USE, PATH=str(tmp_path))
    assert again.stdout == "True\n" and "building" not in again.stderr and builder.calls == 1
    assert not [x for x in builder.library.parent.iterdir() if x.name not in ("kernels.so", "lock")]


@pytest.mark.slow
def test_processes_that_build_at_once_build_once(builder):
    processes = [start_isolated(USE, COMPILER_SECONDS="2") for _ in range(3)]
    for process in processes:
        out, error = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "True\n"), error
    assert builder.calls == 1


@pytest.mark.slow
def test_a_killed_build_leaves_nothing_to_wait_for(builder):
    process = start_isolated(USE, COMPILER_SECONDS="30")
    builder.wait_for_a_call()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    path = builder.library
    assert list(path.parent.glob("build-*")) and not path.exists()
    start = time.monotonic()
    assert run_isolated(USE).stdout == "True\n"
    assert time.monotonic() - start < 25
    assert not list(path.parent.glob("build-*"))


@pytest.mark.slow
def test_builders_without_locks_leave_each_other_alone(monkeypatch, builder):
    """Without locks, a later process must not treat the first one's folder as a leftover."""

    def no_locks(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(loading.fcntl, "flock", no_locks)
    monkeypatch.setenv("COMPILER_SECONDS", "1")
    with ThreadPoolExecutor() as threads:
        first = threads.submit(builder)
        builder.wait_for_a_call()
        second = threads.submit(builder)
    assert first.result().built and second.result().built, (first.result(), second.result())
    assert builder.calls == 2 and not list(builder.library.parent.glob("build-*"))


def test_a_damaged_library_is_built_again(builder):
    assert builder().built
    path = builder.library
    whole = path.read_bytes()
    middle = len(whole) // 2
    for broken in (whole[:middle], b"", whole[:middle] + b"?" + whole[middle + 1 :]):
        path.write_bytes(broken)
        assert not loading._load(path) and len(builder.loaded) == 1
    assert builder().built and builder.calls == 2 and path.read_bytes() == whole
    assert builder().built and builder.calls == 2 and builder.loaded == [str(path)]


def test_a_cache_that_cannot_be_written(tmp_path, builder):
    """A file is in the place of the folder (root may write anywhere else): the temporary folder is used."""
    (tmp_path / "a cache").write_text("")
    status = builder()
    private = tmp_path / "temporary" / f"fairseq_fwp_{os.getuid()}"
    assert status.built and Path(status.path).is_relative_to(private) and builder.loaded == [status.path]
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    private.chmod(0o777)  # another user may have put a library there
    status = builder()
    assert not status.built and "set FWP_CACHE_DIR" in status.cure and not builder.loaded


@pytest.mark.skipif(os.getuid() == 0, reason="root writes into read-only folders")
def test_a_read_only_cache(tmp_path, builder):
    (tmp_path / "a cache").mkdir(mode=0o500)
    assert Path(builder().path).is_relative_to(tmp_path / "temporary")


def test_a_read_only_cache_that_holds_the_library(builder):
    path = Path(builder().path)
    (path.parent / "lock").unlink()
    path.parent.chmod(0o500)
    try:
        assert builder() == kernels.KernelStatus(True, str(path)) and builder.loaded == [str(path)]
        assert not (path.parent / "lock").exists() and builder.calls == 1
    finally:
        path.parent.chmod(0o700)


def test_a_compiler_with_arguments(tmp_path, builder, monkeypatch):
    """The stand-in accepts the first as its own library; the tests of the key below cover other libraries."""
    monkeypatch.setenv("CXX", f"{builder.compiler} -O1 '-DA=a b'")
    assert builder().built and builder.calls == 1
    assert all(line.startswith("-O1 -DA=a b ") for line in (tmp_path / "calls.txt").read_text().splitlines())


def test_a_compiler_that_fails(builder):
    builder.compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2; exit 1\n")
    status = builder()
    assert not status.built and status.reason == "the build failed: x.cpp:1: error: no such thing" and status.cure
    assert not list(builder.library.parent.glob("build-*"))


# The output of a build, with a mark before the line that the error names, and words of what to do
# fmt: off
FAILED = [
    (["c++ a.cpp", "FAILED: a.o", "> c++: error: unknown option '-std=c++20'"], "install g++ 10 or later"),
    (["FAILED: a.o", "> nvcc fatal   : Unsupported gpu architecture 'compute_121'"], "TORCH_CUDA_ARCH_LIST"),
    (["> /usr/bin/ld: cannot find -lcudart", "collect2: error: ld returned 1"], "README"),
    (["c++ a.cpp", "> FAILED: [code=3] a.o", "ninja: build stopped: subcommand failed."], "README"),
    (["Traceback:", "> ModuleNotFoundError: No module named 'setuptools'"], "README"),
    (["> without a word"], "README"),
]
# fmt: on


@looped("said, cure", FAILED)
def test_what_is_said_of_a_build_that_fails(said, cure):
    (reason,) = (line.removeprefix("> ") for line in said if line.startswith("> "))
    error = build._build_error("\n".join(line.removeprefix("> ") for line in said if line != "> without a word"))
    assert str(error) == f"the build failed: {reason}" and cure in error.cure


def test_ninja_is_found_in_an_environment_that_is_not_active(tmp_path, builder, monkeypatch):
    (tmp_path / "bin").mkdir()
    for name in ("cp", "sleep"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert builder().built and builder.calls == 1


def test_no_ninja(monkeypatch, tmp_path, builder):
    monkeypatch.setattr(build, "_search_path", lambda: str(tmp_path))
    status = builder()
    assert (status.reason, status.cure) == ("there is no ninja, which runs the compilers", "pip install ninja")
    assert status == loading._status("cpu", build=False)


def test_no_compiler(tmp_path):
    required = """
try:
    ops.sum_rule(q, q, q, backend="kernel")
except RuntimeError as error:
    print(error)
"""
    found = run_isolated(
        USE + CPU_KERNELS_ARE_GONE + required, CXX="no-such-compiler", FWP_CACHE_DIR=str(tmp_path / "a cache")
    )
    sentence = "there is no C++ compiler (no-such-compiler is not on PATH); install g++ 10 or later, or set CXX"
    assert found.stdout == f"False\nno compiled kernel for cpu: {sentence}\n"
    assert found.stderr.count("RuntimeWarning") == 1 and sentence in found.stderr


WITHOUT_COMPILER = """
import warnings
warnings.simplefilter("ignore")
import torch
from fairseq_fwp import ops
def draw(*size):
    return torch.rand(*size, dtype=torch.float64, requires_grad=True)
q, k, v, beta, state = draw(2, 2, 4, 3), draw(2, 2, 4, 3), draw(2, 2, 4, 5), draw(2, 2, 4), draw(2, 2, 3, 5)
f, z = draw(2, 2, 4, 3), draw(2, 2, 4, 5)
def of_operator(names, erases, x):
    gates = dict(zip(names, x[3:]))
    given = (gates.get(name) for name in ("decay", "value_decay", "rate", "removal_key", "removal", "state"))
    return (*x[:3], *given, None, erases)
for names, erases, rule, given in (
    (("state",), False, ops.sum_rule, (q, k, v, state)),
    (("rate", "state"), True, ops.delta_rule, (q, k, v, beta, state)),
    (("decay", "state"), False, ops.gla_rule, (q, k, v, beta, state)),
    (("decay", "value_decay", "state"), False, ops.decay_rule, (q, k, v, f, z, state)),
    (("decay", "rate", "state"), True, ops.gated_delta_rule, (q, k, v, f, beta, state)),
):
    def op(*x):
        return torch.ops.fwp.fast_weights.default(*of_operator(names, erases, x))
    def reference(*x):
        return rule(*x, backend="reference")
    for some in (given, given[:-1]):
        assert torch.autograd.gradcheck(lambda *x: op(*x)[:2], some)
        torch.library.opcheck(torch.ops.fwp.fast_weights.default, of_operator(names, erases, some))
    empty = tuple(x[:, :, :0] for x in given[:-1])
    assert torch.equal(op(*empty, state)[1], state)
    (gradient,) = torch.autograd.grad(op(*empty, state)[1].sum(), state)
    assert torch.equal(gradient, torch.ones_like(state))
    compiled = torch.compile(lambda *x: op(*x)[0], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), reference(*given)[0])
    # over more than two chunks of the rules that forget
    long = [torch.cat([x] * 18, 2)[:, :, :70].detach().requires_grad_() for x in given[:-1]]
    found, truth = (
        torch.autograd.grad([x.sin().sum() for x in f(*long, state)[:2]], [*long, state]) for f in (op, reference)
    )
    torch.testing.assert_close(found, truth)
"""


def test_windows_has_the_reference_and_one_warning():
    """Python has no fcntl and no os.getuid there."""
    windows = "import os, torch, torch._dynamo\nsys.modules['fcntl'] = None\ndel os.getuid\n"
    imports, use = USE.split("q = ")
    done = run_isolated(f"{windows}{imports}sys.platform = 'win32'\nq = {use}")
    assert done.stdout == "False\n"
    assert done.stderr.count("as slow loops in Python: this version has no kernels for Windows; use Linux") == 1


@pytest.mark.slow
def test_the_loop_in_python_is_the_operator_without_a_compiler(tmp_path):
    """Gradients, checks of the operator and compilation work even without a compiler."""
    run_isolated(
        WITHOUT_COMPILER + CPU_KERNELS_ARE_GONE, CXX="no-such-compiler", FWP_CACHE_DIR=str(tmp_path / "a cache")
    )


def test_key_follows_what_the_machine_code_depends_on(tmp_path, monkeypatch):
    sources = ("a.h", "autograd.cpp", "bindings/cpu.cpp", "cpu/b.cpp")
    for name in sources:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    (tmp_path / "cuda").mkdir()
    monkeypatch.setattr(build, "_source_folder", lambda: tmp_path)
    changes = [partial((tmp_path / name).write_text, "2") for name in sources]
    changes += [partial(monkeypatch.setattr, build, "_cpu_features", lambda: "sse2")]
    changes += [partial(monkeypatch.setenv, "CXX", "another"), partial(monkeypatch.setattr, torch, "__version__", "0")]
    keys = [build.build_key("cpu")]
    for name in ("binding_cuda.cpp", "cuda/kernels.cu", "README.md"):
        (tmp_path / name).write_text("another device's, or no source")
    assert build.build_key("cpu") == keys[0]
    for change in changes:
        change()
        keys.append(build.build_key("cpu"))
    assert len(set(keys)) == len(keys)


def test_a_chosen_processor_replaces_the_one_at_hand(monkeypatch):
    features = " ".join(list(build.LEVELS.values())[:3])
    keys = set()
    for arch in ("", "native", "x86-64-v2", "x86-64-v3"):
        monkeypatch.setenv("FWP_CPU_ARCH", arch)
        monkeypatch.setattr(build, "_cpu_features", lambda: features)
        own = build.build_key("cpu")
        keys.add(own)
        monkeypatch.setattr(build, "_cpu_features", lambda: features + " one_more")
        assert (build.build_key("cpu") == own) == arch.startswith("x86")
        assert not arch.startswith("x86") or f"-march={arch}" in build._flags("cpu")
    assert len(keys) == 3


OLDER = "must be a processor whose instructions this one has, got "
UNKNOWN = "must be a value of -march that c++ knows, got "
# fmt: off
PROCESSORS = [
    ("x86-64-v3", f"{OLDER}x86-64-v3, which needs abm, avx, avx2, ", "choose an older one"),
    ("haswell", f"{OLDER}haswell, which needs __AVX2__, __AVX__, ", "choose an older one"),
    ("nehalem", None, None),
    ("no-such", f"{UNKNOWN}no-such", "try x86-64-v2 or x86-64-v3, or"),
    ("x86-64-v3 -O0", f"{UNKNOWN}x86-64-v3 -O0", "try x86-64-v2"),
]
FOLDERS = [
    ({}, "home/.cache/fairseq_fwp"),
    ({"XDG_CACHE_HOME": ""}, "home/.cache/fairseq_fwp"),
    ({"XDG_CACHE_HOME": "xdg"}, "xdg/fairseq_fwp"),
    ({"XDG_CACHE_HOME": "xdg", "TORCH_EXTENSIONS_DIR": "torch"}, "torch"),
    ({"XDG_CACHE_HOME": "xdg", "TORCH_EXTENSIONS_DIR": "torch", "FWP_CACHE_DIR": "~/fwp"}, "home/fwp"),
]
# fmt: on


@pytest.mark.skipif(platform.machine() != "x86_64", reason="values of -march for x86-64")
@looped("arch, sentence, cure", PROCESSORS)
def test_a_processor_that_this_one_cannot_replace(monkeypatch, arch, sentence, cure):
    """The available one is made x86-64-v2. Levels are compared with /proc/cpuinfo, other values by the compiler."""
    monkeypatch.setenv("FWP_CPU_ARCH", arch)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "_cpu_features", lambda: " ".join(list(build.LEVELS.values())[:2]))
    monkeypatch.setattr(build, "_arch_flag", lambda arch: "-march=" + arch.replace("native", "x86-64-v2"))
    status = loading._status("cpu", build=False)
    if sentence:
        assert not status.built and status.reason.startswith(f"FWP_CPU_ARCH {sentence}") and cure in status.cure
    else:
        assert status.reason in ("", "not built yet")


def test_a_level_needs_no_compiler(monkeypatch):
    monkeypatch.setattr(build, "_cpu_features", lambda: " ".join(build.LEVELS.values()))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("FWP_CPU_ARCH", "x86-64-v2")
    assert build.build_key("cpu")
    monkeypatch.setenv("FWP_CPU_ARCH", "nehalem")
    with pytest.raises(kernels.error.BuildError, match="no-such-compiler is not on PATH"):
        build.build_key("cpu")


NO_PROGRAM, NO_FOLDER = "the C++ compiler {here}/no program does not run: ", "there is no folder for the kernels: "
PLACE = "FWP_CACHE_DIR"
# Variables of the environment, and the reason why there are no kernels; None: they are in the temporary folder.
# fmt: off
UNUSABLE = [
    ({"CXX": "'unclosed"}, """CXX must be a program and its arguments, as in a shell, got "'unclosed": No closing"""),
    ({"CXX": "\udcff"}, "there is no C++ compiler (\udcff is not on PATH)"),
    ({"CXX": "''"}, "there is no C++ compiler ("),
    ({"CXX": "{here}"}, "there is no C++ compiler ({here} is not on PATH)"),
    ({"CXX": "{here}/no\\ program"}, NO_PROGRAM),
    ({"CXX": "{here}/no\\ program", "FWP_CPU_ARCH": "haswell"}, NO_PROGRAM),
    ({"FWP_CPU_ARCH": "\udcff ' \"", "CXX": "c++"}, "FWP_CPU_ARCH must be a value of -march that "),
    ({PLACE: "~no-such-user/cache"}, None),
    ({PLACE: "x" * 5000}, None),
    ({PLACE: "relative"}, None),
    ({PLACE: "", "TORCH_EXTENSIONS_DIR": "~no-such-user"}, None),
    ({PLACE: "", "HOME": None}, None),
    ({PLACE: "", "HOME": None, "XDG_CACHE_HOME": "~/cache"}, None),
    ({PLACE: "{here}/compiler/cache", "TMPDIR": None}, "[Errno 20] Not a directory: "),
    ({PLACE: "~no-such-user/cache", "TMPDIR": None}, f"{NO_FOLDER}there is no home folder for ~no-such-user/cache, "),
]
# fmt: on


@looped("environment, reason", UNUSABLE)
def test_an_environment_without_use_is_a_reason_and_no_error(tmp_path_factory, environment, reason):
    """No passwd entry, no temporary folder, no current folder, and any text in variables."""

    def refuse(*given):
        raise FileNotFoundError("No usable temporary directory found")

    with pytest.MonkeyPatch.context() as patch:
        here = tmp_path_factory.mktemp("machine")
        Builder(patch, here)
        (here / "no program").write_text("no program")
        (here / "no program").chmod(0o755)
        for name in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, (value or "").replace("{here}", str(here)))
            if value is None:
                patch.delenv(name)
        patch.setattr(pwd, "getpwuid", {}.__getitem__)
        if "TMPDIR" in environment:
            patch.setattr(tempfile, "gettempdir", refuse)
        (here / "gone").mkdir()
        patch.chdir(here / "gone")
        (here / "gone").rmdir()
        before = loading._status("cpu", build=False)
        assert not before.built and before.cure
        if reason is None:
            *_, last = loading._folders("cpu")
            assert before.reason == "not built yet" and last.is_relative_to(here / "temporary")
        else:
            after = loading._status("cpu", build=True)
            assert not after.built and after.reason.startswith(reason.replace("{here}", str(here))) and after.cure


@looped("environment, expected", FOLDERS)
def test_the_folder_of_the_cache(monkeypatch, tmp_path, environment, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR", "FWP_CACHE_DIR"):
        monkeypatch.setenv(name, environment.get(name, ""))
    assert next(loading._folders("cpu")).parent == tmp_path / expected


@pytest.mark.slow
def test_a_real_build_in_a_path_with_spaces(tmp_path):
    checkout = tmp_path / "a check out"
    checkout.mkdir()
    (checkout / "fairseq_fwp").symlink_to(PACKAGE)
    (checkout / "cuda_ext").symlink_to(PACKAGE.parent / "cuda_ext")
    (checkout / "torch").symlink_to(Path(torch.__file__).parent)
    script = f"package.__path__ = [{str(checkout / 'fairseq_fwp')!r}]\n" + USE
    assert run_isolated(script, PYTHONPATH=str(checkout), FWP_CACHE_DIR=str(tmp_path)).stdout == "True\n"


def test_status_of_every_device():
    status = kernels.kernel_status()
    assert set(status) == {"cpu", "cuda"}
    assert all(bool(x.path) == x.built and bool(x.reason and x.cure) != x.built for x in status.values())
