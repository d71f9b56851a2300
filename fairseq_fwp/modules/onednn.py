"""Linear layers of float32 on a CPU through oneDNN, for evaluation."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class OneDnnLinear(TorchFunctionMode):
    """`with OneDnnLinear(): ...` sends `F.linear` to oneDNN, whose products of float32 are as exact as torch's own.

    torch multiplies float32 matrices with MKL, which on processors other than Intel's leaves AVX-512 unused: on one
    core of an AMD EPYC it reaches 95 GFLOP/s, oneDNN 215. oneDNN's function has no backward, so that whatever needs
    gradients, and every other device or dtype, takes torch's way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and self.available and not kwargs and not torch.is_grad_enabled():
            x, weight, *bias = args
            if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32:
                return torch.ops.mkldnn._linear_pointwise(x, weight, bias[0] if bias else None, "none", [], "")
        return func(*args, **(kwargs or {}))
