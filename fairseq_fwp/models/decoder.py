"""The decoder that all language models share: its options, its state and its initialisation."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Optional, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import FairseqIncrementalDecoder
from omegaconf import II
from torch import Tensor, nn

from fairseq_fwp.models.attention_options import naming_flags
from fairseq_fwp.models.graphs import StepGraphs, TrunkGraphs
from fairseq_fwp.modules.adaptive_softmax import AdaptiveInput, AdaptiveSoftmax
from fairseq_fwp.modules.attention.base import (
    NO_MARKS,
    AnyAttention,
    Marks,
    StateTree,
    detach,
    register_states,
    reorder,
    reset,
)
from fairseq_fwp.modules.attention.convolution import TokenShift
from fairseq_fwp.modules.decoder_layer import DecoderLayer, LayerState
from fairseq_fwp.modules.decoding import Extra, Sample
from fairseq_fwp.modules.dropout import Dropout
from fairseq_fwp.modules.feature_maps import resample
from fairseq_fwp.modules.layer_norm import layer_norm
from fairseq_fwp.modules.onednn import faster_linear
from fairseq_fwp.modules.positions import LearnedPositions
from fairseq_fwp.ops.arguments import at_least_float32
from fairseq_fwp.ops.checks import check
from fairseq_fwp.ops.operator import is_transformed
from fairseq_fwp.patches.options import Settings, flag, option

logger = logging.getLogger(__name__)

# Arguments of the embeddings and the output layer, and the options that set them.
OUTPUT_FLAGS = {"cutoffs": "adaptive_softmax_cutoff", "div_val": "div_val", "embed_dim": "decoder_embed_dim"}

# The paper does not give initial values; these are from its public code.
WEIGHT_STD = 0.02
LAYER_NORM_STD = 0.02


@dataclass
class DecoderConfig(FairseqDataclass):
    """All language models. Defaults: the *small* size of Schlag et al. 2021."""

    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = option(  # type: ignore[valid-type]
        "relu", "activation function of the feed-forward blocks"
    )
    dropout: float = option(
        0.1, "dropout probability after the embeddings and after each block, from 0 to 1", same_function=True
    )
    attention_dropout: float = option(
        0.0, "dropout probability of softmax attention weights, from 0 to 1", same_function=True
    )
    activation_dropout: float = option(
        0.0, "dropout probability after the feed-forward activation, from 0 to 1", same_function=True
    )
    decoder_embed_dim: int = option(128, "embedding dimension, a multiple of the number of heads")
    decoder_ffn_embed_dim: int = option(2048, "dimension of the feed-forward blocks, at least 1")
    decoder_layers: int = option(16, "number of layers, at least 1")
    decoder_attention_heads: int = option(8, "number of heads, at least 1")
    decoder_normalize_before: bool = option(
        False, "layer normalisation before each block (pre-norm) instead of after it"
    )
    rms_norm: bool = option(
        False, "RMS normalisation instead of layer normalisation, in blocks and with --norm-read-out"
    )
    norm_epsilon: float = option(1e-5, "epsilon of these normalisations, above 0")
    swiglu: bool = option(
        False, "feed-forward blocks with a SiLU gate and without biases (Shazeer 2020), instead of --activation-fn"
    )
    channel_mix: bool = option(
        False,
        "feed-forward blocks of RWKV-7: squared ReLU, without biases, of each token mixed with the one before, instead "
        "of --activation-fn",
    )
    layernorm_embedding: bool = option(False, "normalise the embeddings and their positions, as RWKV-7 does")
    no_decoder_final_norm: bool = option(
        False, "with --decoder-normalize-before: no layer normalisation after the last block"
    )
    adaptive_softmax_cutoff: Optional[str] = option(  # noqa: UP045  (fairseq's parser reads no other form)
        None,
        "comma-separated ranks that split the vocabulary into clusters; ranks beyond it are dropped; '' or "
        "none: plain softmax",
    )
    div_val: int = option(
        1, "factor, at least 1, by which embeddings shrink from one cluster of --adaptive-softmax-cutoff to the next"
    )
    output_layer: ChoiceEnum(["biased", "tied", "untied"]) = option(  # type: ignore[valid-type]
        "biased",
        "output vectors; biased: the input's, with biases (Transformer-XL); tied: the input's (GPT-2); "
        "untied: separate ones (fairseq's transformer_lm)",
    )
    adaptive_softmax_dropout: float = option(
        0.0, "dropout probability in the adaptive softmax, from 0 to 1", same_function=True
    )
    no_scale_embedding: bool = option(False, "do not multiply embeddings by the square root of their dimension")
    add_bos_token: bool = II("task.add_bos_token")
    tokens_per_sample: int = II("task.tokens_per_sample")
    max_target_positions: Optional[int] = II("task.max_target_positions")  # noqa: UP045

    @property
    def attention_sizes(self) -> tuple[int, int]:
        """The embedding dimension, and the number of heads."""
        return self.decoder_embed_dim, self.decoder_attention_heads


class DecoderState(NamedTuple):
    """A `decoding.State`: one state per layer, and the number of tokens (B,) read, without padding."""

    layers: tuple[StateTree, ...]
    positions: Tensor

    def detach(self) -> "DecoderState":
        return DecoderState(detach(self.layers), self.positions)

    def reorder(self, rows: Tensor) -> "DecoderState":
        return DecoderState(reorder(self.layers, rows), reorder(self.positions, rows))

    def reset(self, rows: Tensor) -> "DecoderState":
        return DecoderState(reset(self.layers, rows), reset(self.positions, rows))


class Decoded(NamedTuple):
    """What incremental decoding keeps: the state after `read` tokens of the prefix.

    rows (B,): the rows of the state that the next token continues, as beam search has selected them; None = all.
    """

    state: DecoderState | None
    read: int = 0
    rows: Tensor | None = None


register_states(DecoderState, LayerState)


class LanguageModelDecoder(FairseqIncrementalDecoder):
    """Embeddings, layers and an adaptive softmax, with fairseq's interface: a `decoding.StreamingDecoder`.

    It continues from a state, and keeps it while decoding. No tensor here grows faster than linearly with the sequence.
    A subclass has `build_attention` and `build_positions`.

    half_loss: whether training scores only the second half of a segment;
    cuda_graphs: whether layers in training, and steps of decoding, run as CUDA graphs;
    reads_padding: whether tokens may be padding: a graph for another library can do without its masks;
    needs_state: flags without effect if no state is carried over segments, and what happens then.
    """

    packs_documents = False
    half_loss = False
    cuda_graphs = False
    reads_padding = True
    carries_state: bool

    def __init__(self, cfg: DecoderConfig, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        for name in ("decoder_embed_dim", "decoder_ffn_embed_dim", "decoder_layers"):
            check(getattr(cfg, name) >= 1, f"{flag(name)} must be at least 1, got {getattr(cfg, name)}")
        for name in ("dropout", "attention_dropout", "activation_dropout", "adaptive_softmax_dropout"):
            check_probability(name, getattr(cfg, name))
        self.needs_state: dict[str, str] = {}
        self.padding_idx = dictionary.pad()
        self.max_target_positions = cfg.max_target_positions or cfg.tokens_per_sample
        check(not (cfg.swiglu and cfg.channel_mix), "--swiglu must be off with --channel-mix, got on")
        with naming_flags({"norm_epsilon": "norm_epsilon"}):
            norm = layer_norm(cfg.decoder_embed_dim, cfg.rms_norm, cfg.norm_epsilon)
        cutoffs = read_cutoffs(cfg, len(dictionary))
        words, dim, pad = len(dictionary), cfg.decoder_embed_dim, dictionary.pad()
        with naming_flags(OUTPUT_FLAGS):
            self.embed_tokens: nn.Embedding | AdaptiveInput = (
                nn.Embedding(words, dim, pad)
                if cfg.div_val == 1
                else AdaptiveInput(words, dim, cutoffs, cfg.div_val, pad)
            )
        self.embed_scale = 1.0 if cfg.no_scale_embedding else math.sqrt(cfg.decoder_embed_dim)
        self.embed_positions = self.build_positions(cfg)
        normalized = cfg.layernorm_embedding
        self.layernorm_embedding = layer_norm(dim, cfg.rms_norm, cfg.norm_epsilon) if normalized else None
        self.sample_length = cfg.tokens_per_sample
        self.dropout = Dropout(cfg.dropout, self)
        self.layers = nn.ModuleList(
            DecoderLayer(
                self.build_attention(cfg, index),
                cfg.decoder_embed_dim,
                cfg.decoder_ffn_embed_dim,
                utils.get_activation_fn(str(cfg.activation_fn)),
                dropout=cfg.dropout,
                activation_dropout=cfg.activation_dropout,
                normalize_before=cfg.decoder_normalize_before,
                rms_norm=cfg.rms_norm,
                norm_epsilon=cfg.norm_epsilon,
                swiglu=cfg.swiglu,
                token_shift=TokenShift(dim, [(1 - index / cfg.decoder_layers) ** 4]) if cfg.channel_mix else None,
            )
            for index in range(cfg.decoder_layers)
        )
        self.last_inputs = cfg.decoder_layers * dim if cfg.channel_mix else 0  # numbers that their blocks keep
        # A state that does not grow with the text can be carried forever.
        self.carries_state = all(attention.constant_state for attention in self.attentions)
        self.ages = any(attention.ages for attention in self.attentions)
        self.has_positions = self.embed_positions is not None
        final_norm = cfg.decoder_normalize_before and not cfg.no_decoder_final_norm
        self.layer_norm = norm if final_norm else None
        # Without cutoffs too, so that the criterion adaptive_loss always works.
        self.adaptive_softmax = build_adaptive_softmax(cfg, self.embed_tokens, cutoffs)
        self.apply(initialize)
        self.final_dropout: nn.Module = nn.Identity()
        self.trunk_graphs, self.step_graphs = TrunkGraphs(), StepGraphs()
        self.layer_positions: nn.ModuleList | None = None  # added to the inputs of each layer (Al-Rfou et al. 2019)

    @property
    def attentions(self) -> list[AnyAttention]:
        """The attention of each layer."""
        return [cast(DecoderLayer, layer).self_attn for layer in self.layers]

    def build_attention(self, cfg: FairseqDataclass, index: int) -> AnyAttention:
        """Return the attention of a layer."""
        raise NotImplementedError

    def build_positions(self, cfg: FairseqDataclass) -> nn.Module | None:
        """Return the absolute positions that are added to the embeddings, or None."""
        raise NotImplementedError

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: None = None,
        incremental_state: Settings | None = None,
        features_only: bool = False,
        state: DecoderState | None = None,
        src_lengths: Tensor | None = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, Extra]:
        """Return features (B, L, D) of prev_output_tokens (B, L) for the adaptive softmax, and the new "state".

        state, first: see `StreamingDecoder`. With an incremental_state, which keeps the state from the first call on,
        prev_output_tokens is the whole prefix, as fairseq passes it, and `first` has no effect. Only new tokens are
        read; the first value is their log-probabilities (B, L, V). (fairseq looks for "attn" in the second value.)
        """
        if self.training:
            resample(self)
        scored = incremental_state is not None and not features_only
        if incremental_state is None:
            x, state = self.extract_features(prev_output_tokens, state, first=first)
        else:
            decoded = self.get_incremental_state(incremental_state, "state") or Decoded(state)
            x, state = self._continue(decoded, prev_output_tokens, scored)
            self.set_incremental_state(incremental_state, "state", Decoded(state, prev_output_tokens.shape[1]))
        if not (scored or features_only):
            x = self.output_layer(x)
        return x, {"attn": [None], "state": state, "scored": scored}

    def extract_features(
        self, tokens: Tensor, state: DecoderState | None = None, last: int | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, DecoderState]:
        """Read a segment, as `StreamingDecoder` says; with `last`, the last layer skips work for other tokens."""
        return self._read(tokens, state, last, first)

    def step(self, tokens: Tensor, state: DecoderState | None, start: int) -> tuple[Tensor, DecoderState]:
        """Return the same in incremental decoding, for tokens (B, L) that follow `start` tokens of the prefix.

        Subclasses that read by segments use `start`.
        """
        return self._read(tokens, state, decoding=True)

    def _continue(self, decoded: Decoded, tokens: Tensor, scored: bool) -> tuple[Tensor, DecoderState]:
        """Read what follows in the prefix; return features, or log-probabilities if they are scored, and the state."""
        state, read, rows = decoded
        tokens = tokens[:, read:]
        if scored and (graphed := self.score_by_graph(tokens, state, rows)):
            return graphed
        state = state if rows is None else cast(DecoderState, state).reorder(rows)
        return (self._score if scored else self.step)(tokens, state, read)

    @property
    def steps_are_alike(self) -> bool:
        """Whether a step of decoding calls the same kernels for every token, whatever was read before it."""
        waits = isinstance(self.embed_tokens, AdaptiveInput) or isinstance(self.embed_positions, LearnedPositions)
        return not waits and self.state_size(1) == self.state_size(2)

    def score_by_graph(
        self, tokens: Tensor, state: DecoderState | None, rows: Tensor | None = None
    ) -> tuple[Tensor, DecoderState] | None:
        """Return log-probabilities (B, 1, V) after one more token (B, 1), and the new state, by a CUDA graph.

        rows (B,): those of the state that the tokens continue, as a beam has selected them; None = all in their order.
        None: this step must do without a graph, as every first of its shape must.
        """
        read_one = state is not None and tokens.shape[1] == 1 and not (self.training or torch.is_grad_enabled())
        if not (self.cuda_graphs and read_one and tokens.is_cuda and self.steps_are_alike):
            return None
        return self.step_graphs(self._score, tokens, state, rows)

    def _score(self, tokens: Tensor, state: DecoderState | None, start: int = 0) -> tuple[Tensor, DecoderState]:
        """Return log-probabilities (B, L, V) after tokens (B, L), and the new state: see `step`."""
        x, state = self.step(tokens, state, start)
        # fairseq's generator divides these by --temperature: dividing features would miss the biases.
        return self.adaptive_softmax.get_log_prob(x, None), state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LanguageModelDecoder":
        """Forget the graphs of parameters that move."""
        self.trunk_graphs, self.step_graphs = TrunkGraphs(), StepGraphs()
        super()._apply(fn, recurse)
        return self

    def _read(
        self,
        tokens: Tensor,
        state: DecoderState | None,
        last: int | None = None,
        first: Tensor | None = None,
        decoding: bool = False,
    ) -> tuple[Tensor, DecoderState]:
        """Read tokens through all layers."""
        padding = tokens.eq(self.padding_idx)
        seen = tokens.new_zeros(tokens.shape[0]) if state is None else state.positions
        counts = seen.unsqueeze(1) + (~padding).long().cumsum(1)
        if first is not None:
            counts = counts - torch.where(first, counts - 1, 0).cummax(1).values
        positions = (counts - 1).clamp(min=0)
        states = None if state is None else state.layers
        # Here and not in each layer, and for many tokens: each call of torch costs more in this context.
        with faster_linear(tokens.numel(), tokens.device):
            x = self.embed_scale * self.embed_tokens(tokens)
            if self.embed_positions is not None:
                x = x + self.embed_positions(positions, decoding).to(x.dtype)
            if self.layernorm_embedding is not None:
                x = self.layernorm_embedding(x)
            x = self.dropout(x)
            # A compiled graph, a transform of torch.func and a CUDA graph take one path for all inputs.
            captured = tokens.is_cuda and torch.cuda.is_current_stream_capturing()
            one_path = torch.compiler.is_compiling() or is_transformed() or captured
            mask = padding if self.reads_padding and (one_path or padding.any()) else None
            graphed = None
            if self.cuda_graphs and self.training and not one_path and mask is None and last is None and first is None:
                graphed = self.trunk_graphs(self.layers, self._run_layers, x, states)
            x, states = graphed or self._run_layers(x, states, Marks(mask, first), last, positions)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return self.final_dropout(x), DecoderState(states, counts[:, -1] if counts.shape[1] else seen)

    def _run_layers(
        self,
        x: Tensor,
        states: tuple[StateTree, ...] | None,
        marks: Marks = NO_MARKS,
        last: int | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, tuple[StateTree, ...]]:
        """Return the output of the last layer, and the new state of each; see `_read`."""
        after, marks = [], marks._replace(shared={})
        for index, layer in enumerate(cast("list[DecoderLayer]", self.layers)):
            if self.layer_positions is not None:
                x = x + self.layer_positions[index](positions).to(x.dtype)
            outputs = last if index == len(self.layers) - 1 else None
            x, state = layer(x, states[index] if states else None, marks, outputs)
            after.append(state)
        return x, tuple(after)

    def parts_of_segments(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        """Return the bounds of `length` tokens after `start` others, cut where segments begin, as in training."""
        next_segment = start - start % self.sample_length + self.sample_length
        return pairwise([start, *range(next_segment, start + length, self.sample_length), start + length])

    def get_normalized_probs(
        self, net_output: tuple[Tensor, Settings | None], log_probs: bool, sample: Sample | None = None
    ) -> Tensor:
        """Return (log-)probabilities (B, L, V) of `forward`'s output; with a sample, exact only for its targets."""
        scores, extra = net_output
        if not (extra or {}).get("scored"):
            return super().get_normalized_probs(net_output, log_probs, sample)
        scores = F.log_softmax(scores, dim=-1)
        return scores if log_probs else scores.exp()

    def output_layer(self, features: Tensor) -> Tensor:
        # The criterion applies the softmax. fairseq's adaptive_loss sums losses in their dtype: fp16 would overflow.
        return at_least_float32(features)

    def max_positions(self) -> int:
        """Longest sequence in training and scoring: --tokens-per-sample of the training run."""
        return self.max_target_positions

    def reorder_incremental_state(self, incremental_state: Settings, new_order: Tensor) -> None:
        """Keep the rows new_order of the decoding state, as beam search selects them: with the next token."""
        decoded: Decoded | None = self.get_incremental_state(incremental_state, "state")
        if decoded is not None:
            rows = new_order if decoded.rows is None else decoded.rows.index_select(0, new_order)
            self.set_incremental_state(incremental_state, "state", decoded._replace(rows=rows))

    def state_size(self, length: int, carried: bool = False) -> int:
        """Return the numbers in the state, see `Attention`; counted as in Schlag et al. 2021, Table 4."""
        return self.last_inputs + sum(attention.state_size(length, carried) for attention in self.attentions)


def check_probability(name: str, value: float) -> None:
    """Raise ValueError that names the option unless its value is a probability."""
    check(0 <= value <= 1, f"{flag(name)} must be in [0, 1], got {value}")


def read_cutoffs(cfg: DecoderConfig, vocab_size: int) -> list[int]:
    """The given cutoffs, without those beyond the vocabulary."""
    text = cfg.adaptive_softmax_cutoff or ""
    try:
        cutoffs = [int(cutoff) for cutoff in text.split(",") if cutoff.strip()]
    except ValueError:
        raise ValueError(f"--adaptive-softmax-cutoff must be whole numbers such as 20000,40000, got {text!r}") from None
    dropped = [cutoff for cutoff in cutoffs if cutoff >= vocab_size]
    if dropped:
        names = ",".join(map(str, dropped))
        logger.info(f"adaptive softmax: dropped cutoffs {names}, beyond the vocabulary of {vocab_size} words")
    return [cutoff for cutoff in cutoffs if cutoff < vocab_size]


def build_adaptive_softmax(
    cfg: DecoderConfig, embed_tokens: nn.Embedding | AdaptiveInput, cutoffs: list[int]
) -> AdaptiveSoftmax:
    """The output layer over the embeddings. Raises ValueError for untied output vectors with clusters."""
    kind = str(cfg.output_layer)
    check(
        kind != "untied" or not (cutoffs or isinstance(embed_tokens, AdaptiveInput)),
        "--output-layer untied must be left out with --adaptive-softmax-cutoff or --div-val, because it has a plain "
        "softmax: choose biased or tied",
    )
    dropout = 0.0 if kind == "untied" else cfg.adaptive_softmax_dropout
    with naming_flags(OUTPUT_FLAGS):
        return AdaptiveSoftmax(embed_tokens, cutoffs, biased=kind == "biased", tied=kind != "untied", dropout=dropout)


@runtime_checkable
class Initialized(Protocol):
    """A module that draws its own initial values, as some attentions and feature maps do."""

    def initialize(self) -> None: ...


def initialize(module: nn.Module) -> None:
    """Draw N(0, 0.02) weights, zero biases and N(1, 0.02) gains of layer normalisation, or call `initialize()`."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=WEIGHT_STD)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight, mean=1.0, std=LAYER_NORM_STD)
        nn.init.zeros_(module.bias)
    if isinstance(module, Initialized):  # after its parts: `apply` visits them first
        module.initialize()
