"""Models of transformers on our operators: gated delta rule and Kimi Delta Attention train and decode on a CPU.

    from fairseq_fwp.interop.transformers import use_in_transformers

    use_in_transformers()  # models of Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear, ... as before, but faster

transformers has no kernels for a CPU. Its models name functions in PyTorch, with flash-linear-attention's arguments,
and these are replaced; tensors on other devices still get transformers' own. Packed sequences (`cu_seq_lens_q`, as
`DataCollatorWithFlattening` gives them) are kept apart. Tried with transformers 5.24.0.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor

from . import fla

Function = Callable[..., Any]
# By the names that transformers gives its functions in PyTorch.
FUNCTIONS: dict[str, Function] = {
    "torch_chunk_gated_delta_rule": fla.chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": fla.fused_recurrent_gated_delta_rule,
    "chunk_kimi_delta_attention": fla.chunk_kda,
    "recurrent_kimi_delta_attention": fla.fused_recurrent_kda,
    "causal_conv1d_fn": fla.causal_conv1d_fn,
    "causal_conv1d_update": fla.causal_conv1d_update,
}
DECORATOR = "use_kernel_func_from_hub_with_fallback"  # of transformers.integrations, around each of them


class use_in_transformers:
    """Give our functions to the models of transformers, until `undo()`, or for a `with` block.

    RuntimeError: this version of transformers has no such functions.
    """

    def __init__(self) -> None:
        from transformers import integrations
        from transformers.integrations import hub_kernels

        if not hasattr(hub_kernels, DECORATOR):
            raise RuntimeError(f"transformers must have {DECORATOR}, as 5.24.0 has: pip install -U transformers")
        self._active = True
        self._replaced: list[tuple[Any, str, Any]] = []
        for name, module in [*sys.modules.items()]:
            if name.startswith("transformers.models.") and ".modeling_" in name:
                self._replace_in(module)
        theirs = getattr(hub_kernels, DECORATOR)
        for owner in (hub_kernels, integrations):  # for models that are imported later
            self._replace(
                owner, DECORATOR, lambda *how, **named: lambda function: self._ours(theirs(*how, **named)(function))
            )

    def undo(self) -> None:
        """Give transformers its own functions back."""
        self._active = False
        while self._replaced:
            owner, name, before = self._replaced.pop()
            setattr(owner, name, before)

    def __enter__(self) -> "use_in_transformers":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _replace_in(self, module: ModuleType) -> None:
        for name in FUNCTIONS.keys() & vars(module).keys():
            self._replace(module, name, self._ours(getattr(module, name)))

    def _ours(self, theirs: Function) -> Function:
        """Return a function that calls ours for tensors on a CPU."""
        ours = FUNCTIONS.get(theirs.__name__)
        if ours is None:
            return theirs
        known = inspect.signature(ours).parameters.keys()

        @functools.wraps(theirs)
        def call(*args: Any, **named: Any) -> Any:
            if not self._active or args[0].device.type != "cpu":
                return theirs(*args, **named)
            ends = named.pop("cu_seqlens", None)
            ends = named.get("cu_seq_lens_q") if ends is None else ends
            if ends is not None and "seq_idx" in known and named.get("seq_idx") is None:
                named["seq_idx"] = _numbers(ends, args[0].shape[-1])
            elif ends is not None and "cu_seqlens" in known:
                named["cu_seqlens"] = ends
            return ours(*args, **{name: x for name, x in named.items() if name in known})

        return call


def _numbers(ends: Tensor, length: int) -> Tensor:
    """Return the number of each token's sequence (1, length)."""
    places = torch.arange(length, device=ends.device)
    return torch.searchsorted(ends, places, right=True, out_int32=True).unsqueeze(0)
