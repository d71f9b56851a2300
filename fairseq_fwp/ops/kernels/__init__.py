"""The compiled kernels of ``cuda_ext/``: built by ``torch.utils.cpp_extension`` at first use, cached and loaded."""

from .library import DEVICES, KernelStatus, kernel_status, load_kernels

__all__ = ["DEVICES", "KernelStatus", "kernel_status", "load_kernels"]
