"""Build a CUDA runtime that computes nothing for a CUDA build of PyTorch, and the environment in which it is used.

All functions of the libraries that this PyTorch loads exist, and those that runtime.cpp does not define return 0.
"""

import os
import re
import subprocess
from pathlib import Path

from fairseq_fwp.ops.kernels.cuda import toolkit_folders

HERE = Path(__file__).parent
# There is no library of the driver without a GPU: those who call its functions have their names.
CALLERS = ("triton/backends/nvidia/driver.c", "torch/lib/libc10_cuda.so", "torch/lib/libtorch_cuda.so")
PRODUCT = re.compile(r"Gem[mv]|gem[mv]|LtMatmul$")  # of matrices, by cuBLAS
# Without a context, PyTorch does not ask whether a stream captures.
CONTEXT = "int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) { *active = 1; return 0; }\n"
FUNCTION = re.compile(rb"\bcu[A-Z][A-Za-z0-9]+(?:_v\d)?\b")


def functions_of(library: Path) -> set[str]:
    said = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in said.splitlines() if line.split()[-2] in "TWi"}


def build_library(name: str, functions: set[str], folder: Path, *sources: str) -> Path:
    """Build a library of sources, and of functions that return 0 where these have none. Products note themselves."""
    notes = {function: f'fake_gpu_note("{function}"); ' for function in functions if PRODUCT.search(function)}
    stubs = (f"__attribute__((weak)) int {x}(void) {{ {notes.get(x, '')}return 0; }}\n" for x in sorted(functions))
    own = CONTEXT if "libcuda." in name else "void fake_gpu_note(const char*);\n"
    (folder / "stubs.c").write_text(own + "".join(stubs))
    (folder / "versions").write_text(f"{name} {{ global: *; }};\n")  # that of the symbols that PyTorch asks for
    subprocess.run(["gcc", "-w", "-fPIC", "-fno-builtin", "-c", "stubs.c"], cwd=folder, check=True)
    link = ["g++", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-Wl,--version-script=versions", *sources, "stubs.o"]
    subprocess.run([*link, "-o", name], cwd=folder, check=True)
    return folder / name


def environment(python: str, folder: Path) -> dict[str, str]:
    """Return an environment in which the PyTorch of this Python sees one GPU."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    built = []
    for pattern in ("libcudart.so.*", "libcublas.so.*", "libcublasLt.so.*"):
        (real,) = site.glob(f"nvidia/cu*/lib/{pattern}")
        includes, _ = toolkit_folders("nvcc")
        more = [str(HERE / "runtime.cpp"), *(f"-I{path}" for path in includes)] if "cudart" in pattern else []
        built.append(build_library(real.name, functions_of(real), folder, *more))
    driver = {name.decode() for file in CALLERS for name in FUNCTION.findall((site / file).read_bytes())}
    built.append(build_library("libcuda.so.1", driver - {"cuDevicePrimaryCtxGetState"}, folder))
    return {**os.environ, "LD_PRELOAD": " ".join(map(str, built)), "TRITON_LIBCUDA_PATH": str(folder)}
