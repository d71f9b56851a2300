"""Whether compiled kernels run on a device: what they take, and what to say where there are none."""

import sys
import warnings

import torch
from torch import Tensor

from .library import load_kernels

# Greatest size of a key or a value, if kernels have a limit: kGreatestSize of cuda_ext/cuda/launchers.h.
GREATEST_SIZE = {"cuda": 512}
FLOAT16 = "fairseq_fwp runs float16 without tensor cores: use bfloat16 (--bf16, not --fp16), which runs on them"
_warned: set[str] = set()


def too_large(q: Tensor, v: Tensor, required: bool) -> bool:
    """Return whether keys or values are too large for their device's kernel: warn once, or raise RuntimeError if so."""
    if q.device.type not in GREATEST_SIZE:
        return False
    greatest, sizes = GREATEST_SIZE[q.device.type], (*q.shape[-1:], *v.shape[-1:])
    if max(sizes, default=0) <= greatest:
        return False
    reason = f"keys and values must have at most {greatest} dimensions for its kernels, got {sizes}; use smaller heads"
    if required:
        raise RuntimeError(f"no compiled kernel for {q.device.type}: {reason}")
    _warn_once(q.device.type, reason)
    return True


def warn_of_float16(q: Tensor) -> None:
    """Warn once that the CUDA kernels on tensor cores take bfloat16, and not float16."""
    if q.dtype == torch.float16 and "float16" not in _warned and not torch.compiler.is_compiling():
        _warned.add("float16")
        warnings.warn(FLOAT16, RuntimeWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """Return the stacklevel, for the function that calls this, of the first frame outside of this package."""
    package, level, frame = __name__.partition(".")[0], 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level


def require_kernel(device_type: str) -> None:
    """Build or load the kernels of a device; raise RuntimeError if that fails."""
    status = load_kernels(device_type)
    if not status.built:
        raise RuntimeError(f"no compiled kernel for {device_type}: {status.reason}; {status.cure}")


# As the decorator torch.compiler.assume_constant_result, which would import the compiler: a second at every start.
require_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kernel_ready(device_type: str) -> bool:
    """Build or load the kernels of a device at first use; if that fails, warn once and return False.

    Only the Python bodies of the operators call this. Once a library is loaded, the dispatcher calls its kernels, and
    these bodies no longer run.
    """
    status = load_kernels(device_type)
    if not status.built:
        _warn_once(device_type, f"{status.reason}; {status.cure}")
    return status.built


def _warn_once(device_type: str, reason: str) -> None:
    if device_type not in _warned:
        _warned.add(device_type)
        warnings.warn(
            f"fairseq_fwp runs its update rules on {device_type} as slow loops in Python: {reason}",
            RuntimeWarning,
            stacklevel=3,
        )
