"""Language models as ONNX graphs, which run where PyTorch and fairseq are not.

A graph reads tokens (B, L) after a state, and returns their log-probabilities (B, L, V) and the state after them. Its
memories are those of the model: of constant size, if all attention is fast weights. ONNX Runtime has a kernel for
rules that add, decay or correct (`com.microsoft.LinearAttention`); with other rules a graph reads one token at a time.

Needs the packages onnx and onnxscript.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..ops import convolution
from ..ops.fast_weights import Inputs, reference_of
from ..ops.rule import Rule
from ..ops.rules import RULES

OPSET = 23  # of the standard operators


class Entry(NamedTuple):
    """A tensor of the state: its name, dtype, and sizes for B = 1 before the first token.

    grows: the dimension that grows with the tokens read, as in softmax attention; None: its size is constant.
    """

    name: str
    dtype: str
    start: list[int]
    grows: int | None


class _Reader(nn.Module):
    """Reads tokens after a state that is given, and returned, as separate tensors."""

    def __init__(self, decoder: Any, state: Any) -> None:
        super().__init__()
        self.decoder = decoder
        leaves, self.structure = pytree.tree_flatten(state)
        self.is_tensor = [x is not None for x in leaves]

    def forward(self, tokens: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if is_tensor else None for is_tensor in self.is_tensor]
        x, state = self.decoder.step(tokens, pytree.tree_unflatten(leaves, self.structure), 0)
        return self.decoder.adaptive_softmax.get_log_prob(x, None), *_tensors(state)


def to_onnx(decoder: Any) -> tuple[Any, list[Entry], bool]:
    """Return the graph of a decoder (`torch.onnx.ONNXProgram`), its state, and whether L may be more than one.

    decoder: that of an `fwp_lm` in evaluation mode, float32, on a CPU; it has `step` and `adaptive_softmax`.
    RuntimeError: a part of it has no form in ONNX.
    """
    tokens = torch.full((2, 3), decoder.padding_idx + 1)
    decoder.reads_padding = False
    try:
        with torch.no_grad():
            start, after = (decoder.step(part, None, 0)[1] for part in (tokens[:, :0], tokens))
            reader, entries = _Reader(decoder, start), _entries(start, after)
            try:
                return _export(reader, tokens, after, entries, many=True), entries, True
            except (RuntimeError, ValueError):  # a loop over tokens, or a rule without such an operator
                return _export(reader, tokens[:, :1], after, entries, many=False), entries, False
    finally:
        decoder.reads_padding = True


def _entries(start: Any, after: Any) -> list[Entry]:
    """Describe the tensors of the state before the first token; after: the state after some."""
    pairs = zip(pytree.tree_flatten_with_path(start)[0], pytree.tree_leaves(after), strict=True)
    return [
        Entry(pytree.keystr(path).strip("."), str(x.dtype).removeprefix("torch."), [1, *x.shape[1:]], _growing(x, y))
        for (path, x), y in pairs
        if x is not None
    ]


def _growing(start: Tensor, after: Tensor) -> int | None:
    return next((n for n in range(1, start.dim()) if start.shape[n] != after.shape[n]), None)


class _OneToken(RuntimeError):
    """A rule has no operator for several tokens in ONNX."""


def _tensors(state: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(state) if x is not None]


def _export(reader: _Reader, tokens: Tensor, state: Any, entries: list[Entry], many: bool) -> Any:
    batch, length, seen = map(torch.export.Dim, ("batch", "length", "seen"))
    of_state = tuple({0: batch} | ({entry.grows: seen} if entry.grows else {}) for entry in entries)
    shapes = ({0: batch} | ({1: length} if many else {}), of_state)
    program = torch.export.export(reader, (tokens, *_tensors(state)), dynamic_shapes=shapes, strict=False)
    program = program.run_decompositions(_translations())
    names = [entry.name for entry in entries]
    return torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=["tokens", *names],
        output_names=["log_probs", *(f"next.{name}" for name in names)],
        verbose=False,
    )


def _translations() -> dict[Any, Callable[..., Any]]:
    """Return what stands for our operators in a graph: an operator of ONNX Runtime, or the definition for one token."""
    found: dict[Any, Callable[..., Any]] = {
        torch.ops.fwp.fast_weights.default: _linear_attention,
        torch.ops.fwp.causal_conv1d.default: convolution._definition,
    }
    for rule in RULES:
        if rule.family is None:
            found[getattr(torch.ops.fwp, rule.name).default] = partial(_one_token, rule)
    return found


def _one_token(rule: Rule, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tokens, state, first = given
    if tokens[0].shape[2] != 1:
        raise _OneToken
    out, after = rule.reference(*tokens, state=state, first=first)
    return out, after, tokens[0].new_zeros(0)


def _linear_attention(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, unused = Inputs(*given), given[0].new_zeros(0)
    B, H, L, Dv = x.v.shape
    Dk = x.q.shape[3]
    q, k = (y if y.shape[1] == H else y.repeat_interleave(H // y.shape[1], 1) for y in (x.q, x.k))
    state = x.q.new_zeros((B, H, Dk, Dv)) if x.state is None else x.state
    if x.value_decay is not None or x.removal is not None:
        if L != 1:
            raise _OneToken
        return *reference_of(x)(*x.tokens, state=state, first=None), unused, unused

    def pack(y: Tensor) -> Tensor:
        return y.transpose(1, 2).flatten(2) if y.dim() == 4 else y.transpose(1, 2)

    v = x.v if x.erases or x.rate is None else x.v * x.rate.unsqueeze(-1)
    rate = x.rate if x.rate is not None else x.q.new_ones(B, H, L)
    rule = ("linear", "gated", "delta", "gated_delta")[2 * x.erases + (x.decay is not None)]
    inputs = (pack(q), pack(k), pack(v), state, None if x.decay is None else pack(x.decay).log())
    out, after = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        (*inputs, pack(rate) if x.erases else None),
        {"update_rule": rule, "scale": 1.0, "q_num_heads": H, "kv_num_heads": H},
        dtypes=(v.dtype, state.dtype),
        shapes=((B, L, H * Dv), state.shape),
        version=1,
    )
    return out.unflatten(2, (H, Dv)).transpose(1, 2), after, unused, unused
