"""Models of transformers on our operators: gated delta rule, Kimi Delta Attention and mLSTM train and decode on a CPU.

    from fairseq_fwp.interop.transformers import use_in_transformers

    use_in_transformers()  # models of Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear, xLSTM ... as before, but faster

transformers has no kernels for a CPU. Its models name functions in PyTorch, with flash-linear-attention's arguments,
and these are replaced; tensors on other devices still get transformers' own. Packed sequences (`cu_seq_lens_q`, as
`DataCollatorWithFlattening` gives them) are kept apart. Tested with transformers 5.20 and 5.24.
"""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..ops import MlstmState, mlstm_rule
from ..ops.arguments import state_dtype
from ..ops.checks import check
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
THEIR_NAMES = {"query": "q", "key": "k", "value": "v", "hidden_states": "x"}
_replaced: list[tuple[Any, str, Any]] = []  # object, name, and what it was
_users = 0


class use_in_transformers(AbstractContextManager["use_in_transformers"]):
    """Give our functions to the models of transformers, until `undo()`, or for a `with` block; uses may overlap.

    RuntimeError: this version of transformers has no such functions.
    """

    def __init__(self) -> None:
        global _users
        if not _users:
            _replace_all()
        _users += 1
        self._in_use = True

    def undo(self) -> None:
        """Give transformers its own functions back, unless they are still replaced by another use."""
        global _users
        _users -= self._in_use
        self._in_use = False
        while _replaced and not _users:
            owner, name, before = _replaced.pop()
            setattr(owner, name, before)

    def __exit__(self, *error: object) -> None:
        self.undo()


def _replace_all() -> None:
    from transformers import integrations
    from transformers.integrations import hub_kernels

    if not hasattr(hub_kernels, DECORATOR):
        raise RuntimeError(f"transformers must have {DECORATOR}, as 5.20 and 5.24 have: pip install -U transformers")
    theirs = getattr(hub_kernels, DECORATOR)
    _replace_xlstm()  # first: where its warning is an error, nothing has been replaced

    def decorator(*how: Any, **named: Any) -> Callable[[Function], Function]:
        return lambda function: _ours(theirs(*how, **named)(function))

    for name, module in [*sys.modules.items()]:
        if name.startswith("transformers.models.") and ".modeling_" in name:
            for function in FUNCTIONS.keys() & vars(module).keys():
                _replace(module, function, _ours(getattr(module, function)))
    for owner in (hub_kernels, integrations):  # for models that are imported later
        _replace(owner, DECORATOR, decorator)


def _replace_xlstm() -> None:
    """Replace the backend of xLSTM, and the sizes of its cache, which are not those of its layers."""
    from transformers.models.xlstm import configuration_xlstm, modeling_xlstm

    if "xLSTMBackend" not in vars(modeling_xlstm):
        reason = "transformers takes the layers of the package xlstm as they are: pip uninstall xlstm for ours"
        warnings.warn(f"xLSTM does not run on fairseq_fwp: {reason}.", stacklevel=4)
        return
    backend = modeling_xlstm.xLSTMBackend
    _replace(backend, "forward", _xlstm_backend(backend.forward))
    for name in ("qk", "v"):
        _replace(configuration_xlstm.xLSTMConfig, f"{name}_head_dim", _head_dim(f"{name}_dim_factor"))


class XlstmConfig(Protocol):
    """What is read of the configuration of xLSTM in transformers."""

    hidden_size: int
    num_heads: int
    return_last_states: bool
    mode: str
    eps: float


class XlstmBackend(Protocol):
    """The backend of xLSTM in transformers."""

    config: XlstmConfig


def _head_dim(factor: str) -> property:
    """Return the size of a head of xLSTM, as its layers have it."""

    def size(cfg: XlstmConfig) -> int:
        return int(cfg.hidden_size * getattr(cfg, factor)) // int(cfg.num_heads)

    return property(size)


def _xlstm_backend(theirs: Function) -> Function:
    """Return the backend's function, of tensors (B, H, L, ...) and gates (B, H, L), that calls ours on a CPU."""

    @functools.wraps(theirs)
    def forward(
        self: XlstmBackend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        igate: Tensor,
        fgate: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool | None = None,
        mode: str | None = None,
    ) -> object:
        if not _users or query.device.type != "cpu":
            states = (c_initial, n_initial, m_initial)
            return theirs(self, query, key, value, igate, fgate, *states, return_last_states, mode)
        given = [x for x in (c_initial, n_initial, m_initial) if x is not None]
        check(len(given) in (0, 3), "c_initial, n_initial and m_initial must be given together, got only some")
        if return_last_states is None:
            return_last_states = self.config.return_last_states
        return_last_states |= "inference" in (mode or self.config.mode)
        before = None
        if given:
            # The model overwrites its cache, which a backward pass may still need.
            C, n, m = (x.to(state_dtype(query.dtype), copy=torch.is_grad_enabled()) for x in given)
            before = MlstmState(C, n, m.squeeze(-1))
        query = query * query.shape[-1] ** -0.5
        out, after = mlstm_rule(query, key, value, igate, fgate, before, epsilon=self.config.eps)
        return (out, (after.weights, after.normalizer, after.maximum.unsqueeze(-1))) if return_last_states else out

    return forward


def _replace(owner: Any, name: str, new: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, new)


def _ours(theirs: Function) -> Function:
    """Return a function with the arguments of transformers' that calls ours for tensors on a CPU."""
    ours = FUNCTIONS.get(theirs.__name__)
    if ours is None:
        return theirs
    signature, our_names = inspect.signature(theirs), inspect.signature(ours).parameters.keys()

    @functools.wraps(theirs)
    def call(*args: Any, **named: Any) -> Any:
        bound = signature.bind(*args, **named).arguments
        arguments = {THEIR_NAMES.get(name, name): x for name, x in bound.items() if name != "kwargs"}
        arguments |= bound.get("kwargs", {})
        x = arguments["x"] if "x" in arguments else arguments["q"]
        if not _users or x.device.type != "cpu" or arguments.get("activation") not in (None, "silu", "swish"):
            return theirs(*args, **named)
        _keep_apart(arguments, our_names, x)
        return ours(**{name: x for name, x in arguments.items() if name in our_names})

    return call


def _keep_apart(arguments: dict[str, Any], our_names: Collection[str], x: Tensor) -> None:
    """Set the argument of our function that names the sequences of a packed batch."""
    ends, numbers = arguments.get("cu_seqlens"), arguments.get("seq_idx")
    ends = arguments.get("cu_seq_lens_q") if ends is None else ends
    if ends is None:
        if numbers is not None and "seq_idx" not in our_names:
            raise ValueError("cu_seq_lens_q must be given with seq_idx, got seq_idx only")
    elif x.shape[0] != 1:
        raise ValueError(f"packed sequences must be in one row, with cu_seq_lens_q, got {x.shape[0]} rows")
    elif "seq_idx" in our_names:
        if numbers is None:
            # A cache puts columns before the first sequence.
            places = torch.arange(x.shape[-1], device=x.device) - (x.shape[-1] - ends[-1])
            arguments["seq_idx"] = torch.searchsorted(ends[1:], places.to(ends.dtype), right=True).unsqueeze(0)
    elif "cu_seqlens" in our_names:
        if len(ends) > 2 and arguments.get("output_final_state"):
            raise ValueError("packed sequences must be computed without a cache: use_cache=False, got a cache")
        arguments["cu_seqlens"] = ends
