"""Models as ONNX graphs, which run where PyTorch and fairseq are not.

A graph reads tokens (B, L) after a state, and returns their log-probabilities (B, L, V) and the state after them. Its
memories are those of the model: of constant size, if all attention is fast weights. ONNX Runtime has a kernel for
rules that add, decay or correct (`com.microsoft.LinearAttention`); with other rules a graph reads one token at a time.

In translation a second graph reads the source, and returns what the decoder's attention keeps of it: a memory, or with
softmax its keys and values. The decoder's graph takes them before the state, and reads one token at a time.

Needs the packages onnx and onnxscript.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn
from torch._ops import OperatorBase
from torch.onnx import ONNXProgram
from torch.utils import _pytree as pytree

from fairseq_fwp.models.decoder import DecoderState
from fairseq_fwp.models.fwp_lm import FwpDecoder
from fairseq_fwp.models.fwp_transformer import FwpTransformerModel
from fairseq_fwp.models.translation_layers import CausalAttention, SequenceAttention, SourceMemory
from fairseq_fwp.modules.attention.base import AnyAttention
from fairseq_fwp.modules.attention.fast_weight import FastWeightState
from fairseq_fwp.modules.attention.hybrid import Hybrid
from fairseq_fwp.modules.attention.softmax import KeyValueCache, SoftmaxAttention
from fairseq_fwp.modules.positions import CountedPositions
from fairseq_fwp.ops import convolution, recurrent_delta, srwm
from fairseq_fwp.ops.fast_weights import Inputs, reference_of
from fairseq_fwp.ops.rule import Rule
from fairseq_fwp.ops.rules import RULES
from fairseq_fwp.patches.options import Settings

OPSET = 23  # of the standard operators


class Entry(NamedTuple):
    """A tensor of the state: its name, dtype, and sizes for B = 1 before the first token.

    grows: the dimension that grows with the tokens read, as in softmax attention; None: its size is constant.
    """

    name: str
    dtype: str
    start: list[int]
    grows: int | None


class Graphs(NamedTuple):
    """The graphs of a model.

    step: reads tokens after a state, whose tensors are `state`; many: whether it reads more than one token at a time;
    source: of a translation, reads its source; memory: what it returns, and `step` is given before the state.
    """

    step: ONNXProgram
    state: list[Entry]
    many: bool = False
    source: ONNXProgram | None = None
    memory: Sequence[Entry] = ()


class _Reader(nn.Module):
    """Reads tokens after a state that is given, and returned, as separate tensors."""

    def __init__(self, model: Any, state: object) -> None:
        super().__init__()
        self.model = model
        leaves, self.structure = pytree.tree_flatten(state)
        self.is_tensor = [x is not None for x in leaves]

    def forward(self, tokens: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(tensors)
        leaves = [next(remaining) if is_tensor else None for is_tensor in self.is_tensor]
        log_probs, state = self.read(tokens, pytree.tree_unflatten(leaves, self.structure))
        return log_probs, *_tensors(state)

    def read(self, tokens: Tensor, state: Any) -> tuple[Tensor, object]:
        x, state = self.model.step(tokens, _windows(self.model, state, _shrink), 0)
        return self.model.adaptive_softmax.get_log_prob(x, None), _windows(self.model, state, _fill)


class _Window(NamedTuple):
    """The keys and values (B, G, w - 1, d) of a window, 0 before the first token, and 1 at the tokens read (B, w - 1).

    In a graph it has its full size from the beginning.
    """

    keys: Tensor
    values: Tensor
    read: Tensor


def _windows(
    decoder: FwpDecoder, state: DecoderState, change: Callable[[int, Any], _Window | KeyValueCache]
) -> DecoderState:
    """Return the state of a decoder with the keys and values of its windows changed: change(window, these)."""

    def of_layer(attention: AnyAttention, of_its_layer: object) -> object:
        if not isinstance(attention, SoftmaxAttention | Hybrid) or attention.memory.window is None:
            return of_its_layer
        window = attention.memory.window

        def is_window(part: object) -> bool:
            return isinstance(part, _Window | KeyValueCache)

        return pytree.tree_map(lambda x: change(window, x) if is_window(x) else x, of_its_layer, is_leaf=is_window)

    return state._replace(layers=tuple(map(of_layer, decoder.attentions, state.layers)))


def _fill(window: int, cache: KeyValueCache) -> _Window:
    """Return the cache of a window in its full size."""
    read = cache.keys.new_ones(cache.keys.shape[::2]) if cache.padding is None else (~cache.padding).to(cache.keys)
    fill = window - 1 - read.shape[1]
    keys, values = (nn.functional.pad(x, (0, 0, fill, 0)) for x in (cache.keys, cache.values))
    return _Window(keys, values, nn.functional.pad(read, (fill, 0)))


def _shrink(window: int, state: _Window) -> KeyValueCache:
    """Return the cache that the attention reads, with padding before the first token."""
    return KeyValueCache(state.keys, state.values, state.read == 0)


def to_onnx(decoder: FwpDecoder) -> Graphs:
    """Return the graph of the decoder of an `fwp_lm` in evaluation mode, float32, on a CPU.

    RuntimeError: a part of it has no form in ONNX.
    """
    tokens = torch.full((2, 3), decoder.padding_idx + 1)
    decoder.reads_padding = False
    try:
        with torch.no_grad():
            steps = (decoder.step(part, None, 0)[1] for part in (tokens[:, :0], tokens))
            start, after = (_windows(decoder, state, _fill) for state in steps)
            reader, entries = _Reader(decoder, start), _entries(start, after)
            try:
                return Graphs(_export(reader, tokens, after, entries, many=True), entries, many=True)
            except (RuntimeError, ValueError):  # a loop over tokens, or a rule without such an operator
                return Graphs(_export(reader, tokens[:, :1], after, entries), entries)
    finally:
        decoder.reads_padding = True


_OfAttention: TypeAlias = FastWeightState | KeyValueCache  # what an attention keeps


class _Translating(NamedTuple):
    """What a translation's decoder is given: of each layer what it keeps of the source, and its own state."""

    memory: tuple[_OfAttention, ...]
    layers: tuple[_OfAttention, ...]
    positions: Tensor


class _Source(nn.Module):
    """Reads a source (B, S): the encoder, and the parts of the decoder's layers that read its output only."""

    def __init__(self, model: FwpTransformerModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> list[Tensor]:
        return _tensors(self.read(tokens))

    def read(self, tokens: Tensor) -> tuple[_OfAttention, ...]:
        encoder = self.model.encoder
        x = encoder.forward_embedding(tokens)[0].transpose(0, 1)
        for layer in encoder.layers:
            x = layer(x, None)
        if encoder.layer_norm is not None:
            x = encoder.layer_norm(x)
        return tuple(_remember(layer.encoder_attn, x.transpose(0, 1)) for layer in self.model.decoder.layers)


def _remember(attention: SequenceAttention | MultiheadAttention, source: Tensor) -> _OfAttention:
    """Return what attention to a source (B, S, D) keeps of it."""
    if isinstance(attention, SequenceAttention):
        return attention.summarize(source)
    heads = (attention.num_heads, attention.head_dim)
    projections = (attention.k_proj, attention.v_proj)
    keys_values = (projection(source).unflatten(2, heads).transpose(1, 2) for projection in projections)
    return KeyValueCache(*(x.contiguous() for x in keys_values))  # fairseq's attention takes views of them


class _Translation(_Reader):
    """Reads one token of a translation (B, 1), as fairseq's decoder in generation."""

    def __init__(self, model: FwpTransformerModel, memory: tuple[_OfAttention, ...]) -> None:
        decoder, rows = model.decoder, len(pytree.tree_leaves(memory)[0])
        layers = tuple(_empty(layer.self_attn, rows, decoder.embed_dim) for layer in decoder.layers)
        start = _Translating(memory, layers, torch.zeros(rows, dtype=torch.long))
        super().__init__(model, start)
        self.start = start

    def read(self, tokens: Tensor, state: _Translating) -> tuple[Tensor, tuple[list[_OfAttention], Tensor]]:
        decoder, positions = self.model.decoder, state.positions.unsqueeze(1)
        x = decoder.embed_scale * decoder.embed_tokens(tokens)
        if decoder.project_in_dim is not None:
            x = decoder.project_in_dim(x)
        if isinstance(decoder.embed_positions, CountedPositions):
            x = x + decoder.embed_positions.sinusoids(positions)
        elif decoder.embed_positions is not None:  # fairseq's table begins with rows up to that of padding
            x = x + nn.functional.embedding(positions + decoder.padding_idx + 1, decoder.embed_positions.weight)
        if decoder.layernorm_embedding is not None:
            x = decoder.layernorm_embedding(x)
        x, after = x.transpose(0, 1), []
        for layer, memory, own in zip(decoder.layers, state.memory, state.layers, strict=True):
            buffers: Settings = {}
            _give(layer.self_attn, buffers, own)
            source = x  # softmax attention does not read it, as it has its keys and values
            if isinstance(memory, KeyValueCache):
                _give(layer.encoder_attn, buffers, memory)
            else:
                source = _OneMemory(memory)
            x, _, _ = layer(x, source, None, buffers)
            after.append(_take(layer.self_attn, buffers))
        x = x if decoder.layer_norm is None else decoder.layer_norm(x)
        x = x.transpose(0, 1)
        if decoder.project_out_dim is not None:
            x = decoder.project_out_dim(x)
        log_probs = decoder.get_normalized_probs((decoder.output_layer(x), None), log_probs=True)
        return log_probs, (after, state.positions + 1)


class _OneMemory(SourceMemory):
    """The same state for every attention: in a graph that is being made, modules have other names."""

    def __init__(self, state: FastWeightState) -> None:
        super().__init__()
        self.state = state

    def __getitem__(self, attention: nn.Module) -> FastWeightState:
        return self.state


def _empty(attention: CausalAttention | MultiheadAttention, rows: int, dim: int) -> _OfAttention:
    """Return the state of self-attention before the first token."""
    if isinstance(attention, CausalAttention):
        return attention.attention(torch.zeros(rows, 0, dim))[1]
    return KeyValueCache(*torch.zeros(2, rows, attention.num_heads, 0, attention.head_dim))


def _give(attention: CausalAttention | MultiheadAttention, buffers: Settings, state: _OfAttention) -> None:
    """Put a state where fairseq's layer looks for it while it decodes."""
    if isinstance(state, KeyValueCache):
        attention._set_input_buffer(buffers, {"prev_key": state.keys, "prev_value": state.values})
    else:
        attention.set_incremental_state(buffers, "state", state)


def _take(attention: CausalAttention | MultiheadAttention, buffers: Settings) -> _OfAttention:
    if isinstance(attention, CausalAttention):
        return attention.get_incremental_state(buffers, "state")
    buffer = attention._get_input_buffer(buffers)
    return KeyValueCache(buffer["prev_key"], buffer["prev_value"])


def translation_to_onnx(model: FwpTransformerModel) -> Graphs:
    """Return the graphs of an `fwp_transformer` in evaluation mode, float32, on a CPU, with attention to the source.

    RuntimeError: a part of it has no form in ONNX.
    """
    tokens = torch.full((2, 3), model.decoder.padding_idx + 1)
    with torch.no_grad():
        source = _Source(model)
        short, memory = (source.read(part) for part in (tokens[:, :1], tokens))
        reader = _Translation(model, memory)
        state = reader.start
        for _ in range(3):
            _, (layers, positions) = reader.read(tokens[:, :1], state)
            state = _Translating(memory, tuple(layers), positions)
        before = reader.start._replace(memory=short)
        entries = _entries(before, state)
        of_memory = [entry for entry in entries if entry.name.startswith("memory")]
        of_state = entries[len(of_memory) :]
        encoder = _program(source, (tokens,), ({0: _BATCH, 1: _SOURCE},), ["tokens"], [x.name for x in of_memory])
        step = _export(reader, tokens[:, :1], state, of_state, memory=of_memory)
        return Graphs(step, of_state, source=encoder, memory=of_memory)


def _entries(start: object, after: object) -> list[Entry]:
    """Describe the tensors of the state before the first token; after: the state after some."""
    pairs = zip(pytree.tree_flatten_with_path(start)[0], pytree.tree_leaves(after), strict=True)
    return [
        Entry(
            pytree.keystr(path).strip("."),
            str(x.dtype).removeprefix("torch."),
            [1, *x.shape[1:]],
            next((n for n in range(1, x.dim()) if x.shape[n] != y.shape[n]), None),
        )
        for (path, x), y in pairs
        if x is not None
    ]


def _tensors(state: object) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(state) if x is not None]


_BATCH, _LENGTH, _SEEN, _SOURCE = map(torch.export.Dim, ("batch", "length", "seen", "source"))


def _export(
    reader: _Reader,
    tokens: Tensor,
    state: object,
    entries: list[Entry],
    many: bool = False,
    memory: Sequence[Entry] = (),
) -> ONNXProgram:
    """Return the graph of a reader; memory: what it is given and does not return, before the state."""
    sizes = [(entry, _SOURCE) for entry in memory] + [(entry, _SEEN) for entry in entries]
    of_state = tuple({0: _BATCH} | ({entry.grows: size} if entry.grows else {}) for entry, size in sizes)
    shapes = ({0: _BATCH} | ({1: _LENGTH} if many else {}), of_state)
    names = ["tokens", *(entry.name for entry, _ in sizes)]
    after = ["log_probs", *(f"next.{entry.name}" for entry in entries)]
    return _program(reader, (tokens, *_tensors(state)), shapes, names, after)


def _program(
    module: nn.Module, inputs: tuple[Tensor, ...], shapes: tuple[object, ...], names: list[str], outputs: list[str]
) -> ONNXProgram:
    program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    program = program.run_decompositions(_translations())
    graph = torch.onnx.export(
        program, dynamo=True, opset_version=OPSET, input_names=names, output_names=outputs, verbose=False
    )
    assert graph is not None  # without a file's name
    return graph


def _translations() -> dict[OperatorBase, Callable[..., object]]:
    """Return what stands for our operators in a graph: an operator of ONNX Runtime, or the definition for one token."""
    translations: dict[OperatorBase, Callable[..., object]] = {
        torch.ops.fwp.fast_weights.default: _linear_attention,
        torch.ops.fwp.causal_conv1d.default: convolution.definition,
        torch.ops.fwp.recurrent_delta.default: partial(_one_token_of, recurrent_delta.definition, 2),
        torch.ops.fwp.srwm.default: partial(_one_token_of, srwm.definition, 1),
        torch.ops.aten.argsort.stable: _argsort,
    }
    for rule in RULES:
        if not rule.has_kernel:
            translations[getattr(torch.ops.fwp, rule.name).default] = partial(_one_token, rule)
    return translations


def _argsort(x: Tensor, stable: bool, dim: int) -> Tensor:
    """Of equal numbers ONNX takes the first one first, as a stable sort."""
    return x.int().topk(x.shape[dim], dim, largest=False).indices


def _check_one(length: int) -> None:
    """Raise RuntimeError for several tokens, of a rule that has no operator for them in ONNX."""
    if length != 1:
        raise RuntimeError("ONNX must be given one token at a time with this rule, got several")


def _one_token_of(definition: Callable[..., Any], saved: int, x: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    _check_one(x.shape[1])
    return *definition(x, *inputs[:-1]), *[x.new_zeros(0)] * saved  # nothing for a backward pass


def _one_token(rule: Rule, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tokens, state, first = inputs
    _check_one(tokens[0].shape[2])
    out, after = rule.reference(*tokens, state=state, first=first)
    return out, after, tokens[0].new_zeros(0)


def _linear_attention(*inputs_of_rule: Any) -> tuple[Tensor, ...]:
    x, unused = Inputs(*inputs_of_rule), [inputs_of_rule[0].new_zeros(0)] * 3
    B, H, L, Dv = x.v.shape
    Dk = x.q.shape[3]
    q, k = (y if y.shape[1] == H else y.repeat_interleave(H // y.shape[1], 1) for y in (x.q, x.k))
    state = x.q.new_zeros((B, H, Dk, Dv)) if x.state is None else x.state
    if x.value_decay is not None or x.removal is not None:
        _check_one(L)
        return *reference_of(x)(*x.tokens, state=state, first=None), *unused

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
    return out.unflatten(2, (H, Dv)).transpose(1, 2), after, *unused
