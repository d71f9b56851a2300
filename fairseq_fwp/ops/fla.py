"""The Triton kernels of flash-linear-attention on a CUDA device: ``backend="fla"``, with the package ``fla-core``.

Its functions take (B, L, H, D), logarithms of decays, and documents as one row of tokens with the places where they
start. FORMS has a function and its arguments for each rule. Our own kernels take what these do not: decays of exactly
zero, float32 and float64, and keys of any size. They also give the same bits in every run.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .arguments import Results, for_heads

DEVICES, DTYPES, GREATEST_KEY = ("cuda",), (torch.bfloat16, torch.float16), 256
DECAYS = ("gate", "decay")  # arguments of which fla takes the logarithm
Form = tuple[str, dict[str, Any]]  # a function, by module and name, and its arguments


def _gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Form:
    written = ((1 - gate.float()).unsqueeze(-1) * k).to(k.dtype)
    return "simple_gla.chunk_simple_gla", {"q": q, "k": written, "v": v, "g": gate.float().log()}


def _gla(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Form:
    function = "gla.chunk_gla" if decay.dim() == 4 else "simple_gla.chunk_simple_gla"
    return function, {"q": q, "k": k, "v": v, "g": decay.float().log()}


def _gated_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Form:
    function = "kda.chunk_kda" if decay.dim() == 4 else "gated_delta_rule.chunk_gated_delta_rule"
    return function, {"q": q, "k": k, "v": v, "g": decay.float().log(), "beta": beta}


def _delta_product(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor) -> Form:
    # (B, L, H, N, ...) -> (B, L N, H, ...)
    steps = {name: x.transpose(2, 3).flatten(1, 2) for name, x in {"k": k, "v": v, "beta": beta}.items()}
    more = {"g": None if decay is None else decay.float().log(), "num_householder": k.shape[3]}
    return "gated_delta_product.chunk_gated_delta_product", {"q": q, **steps, **more}


def _dplr(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, removal_key: Tensor, removal: Tensor) -> Form:
    by_key = decay if decay.dim() == 4 else decay.unsqueeze(-1).expand_as(removal)
    tokens = {"r": q, "k": k, "v": v, "a": -removal_key.to(k.dtype), "b": removal.to(k.dtype)}
    return "rwkv7.chunk_rwkv7", {**tokens, "w": by_key.float().log()}


def _rwkv7(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, removal_key: Tensor, removal_rate: Tensor) -> Form:
    return _dplr(q, k, v, decay, removal_key, removal_rate * removal_key)


def _gdn2(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor) -> Form:
    by_key = decay if decay.dim() == 4 else decay.unsqueeze(-1).expand_as(erase)
    return "gdn2.chunk_gdn2", {"q": q, "k": k, "v": v, "g": by_key.float().log(), "b": erase, "w": write}


FORMS: dict[str, Callable[..., Form]] = {
    "sum_rule": lambda q, k, v: ("linear_attn.chunk_linear_attn", {"q": q, "k": k, "v": v, "normalize": False}),
    "gated_rule": _gated,
    "gla_rule": _gla,
    "delta_rule": lambda q, k, v, beta: ("delta_rule.chunk_delta_rule", {"q": q, "k": k, "v": v, "beta": beta}),
    "gated_delta_rule": _gated_delta,
    "delta_product_rule": lambda q, k, v, beta: _delta_product(q, k, v, None, beta),
    "gated_delta_product_rule": _delta_product,
    "rwkv7_rule": _rwkv7,
    "dplr_rule": _dplr,
    "gdn2_rule": _gdn2,
}


def run(rule: str, tensors: dict[str, Tensor], state: Tensor | None = None, first: Tensor | None = None) -> Results:
    """Return out (B, H, L, Dv) and the new state (B, H, Dk, Dv) of a rule for its arguments by name.

    ValueError, TypeError: what fla's kernels do not take. RuntimeError: there is no such kernel, device or package.
    """
    check_inputs(rule, tensors["q"], tensors["v"])
    _check_decays(rule, tensors)
    heads = tensors["v"].shape[1]
    shared = {name: for_heads(x, heads) if name in "qk" else x for name, x in tensors.items()}
    function, arguments = FORMS[rule](*(x.transpose(1, 2) for x in shared.values()))
    places: Tensor | None = None
    last: Any = slice(None)
    if first is not None:
        places, begins, last = _documents(first)
        arguments = {name: _one_row(x) for name, x in arguments.items()}
        if state is not None:
            carried = state.masked_fill(first[:, 0, None, None, None], 0)
            state = state.new_zeros((len(places) - 1, *state.shape[1:])).index_copy(0, begins, carried)
    call = _load(function)
    out, memory = call(**arguments, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=places)
    B, _, L = tensors["q"].shape[:3]
    return out.view(B, L, *out.shape[2:]).transpose(1, 2), memory[last]


def _documents(first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the places of the documents of all rows in one row, and the numbers of each row's first and last."""
    starts = first.clone()
    starts[:, 0] = True
    numbers = starts.flatten().cumsum(0).view_as(starts) - 1
    places = starts.flatten().nonzero().flatten()
    return torch.cat((places, places.new_tensor([first.numel()]))), numbers[:, 0], numbers[:, -1]


def _one_row(x: Any) -> Any:
    return x.flatten(0, 1).unsqueeze(0) if isinstance(x, Tensor) else x


def check_inputs(rule: str, q: Tensor, v: Tensor) -> None:
    """Raise what `run` does for such q and v, whatever the gates are."""
    prefix = f"{rule} with backend='fla': "
    if rule not in FORMS:
        raise RuntimeError(f"{prefix}the rule must be one of {', '.join(FORMS)}; use backend='auto'")
    if q.device.type not in DEVICES:
        raise RuntimeError(f"{prefix}tensors must be on a CUDA device, got {q.device}; use backend='auto'")
    if q.dtype not in DTYPES:
        raise TypeError(f"{prefix}q must be bfloat16 or float16, got {q.dtype}; use backend='auto' for others")
    if not 0 < q.shape[3] <= GREATEST_KEY or not v.shape[-1] or not q.shape[2]:
        raise ValueError(f"{prefix}there must be tokens, with keys of at most {GREATEST_KEY}, got q {tuple(q.shape)}")
    _load("__name__")  # of fla.ops


def _check_decays(rule: str, tensors: dict[str, Tensor]) -> None:
    prefix = f"{rule} with backend='fla': "
    decays = {name: tensors[name] for name in DECAYS if name in tensors}
    if rule == "gated_delta_product_rule" and any(x.dim() == 4 for x in decays.values()):
        raise ValueError(f"{prefix}decay must have shape (B, H, L), got {tuple(decays['decay'].shape)}")
    for name, x in decays.items():
        if not (x > 0).all():
            raise ValueError(f"{prefix}{name} must be above 0, got {x.min().item():g}; use backend='auto'")


def _load(function: str) -> Callable[..., Results]:
    module, _, name = f"fla.ops.{function}".rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"backend='fla' needs the package fla-core, got {error}: pip install fla-core") from error
