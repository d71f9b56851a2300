"""The GPUs of this machine, and the CUDA toolkit that compiles for them or the reason why none can."""

import os
import re
import shutil
import subprocess
import sys

import torch

from .error import BuildError

# The first compute capability with bfloat16 tensor cores and asynchronous copies into shared memory.
OLDEST = (8, 0)


def architecture_flags() -> list[str]:
    """nvcc's flags for TORCH_CUDA_ARCH_LIST. Without it, or if it is "native": for the GPUs that this process sees.

    Raises BuildError.
    """
    gpus = _visible_gpus()
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST") or "native"
    if listed == "native":  # as in PyTorch
        listed = " ".join(map(_dotted, gpus))
    capabilities = re.findall(r"(\d+)\.(\d)[af]?(\+PTX)?", listed)
    # Such lists are often made for many libraries: capabilities too old for the kernels are skipped.
    chosen = {(*gpu, bool(ptx)) for *digits, ptx in capabilities if (gpu := tuple(map(int, digits))) >= OLDEST}
    for gpu, name in gpus.items():
        # The driver translates PTX for all later GPUs.
        if not any((major, minor) <= gpu and (ptx or major == gpu[0]) for major, minor, ptx in chosen):
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST must have the compute capability {_dotted(gpu)} of {name}, got {listed!r}",
                "add it to the list, or unset the variable",
            )
    flags = []
    for major, minor, ptx in sorted(chosen):
        number = f"{major}{minor}"
        # Only the target of Hopper has Hopper's instructions, and later GPUs cannot run it.
        own = "90a" if number == "90" else number
        flags.append(f"-gencode=arch=compute_{own},code=sm_{own}")
        if ptx:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def _visible_gpus() -> dict[tuple[int, ...], str]:
    """Return the names of the GPUs that the kernels run on, by compute capability. Raises BuildError without one."""
    if torch.version.cuda is None:
        version = torch.__version__
        raise BuildError(f"PyTorch {version} is built without CUDA", "install one built for CUDA, or use the CPU")
    if not torch.cuda.is_available():
        raise BuildError("PyTorch sees no NVIDIA GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the CPU")
    devices = range(torch.cuda.device_count())
    try:
        gpus = {torch.cuda.get_device_capability(i): torch.cuda.get_device_name(i) for i in devices}
    except RuntimeError as error:  # the driver works, but the GPU does not start
        reason = str(error).partition("\n")[0]
        raise BuildError(f"the GPU does not start: {reason}", "check nvidia-smi, or use the CPU") from error
    newest = max(gpus)
    if newest < OLDEST:
        needed = f"the kernels need a GPU of compute capability {_dotted(OLDEST)} or later"
        raise BuildError(f"{needed}, and {gpus[newest]} has {_dotted(newest)}", "use another GPU, or the CPU")
    return {gpu: name for gpu, name in gpus.items() if gpu >= OLDEST}


def _dotted(gpu: tuple[int, ...]) -> str:
    return f"{gpu[0]}.{gpu[1]}"


def find_nvcc() -> str:
    """Return the path of an nvcc of the CUDA version that PyTorch was built for. Raises BuildError.

    It is the nvcc of CUDA_HOME, or else the first one on PATH, in the usual folder or among pip's packages.
    """
    wanted = str(torch.version.cuda)
    major = wanted.partition(".")[0]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    from_pip = [f"{folder}/nvidia/cu{major}/bin" for folder in sys.path]
    folders = [f"{home}/bin"] if home else [*os.get_exec_path(), "/usr/local/cuda/bin", *from_pip]
    reason = f"there is no nvcc in {home}/bin" if home else "there is no nvcc on PATH"
    for nvcc in filter(None, (shutil.which(f"{folder}/nvcc") for folder in folders)):
        release = _release(nvcc)
        if release.partition(".")[0] == major:
            return nvcc
        reason = f"nvcc must be of CUDA {wanted}, as PyTorch {torch.__version__}, got {nvcc} of CUDA {release}"
    raise BuildError(reason, f"install the CUDA toolkit {major}, or set CUDA_HOME to the folder where it is")


def toolkit_release() -> str:
    """Return the release of the toolkit, as in '13.0', or PyTorch's release without a toolkit.

    A cache that was filled with that release also works on machines without a toolkit.
    """
    try:
        return _release(find_nvcc())
    except BuildError:
        return str(torch.version.cuda)


def toolkit_folders(nvcc: str) -> tuple[list[str], list[str]]:
    """Return the folders in which nvcc finds headers and libraries; only nvcc itself can tell."""
    commands = _ask(nvcc, "-dryrun", "-shared", "x.o")
    return re.findall(r'"-I([^"]+)"', commands), re.findall(r'"-L([^"]+)"', commands)


def _release(nvcc: str) -> str:
    match = re.search(r"release (\d+\.\d+)", _ask(nvcc, "--version"))
    return match[1] if match else "(unknown release)"


def _ask(nvcc: str, *question: str) -> str:
    try:
        done = subprocess.run([nvcc, *question], capture_output=True, text=True, errors="replace", check=False)
    except OSError:  # not a program for this machine
        return ""
    return done.stdout + done.stderr
