"""Whether compiled kernels run on a device: what they take, and what to say where there are none."""

import warnings

from torch import Tensor

from .library import load_kernels

BACKENDS = ("auto", "kernel", "fla", "reference")
# Greatest size of a key or a value, if kernels have a limit: kGreatestSize of cuda_ext/cuda/launchers.h.
GREATEST_SIZE = {"cuda": 512}
_warned: set[str] = set()


def check_backend(backend: str) -> None:
    """Raise ValueError for a name of no backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


def warn_of_size(q: Tensor, v: Tensor, required: bool, greatest_sizes: dict[str, int] | None = None) -> bool:
    """Warn once if keys or values are too large for their device's kernel, and return whether they are.

    greatest_sizes: by device type; None: of the rules. Raises RuntimeError instead if the kernel is required.
    """
    greatest, sizes = (greatest_sizes or GREATEST_SIZE).get(q.device.type), (*q.shape[-1:], *v.shape[-1:])
    if greatest is None or max(sizes, default=0) <= greatest:
        return False
    reason = f"keys and values must have at most {greatest} dimensions for its kernels, got {sizes}; use smaller heads"
    if required:
        raise RuntimeError(f"no compiled kernel for {q.device.type}: {reason}")
    _warn_once(q.device.type, reason)
    return True


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
