"""The language model `fwp_xl_lm`: Transformer-XL, with the ablations of its paper (Dai et al. 2019, arXiv 1901.02860).

A call of the decoder reads one segment. Its "state" holds the `mem_len` newest inputs of every layer. Pass it, after
`detach()`, to the next segment, as in the paper.
"""

from dataclasses import dataclass
from typing import cast

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor, nn

from fairseq_fwp.models.attention_options import naming_flags
from fairseq_fwp.models.attentions import SIZES
from fairseq_fwp.models.decoder import DecoderConfig, DecoderState, LanguageModelDecoder, initialize
from fairseq_fwp.models.language_model import LanguageModel
from fairseq_fwp.modules.attention.base import AnyAttention, check_heads
from fairseq_fwp.modules.attention.relative import (
    LearnedDistances,
    RelativeAttention,
    SegmentMemory,
    SinusoidalDistances,
)
from fairseq_fwp.modules.attention.softmax import SoftmaxAttention
from fairseq_fwp.modules.decoding import Sample
from fairseq_fwp.modules.positions import LearnedPositions, SinusoidalPositions
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import option

POSITIONS = ["relative", "shaw", "shaw_biased", "absolute", "layerwise"]
# Positions that are added to the inputs of layers, and so cannot distinguish a segment from the one before.
ABSOLUTE = ("absolute", "layerwise")


@dataclass
class FwpXlLanguageModelConfig(DecoderConfig):
    """Transformer-XL. Defaults: the *small* size of Schlag et al. 2021."""

    mem_len: int = option(
        256, "number of past tokens that a segment sees in addition to its own, at least 0; 0: no recurrence"
    )
    clamp_len: int = option(-1, "distance in tokens; larger distances count as this one; -1: no limit")
    same_length: bool = option(False, "every token sees exactly --mem-len tokens, itself included")
    untie_biases: bool = option(False, "biases u and v (r_w_bias, r_r_bias) for each layer instead of shared ones")
    decoder_positions: ChoiceEnum(POSITIONS) = option(  # type: ignore[valid-type]
        "relative",
        "relative: of Dai 2019; shaw, shaw_biased: of Shaw 2018, without or with the public code's biases; "
        "absolute: sinusoids; layerwise: learned in each layer (Al-Rfou 2019)",
    )
    half_loss: bool = option(
        False,
        "train only on the second half of each segment; needs --criterion adaptive_loss",
        same_function=True,
    )


@register_model("fwp_xl_lm", dataclass=FwpXlLanguageModelConfig)
class FwpXlLanguageModel(LanguageModel):
    """Transformer-XL; it works with fairseq's own tasks, which read each sample without a memory, and with ours."""

    config = FwpXlLanguageModelConfig

    @classmethod
    def build_decoder(cls, cfg: FwpXlLanguageModelConfig, dictionary: Dictionary) -> "FwpXlDecoder":
        return FwpXlDecoder(cfg, dictionary)

    @classmethod
    def unused_flags(cls, cfg: FwpXlLanguageModelConfig) -> list[str]:
        unused = [] if cfg.decoder_positions == "relative" or not cfg.untie_biases else ["untie_biases"]
        return unused + (["clamp_len"] if cfg.decoder_positions in ABSOLUTE and cfg.clamp_len > 0 else [])

    def get_normalized_probs(self, *args: object, **kwargs: object) -> Tensor:
        """Return the decoder's. Raises ValueError in training with --half-loss: criterions would count all targets."""
        needed = "--criterion must be adaptive_loss with --half-loss"
        counts_all = self.training and self.decoder.half_loss
        check(not counts_all, f"{needed}: it divides by the number of scored targets")
        return super().get_normalized_probs(*args, **kwargs)

    def get_targets(self, sample: Sample, net_output: object) -> Tensor:
        """Return targets (B, L); with --half-loss in training, padding in the first half (Dai et al. 2019, Table 6)."""
        target = sample["target"]
        if not (self.training and self.decoder.half_loss):
            return target
        second_half = target.clone()
        second_half[:, : target.shape[1] // 2] = self.decoder.padding_idx
        return second_half


class FwpXlDecoder(LanguageModelDecoder):
    """`LanguageModelDecoder` over segments: attention to the segment's past and to a memory of earlier segments.

    Incremental decoding gives the same as a stream of segments of --tokens-per-sample tokens. Tokens see the tokens of
    their segment and the memory. After the last token of a segment only its newest `mem_len` inputs are kept.
    """

    def __init__(self, cfg: FwpXlLanguageModelConfig, dictionary: Dictionary) -> None:
        positions = cfg.decoder_positions
        check(cfg.mem_len >= 0, f"--mem-len must be at least 0, got {cfg.mem_len}")
        check(cfg.mem_len or not cfg.same_length, f"--mem-len must be at least 1 with --same-length, got {cfg.mem_len}")
        check(
            not cfg.mem_len or positions not in ABSOLUTE,
            f"--mem-len must be 0 with --decoder-positions {positions}, got {cfg.mem_len}: such positions do not "
            "distinguish a segment from the one before it (Dai et al. 2019, Sec. 3.3)",
        )
        check(
            cfg.clamp_len >= 1 or positions not in ("shaw", "shaw_biased"),
            f"--clamp-len must be at least 1 with --decoder-positions {positions}, got {cfg.clamp_len}: each distance "
            "up to it has a vector",
        )
        check(
            not cfg.channel_mix, "--channel-mix must be off with Transformer-XL, got on: its memory has no last token"
        )
        super().__init__(cfg, dictionary)
        self.mem_len = cfg.mem_len
        self.carries_state = cfg.mem_len > 0
        if cfg.mem_len:
            self.needs_state[f"--mem-len {cfg.mem_len}"] = "each segment starts without a memory"
        self.half_loss = cfg.half_loss
        self.final_dropout = self.dropout  # as the paper's public code has it
        if positions == "layerwise":
            tables = (LearnedPositions(cfg.tokens_per_sample, cfg.decoder_embed_dim) for _ in self.layers)
            self.layer_positions = nn.ModuleList(tables).apply(initialize)
        if positions == "relative" and not cfg.untie_biases:
            one, *others = (module for module in self.modules() if isinstance(module, SinusoidalDistances))
            for other in others:
                other.content_bias, other.position_bias = one.content_bias, one.position_bias

    def build_positions(self, cfg: FwpXlLanguageModelConfig) -> SinusoidalPositions | None:
        if cfg.decoder_positions != "absolute":
            return None
        return SinusoidalPositions(cfg.decoder_embed_dim, offset=self.padding_idx + 1)

    def build_attention(self, cfg: FwpXlLanguageModelConfig, index: int) -> AnyAttention:
        sizes = dim, heads = cfg.attention_sizes
        with naming_flags(SIZES):
            check_heads(*sizes)
        if cfg.decoder_positions in ABSOLUTE:
            return SoftmaxAttention(*sizes, cfg.attention_dropout)
        positions: SinusoidalDistances | LearnedDistances
        if cfg.decoder_positions == "relative":
            positions = SinusoidalDistances(*sizes, cfg.clamp_len if cfg.clamp_len > 0 else None, cfg.dropout)
        else:
            positions = LearnedDistances(
                heads, dim // heads, cfg.clamp_len, biased=cfg.decoder_positions == "shaw_biased"
            )
        window = cfg.mem_len if cfg.same_length else None
        return RelativeAttention(*sizes, positions, window, cfg.attention_dropout)

    def extract_features(
        self, tokens: Tensor, state: DecoderState | None = None, last: int | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, DecoderState]:
        x, state = self._read(tokens, state, last, first)
        return x, self._remember(state)

    def step(self, tokens: Tensor, state: DecoderState | None, start: int) -> tuple[Tensor, DecoderState]:
        pieces = []
        if start == 0:
            state = self._cache(state, tokens)
        for begin, end in self.parts_of_segments(start, tokens.shape[1]):
            if state is not None and begin and begin % self.sample_length == 0:
                state = self._remember(state)
            x, state = self._read(tokens[:, begin - start : end - start], state)
            pieces.append(x)
        assert state is not None  # there is one part at least
        return torch.cat(pieces, dim=1), state

    def state_size(self, length: int, carried: bool = False) -> int:
        memory = self.mem_len if carried else 0  # keys and values, as in Schlag et al. 2021, App. F
        return 2 * (memory + length) * self.embed_tokens.embedding_dim * len(self.layers)

    def _remember(self, state: DecoderState) -> DecoderState:
        """Return the part of the state that a new segment sees. Without a memory, absolute positions start again."""
        positions = state.positions if self.mem_len else torch.zeros_like(state.positions)
        return DecoderState(tuple(layer.last(self.mem_len) for layer in state.layers), positions)

    def _cache(self, state: DecoderState | None, tokens: Tensor) -> DecoderState | None:
        """Return the state for decoding: with keys and values, which are then not projected again at every step."""
        if isinstance(self.attentions[0], SoftmaxAttention):  # its state is keys and values already
            return state
        if state is None:
            empty = SegmentMemory(self.embed_tokens(tokens[:, :0]))
            state = DecoderState((empty,) * len(self.layers), tokens.new_zeros(len(tokens)))
        attentions = (cast(RelativeAttention, attention) for attention in self.attentions)
        caches = (attention.cache(memory) for attention, memory in zip(attentions, state.layers, strict=True))
        return DecoderState(tuple(caches), state.positions)
