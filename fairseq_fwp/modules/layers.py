"""Layers that all models share: float32 where it is needed, dropout, the Transformer's layer, oneDNN's products."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fairseq_fwp.ops.rule import is_transformed


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32 if its dtype has 16 bits, and x itself otherwise."""
    return x.float() if x.dtype.itemsize < 4 else x


def check(condition: Any, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


Entry = TypeVar("Entry")


def look_up(kind: str, name: str, table: Mapping[str, Entry], besides: str = "") -> Entry:
    """Return the entry of that name. Raises ValueError for an unknown name, with the kind of entry and all names.

    besides: words for further choices in the error.
    """
    if name not in table:
        known = f"{besides}one of {', '.join(table)}"
        raise ValueError(f"the {kind} must be {known}, got {name!r}: if a plug-in has it, give that plug-in")
    return table[name]


class Dropout(nn.Dropout):
    """torch's layer; `retained` keeps it on in evaluation too, as in fairseq's own layer.

    owner: the module that has it; --retain-dropout-modules names its class, or a class that it extends.
    """

    def __init__(self, p: float, owner: nn.Module) -> None:
        super().__init__(p)
        self.owner_names = {kind.__name__ for kind in type(owner).__mro__}
        self.retained = False

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, self.training or self.retained)

    def make_generation_fast_(
        self, retain_dropout: bool = False, retain_dropout_modules: list[str] | None = None, **kwargs: Any
    ) -> None:
        """Prepare for generation; fairseq says whether dropout stays on, in the named modules or in all."""
        named = retain_dropout_modules is None or not self.owner_names.isdisjoint(retain_dropout_modules)
        self.retained = retain_dropout and named


def layer_norm(dim: int, rms_norm: bool = False, epsilon: float = 1e-5) -> nn.Module:
    """Return layer normalisation, or RMS normalisation without shift (Zhang & Sennrich 2019, arXiv 1910.07467)."""
    check(epsilon > 0, f"`norm_epsilon` must be above 0, got {epsilon}")
    return nn.RMSNorm(dim, eps=epsilon) if rms_norm else nn.LayerNorm(dim, eps=epsilon)


class LayerState(NamedTuple):
    """The state of a layer with a token shift: that of its attention, and the last input of the feed-forward block."""

    attention: Any
    recent: Tensor


class DecoderLayer(nn.Module):
    """Attention and feed-forward blocks with residual connections (Vaswani et al. 2017, Sec. 3.1).

    attention: an `Attention`; activation: between the two feed-forward projections; dropout: after each block;
    activation_dropout: after the activation;
    normalize_before: layer normalisation before each block (pre-norm) instead of after its residual (post-norm);
    rms_norm, norm_epsilon: see `layer_norm`;
    swiglu: feed-forward blocks W_2 (SiLU(W_1 x) * W_3 x) without biases, fc1 = [W_1; W_3] (Shazeer
        2020, arXiv 2002.05202);
    token_shift: a `TokenShift` S of one mixture; feed-forward blocks W_2 max(W_1 S x, 0)^2 without biases (Peng et al.
        2025, arXiv 2503.14456, Sec. 4.2).
    """

    def __init__(
        self,
        attention: nn.Module,
        embed_dim: int,
        ffn_embed_dim: int,
        activation: Callable[[Tensor], Tensor],
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        normalize_before: bool = False,
        rms_norm: bool = False,
        norm_epsilon: float = 1e-5,
        swiglu: bool = False,
        token_shift: nn.Module | None = None,
    ) -> None:
        super().__init__()
        bias = not swiglu and token_shift is None
        self.self_attn = attention
        self.self_attn_layer_norm = layer_norm(embed_dim, rms_norm, norm_epsilon)
        self.fc1 = nn.Linear(embed_dim, (1 + swiglu) * ffn_embed_dim, bias=bias)
        self.fc2 = nn.Linear(ffn_embed_dim, embed_dim, bias=bias)
        self.final_layer_norm = layer_norm(embed_dim, rms_norm, norm_epsilon)
        self.token_shift = token_shift
        self.activation = squared_relu if token_shift is not None else gated_silu if swiglu else activation
        self.dropout = Dropout(dropout, self)
        self.activation_dropout = Dropout(activation_dropout, self)
        self.normalize_before = normalize_before

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        key_padding_mask: Tensor | None = None,
        last: int | None = None,
        first: Tensor | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Any]:
        """Return y (B, L, embed_dim), or (B, last, embed_dim), for x (B, L, embed_dim), and the layer's new state.

        first (B, L): True at tokens that begin a document, for an attention that supports it;
        shared: what layers give to later ones in this pass, for an attention that does.
        """
        recent = None
        if self.token_shift is not None and state is not None:
            state, recent = state
        y = self.self_attn_layer_norm(x) if self.normalize_before else x
        options = {"shared": shared} if getattr(self.self_attn, "shares", False) else {}
        y, state = self.self_attn(y, state, key_padding_mask, *(() if first is None else (first,)), **options)
        if last is not None and self.token_shift is None:
            x, y = x[:, -last:], y[:, -last:]
        x = x + self.dropout(y)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)
        y = self.final_layer_norm(x) if self.normalize_before else x
        if self.token_shift is not None:
            mixed, recent = self.token_shift(y, recent, key_padding_mask, first)
            y, state = mixed[0], LayerState(state, recent)
            if last is not None:
                x, y = x[:, -last:], y[:, -last:]
        y = self.fc2(self.activation_dropout(self.activation(self.fc1(y))))
        x = x + self.dropout(y)
        return (x if self.normalize_before else self.final_layer_norm(x)), state


def gated_silu(x: Tensor) -> Tensor:
    """Return SiLU(x_1) * x_2 (..., F) for x = [x_1; x_2] (..., 2 F)."""
    gate, y = x.chunk(2, -1)
    return F.silu(gate) * y


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)^2."""
    return F.relu(x).square()


# With fewer rows, oneDNN is not faster than MKL (measured with 128 to 512 columns).
MIN_ROWS = 256


def faster_linear(rows: int = MIN_ROWS, device: torch.device | None = None) -> AbstractContextManager[Any]:
    """Return a context for linear layers of so many rows: `OneDnnLinear` if that is faster, else one without effect.

    Use it if numbers of rows repeat: oneDNN takes 0.5 to 1 ms to prepare for each new number. device: None = a CPU.
    """
    if torch.compiler.is_compiling() or rows < MIN_ROWS or not mkl_is_slow():
        return nullcontext()
    return OneDnnLinear() if device is None or device.type == "cpu" else nullcontext()


class OneDnnLinear(TorchFunctionMode):
    """`with OneDnnLinear(): ...` sends every float32 `F.linear` on a CPU, also in fairseq's modules, to oneDNN.

    torch multiplies float32 matrices with MKL, which leaves AVX-512 unused on AMD's processors: 95 GFLOP/s on a core of
    an EPYC, and 215 with oneDNN, which is as exact. Gradients use oneDNN too. Second derivatives, torch.func, forward
    mode, other devices and other dtypes use torch.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.linear or kwargs or not _is_taken_over(*args[:2]):
            return func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled():
            return _product(*args)
        # Rows, so that no view is made inside: it could not be changed in place.
        x, weight, *bias = args
        return _Linear.apply(x.reshape(-1, x.shape[-1]), weight, *(bias or [None])).view(*x.shape[:-1], len(weight))


@cache
def mkl_is_slow() -> bool:
    """Return whether this processor is one of AMD's with AVX-512, as Linux describes it."""
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in described and "avx512f" in described


@cache
def _is_available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_taken_over(x: Tensor, weight: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and _is_available()
        and not is_transformed()
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # A weight with gaps between its rows, like the gradient of part of the logits, takes a thousand times as long.
    if not (weight.is_contiguous() or weight.T.is_contiguous()):
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """x weight^T + bias for rows x (N, columns), with derivatives of any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        # A graph of the gradients needs their own derivatives, and oneDNN cannot sum over zero rows.
        product = F.linear if torch.is_grad_enabled() or not len(grad) or is_transformed() else _product
        return (
            product(grad, weight.T) if of_x else None,
            # The first factor is copied, so it is the narrower one.
            (product(grad.T, x.T) if len(weight) <= x.shape[1] else product(x.T, grad.T).T) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )
