"""The compiled kernels of ``cuda_ext/``: built by ``torch.utils.cpp_extension``, cached and loaded, at first use."""

from .library import DEVICES, KernelStatus, kernel_status, load_kernels

__all__ = ["DEVICES", "KernelStatus", "kernel_status", "load_kernels"]
