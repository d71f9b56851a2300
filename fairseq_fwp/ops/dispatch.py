"""Which implementation runs an update rule: the compiled kernel, or the loop in Python that defines it."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..kernels import load_kernels

BACKENDS = ("auto", "kernel", "reference")
# Of a key or a value, where the kernels of a device have a limit: kGreatestSize of cuda_ext/cuda/launchers.h.
GREATEST_SIZE = {"cuda": 512}
_warned: set[str] = set()


def run(
    backend: str,
    op: Callable[..., Any],
    reference: Callable[..., Any],
    check: Callable[..., None],
    *arguments: Tensor | None,
) -> Any:
    """Run a rule: the operator, which prefers a compiled kernel, or its reference. ``check`` knows the arguments."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto" and _too_large(arguments[0], arguments[2]):
        backend = "reference"
    if backend == "kernel" and isinstance(arguments[0], Tensor):
        _require_kernel(arguments[0].device.type)
    if backend == "reference" or torch.compiler.is_compiling():
        check(*arguments)
        return (reference if backend == "reference" else op)(*arguments)
    if forward_ad._current_level >= 0:
        _refuse_tangents(op, arguments)
    # The checks cost several times what a kernel does on small inputs, and it looks at its arguments itself. They put
    # into words what it refuses.
    try:
        return op(*arguments)
    except RuntimeError:
        check(*arguments)
        raise


def _refuse_tangents(op: Any, arguments: tuple[Tensor | None, ...]) -> None:
    """Derivatives in forward mode would be zero in silence, but for kernels, which refuse them once they are loaded."""
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
        raise NotImplementedError(f"{op.name()} has no derivative in forward mode: use backend='reference'")


def _too_large(q: Tensor | None, v: Tensor | None) -> bool:
    """Whether keys or values exceed what the kernels of their device take; warns once where they do."""
    if not isinstance(q, Tensor) or q.device.type not in GREATEST_SIZE or not isinstance(v, Tensor):
        return False
    greatest, sizes = GREATEST_SIZE[q.device.type], (*q.shape[-1:], *v.shape[-1:])
    if max(sizes, default=0) <= greatest:
        return False
    _warn_once(q.device.type, f"its kernels take keys and values of up to {greatest}, got {sizes}; use smaller heads")
    return True


def _require_kernel(device_type: str) -> None:
    status = load_kernels(device_type)
    if not status.built:
        raise RuntimeError(f"no compiled kernel for {device_type}: {status.reason}; {status.cure}")


# The decorator torch.compiler.assume_constant_result does no more, but imports the compiler: a second at every start.
_require_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kernel_ready(device_type: str) -> bool:
    """Build or load the kernels of a device at first use; where that fails, warn once and return False.

    Only the Python bodies of the operators ask. Once a library is loaded the dispatcher prefers its kernels, and
    those bodies are not reached any more.
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


def refuse_double_backward(op: Any) -> None:
    """Make differentiating a backward operator an error: it has no derivative, and silence would be a wrong one."""

    def raise_error(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(f"{op._qualname} cannot be differentiated: for second derivatives use backend='reference'")

    op.register_autograd(raise_error)
