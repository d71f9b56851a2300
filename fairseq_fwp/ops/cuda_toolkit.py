"""The GPUs of this machine and the CUDA toolkit that compiles for them, or why there is none that does.

From the environment: CUDA_HOME (or CUDA_PATH), the toolkit's folder; TORCH_CUDA_ARCH_LIST, what to compile for instead
of the GPUs that are visible; NVCC_CCBIN, which nvcc itself reads, the host compiler.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch

from .build_error import BuildError

# The first one with bfloat16 in its tensor cores and asynchronous copies into shared memory.
OLDEST = (8, 0)
HOPPER = (9, 0)


class Architecture(NamedTuple):
    """A compute capability to compile for; ``ptx`` adds code that later GPUs can translate."""

    major: int
    minor: int
    ptx: bool = False

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @property
    def suffix(self) -> str:
        """Hopper's own instructions are in none but its own target, which has no successor to translate it for."""
        return "a" if self[:2] == HOPPER else ""

    @property
    def flags(self) -> list[str]:
        """What makes nvcc compile for it."""
        number = f"{self.major}{self.minor}"
        own = number + self.suffix
        flags = [f"-gencode=arch=compute_{own},code=sm_{own}"]
        return [*flags, f"-gencode=arch=compute_{number},code=compute_{number}"] if self.ptx else flags

    def runs_on(self, gpu: tuple[int, int]) -> bool:
        """Whether a GPU of this capability can run what was compiled for it."""
        mine = (self.major, self.minor)
        return mine <= gpu and (self.ptx or self.major == gpu[0])


def architectures() -> list[Architecture]:
    """What to compile for: the GPUs that this process sees, or TORCH_CUDA_ARCH_LIST. Raises BuildError."""
    gpus = _visible_gpus()
    supported = {capability: name for capability, name in gpus.items() if capability >= OLDEST}
    if not supported:
        capability, name = max(gpus.items())
        raise BuildError(
            f"the kernels need a GPU of compute capability {_dotted(OLDEST)} or later, and {name} has "
            f"{_dotted(capability)}",
            "use another GPU, or the CPU",
        )
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not listed:
        return [Architecture(*capability) for capability in sorted(supported)]
    chosen = _parse(listed)
    for capability, name in supported.items():
        if not any(architecture.runs_on(capability) for architecture in chosen):
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST={listed!r} leaves out {name}, whose compute capability is {_dotted(capability)}",
                "add that to the list, or unset it",
            )
    return chosen


def toolkit_version() -> str:
    """Release of the toolkit, as in '13.0'. Where there is no nvcc to ask, PyTorch's own: so that a cache which was
    filled with that release serves machines without a toolkit too."""
    nvcc = _nvcc()
    return (nvcc and _release(nvcc)) or str(torch.version.cuda)


def find_nvcc(wanted: list[Architecture]) -> str:
    """Path of an nvcc that goes with PyTorch and compiles for all that is wanted. Raises BuildError."""
    major = str(torch.version.cuda).partition(".")[0]
    cure = f"install the CUDA toolkit {major}, or set CUDA_HOME to the folder where it is"
    nvcc = _nvcc()
    if nvcc is None:
        home = _home()
        raise BuildError(f"there is no nvcc in {home}/bin" if home else "there is no CUDA toolkit (no nvcc)", cure)
    release = _release(nvcc)
    if release is None:
        raise BuildError(f"{nvcc} --version does not say which CUDA it is of", cure)
    if release.partition(".")[0] != major:
        raise BuildError(
            f"{nvcc} is of CUDA {release}, but PyTorch {torch.__version__} was built for CUDA {torch.version.cuda}",
            cure,
        )
    known = _known(nvcc, release)
    for architecture in wanted:
        if architecture[:2] not in known:
            raise BuildError(
                f"{nvcc} of CUDA {release} does not know the compute capability {architecture}{architecture.suffix}",
                _cure_for_unknown(architecture, known),
            )
    return nvcc


def _known(nvcc: str, release: str) -> set[tuple[int, int]]:
    """Compute capabilities that a toolkit compiles for."""
    found = {
        (int(major), int(minor)) for major, minor in re.findall(r"compute_(\d+)(\d)\b", _ask(nvcc, "--list-gpu-arch"))
    }
    # CUDA 11.8 knows 9.0, but not 9.0a.
    return found - {HOPPER} if release.startswith("11.") else found


def _cure_for_unknown(architecture: Architecture, known: set[tuple[int, int]]) -> str:
    older = [capability for capability in known if OLDEST <= capability < architecture[:2]]
    if not older:
        return "install another release of the CUDA toolkit"
    # Its driver translates PTX for a GPU that the toolkit does not know.
    return f"install a newer CUDA toolkit, or set TORCH_CUDA_ARCH_LIST to '{_dotted(max(older))}+PTX'"


def _visible_gpus() -> dict[tuple[int, int], str]:
    """Names of the GPUs by compute capability."""
    if torch.version.cuda is None:
        version = torch.__version__
        raise BuildError(f"PyTorch {version} is built without CUDA", "install one built for CUDA, or use the CPU")
    if not torch.cuda.is_available():
        raise BuildError("PyTorch sees no NVIDIA GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the CPU")
    found = range(torch.cuda.device_count())
    try:
        return {torch.cuda.get_device_capability(i): torch.cuda.get_device_name(i) for i in found}
    except RuntimeError as error:  # the driver is there, and the GPU does not start
        reason = str(error).partition("\n")[0]
        raise BuildError(f"the GPU does not start: {reason}", "check nvidia-smi, or use the CPU") from error


def _parse(listed: str) -> list[Architecture]:
    """TORCH_CUDA_ARCH_LIST, without what is too old for the kernels: such lists are often made for many libraries."""
    found = set()
    for word in re.split(r"[;,\s]+", listed.strip("; ,\n\t")):
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", word)
        if match is None:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST={listed!r} holds {word!r}", "write compute capabilities, as in '8.0 9.0+PTX'"
            )
        found.add(Architecture(int(match[1]), int(match[2]), match[3] is not None))
    return sorted(architecture for architecture in found if architecture[:2] >= OLDEST)


def _home() -> str | None:
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")


def _nvcc() -> str | None:
    home = _home()
    if home:
        return shutil.which(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def _release(nvcc: str) -> str | None:
    match = re.search(r"release (\d+\.\d+)", _ask(nvcc, "--version"))
    return match[1] if match else None


def _ask(nvcc: str, question: str) -> str:
    try:
        return subprocess.run([nvcc, question], capture_output=True, text=True, check=False).stdout
    except OSError:  # not a program for this machine
        return ""


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
