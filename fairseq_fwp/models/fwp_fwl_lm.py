"""The language model `fwp_fwl_lm`: another language model with a fast weight layer on top (Clark et al. 2022).

arXiv 2212.02475; the layer and its equations are in modules/fast_weight_layer. The layer learns from a token when the
token after it is read. So scoring, training and decoding are those of the models below. A "state" is the state of the
model below together with the updates that the layer has learned.
"""

import logging
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple, Optional

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, register_model
from torch import Tensor, nn

from fairseq_fwp.models.attention_options import by_argument, construct
from fairseq_fwp.models.decoder import DecoderConfig, DecoderState, LanguageModelDecoder, StatefulDecoder, initialize
from fairseq_fwp.models.fwp_lm import FwpLanguageModel, FwpLanguageModelConfig
from fairseq_fwp.models.fwp_xl_lm import FwpXlDecoder, FwpXlLanguageModel, FwpXlLanguageModelConfig
from fairseq_fwp.models.language_model import forgets_segments
from fairseq_fwp.modules.fast_weight_layer import FAST_WEIGHTS, GRADIENTS_AT, FastWeightLayer, FastWeightLayerState
from fairseq_fwp.modules.shifted_softmax import build_shifted_softmax
from fairseq_fwp.options import option

logger = logging.getLogger(__name__)


@dataclass
class FwpFwlLanguageModelConfig(FwpLanguageModelConfig, FwpXlLanguageModelConfig):
    """The fast weight layer. The model below it, `fwp_lm` or `fwp_xl_lm`, keeps its own flags."""

    fwl_base: ChoiceEnum(["fwp_lm", "fwp_xl_lm"]) = option(  # type: ignore[valid-type]
        "fwp_lm", "model below the fast weight layer, which its own flags describe"
    )
    fwl_hidden_dim: Optional[int] = option(  # noqa: UP045  (fairseq's parser reads no other form)
        None,
        "hidden units of the fast weight layer, at least 2 * embedding dimension unless it starts at random; "
        "none: 4 * embedding dimension",
    )
    fwl_map_inputs: bool = option(
        False,
        "add a linear map before the layer, with which fwp-add-layer whitens its inputs; not in the paper",
    )
    fwl_random_start: bool = option(
        False,
        "start from random weights, 0.05 N(0, 1), as the paper's public code does, instead of the identity",
        same_function=True,
    )
    fwl_fast_weights: ChoiceEnum(list(FAST_WEIGHTS)) = option(  # type: ignore[valid-type]
        "both",
        "weights that change while reading: of both layers, of the first or second, the bias of the output "
        "softmax, or none",
    )
    fwl_step_size: Optional[float] = option(  # noqa: UP045
        None,
        "fixed step size of all fast weights, at least 0; none: learned for each weight, from 0.01",
    )
    fwl_decay: Optional[float] = option(  # noqa: UP045
        None,
        "fixed factor, from 0 to 1, that keeps the updates of earlier segments; none: learned for each "
        "weight, from 0.9",
    )
    fwl_gradients_at: ChoiceEnum(list(GRADIENTS_AT)) = option(  # type: ignore[valid-type]
        "trained",
        "weights at which gradients are taken; trained: as in the paper; carried: those at the start of the "
        "segment, as in dynamic evaluation",
    )
    fwl_divide_gradients_by: float = option(
        1.0,
        "divisor of gradients, above 0; 1: gradients of single tokens, as in the paper; its public code has "
        "the tokens of a batch",
    )


class FwlState(NamedTuple):
    """The state of the model below, and of the fast weight layer."""

    base: DecoderState
    layer: FastWeightLayerState

    def detach(self) -> "FwlState":
        """The same values, detached from the graph."""
        return FwlState(self.base.detach(), self.layer.detach())

    def reorder(self, new_order: Tensor) -> "FwlState":
        """The rows new_order (B',) of the batch, as beam search selects them."""
        return FwlState(self.base.reorder(new_order), self.layer.reorder(new_order))

    def reset(self, rows: Tensor) -> "FwlState":
        """The state, empty (as before the first token) in the rows of the batch that are True. rows: (B,) bool."""
        return FwlState(self.base.reset(rows), self.layer.reset(rows))


# A checkpoint in mid-epoch holds the state of its streams.
torch.serialization.add_safe_globals([FwlState])


class FwlDecoder(StatefulDecoder):
    """A fast weight layer on the features of another decoder; the state holds both of their states.

    base: any `LanguageModelDecoder`; layer: of the same dimension;
    last_norm: the name of the base's last normalisation, whose weights a layer that begins as the identity takes over.

    In a checkpoint, weights of the base have the base's own names. Incremental decoding gives the same as a stream of
    segments of --tokens-per-sample tokens.
    """

    def __init__(self, base: LanguageModelDecoder, layer: FastWeightLayer, last_norm: str | None) -> None:
        super().__init__(base.dictionary)
        del self.adaptive_softmax  # fairseq sets None; see __getattr__
        self.base = base
        self.fast_weight_layer = layer
        self.last_norm = last_norm
        self.half_loss = getattr(base, "half_loss", False)
        self.register_state_dict_post_hook(leave_out_base)
        self.register_load_state_dict_pre_hook(put_in_base)

    def __getattr__(self, name: str) -> Any:
        """Take everything else, such as the output layer and positions, from the base."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def extract_features(
        self, tokens: Tensor, state: FwlState | None = None, last: int | None = None
    ) -> tuple[Tensor, FwlState]:
        """Return features (B, L, D) of tokens (B, L), one segment read after those of `state`, and the new state.

        last: only the features (B, last, D) of the last tokens.
        """
        x, base = self.base.extract_features(tokens, None if state is None else state.base)
        y, layer = self._adapt(x, tokens, None if state is None else state.layer)
        return y if last is None else y[:, y.shape[1] - last :], FwlState(base, layer)

    def extract_unread_features(self, tokens: Tensor, state: FwlState | None, read: int) -> tuple[Tensor, FwlState]:
        """Do the same in incremental decoding, for the tokens (B, L) after the first `read`, over several segments."""
        x, base = self.base.extract_unread_features(tokens, None if state is None else state.base, read)
        layer = None if state is None else state.layer
        length, pieces = self.sample_length, []
        ends = range(read - read % length + length, tokens.shape[1], length)
        for start, stop in pairwise([read, *ends, tokens.shape[1]]):
            part = x[:, start - read : stop - read]
            y, layer = self._adapt(part, tokens[:, start:stop], layer, same_segment=start % length > 0)
            pieces.append(y)
        assert layer is not None
        return torch.cat(pieces, 1), FwlState(base, layer)

    def _adapt(
        self, x: Tensor, tokens: Tensor, state: FastWeightLayerState | None, same_segment: bool = False
    ) -> tuple[Tensor, FastWeightLayerState]:
        padding = tokens.eq(self.padding_idx)
        mask = padding if padding.any() else None
        return self.fast_weight_layer(x, tokens, self.adaptive_softmax, state, mask, same_segment)

    def state_size(self, length: int, carried: bool = False) -> int:
        """The numbers kept of a sequence of `length` tokens, or of such segments if the state is carried."""
        return self.base.state_size(length, carried) + self.fast_weight_layer.state_size(length, carried)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> dict[str, Any]:
        """Convert a checkpoint to this model if they differ only in the layer or in its step sizes and decays.

        A model without a layer gets a new one. Unless it starts at random, the layer takes over the gain and shift of
        the last normalisation, so that it changes nothing at first. Missing step sizes and decays start from this
        layer's initial values. They are dropped if they are fixed here or there are no fast weights.
        """
        super().upgrade_state_dict_named(state_dict, name)
        prefix = f"{name}.fast_weight_layer."
        learned = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
        new = self.fast_weight_layer.state_dict()
        if not learned:
            logger.info("the checkpoint has no fast weight layer: a new layer is added")
            for key, neutral in (("weight", torch.ones_like), ("bias", torch.zeros_like)):
                taken = f"{name}.{self.last_norm}.{key}"
                if taken in state_dict:
                    new[f"norm.{key}"] = state_dict[taken]
                    state_dict[taken] = neutral(state_dict[taken])
        else:
            steps = {"log_step_sizes", "decay_logits"}
            for key in sorted(steps & learned - new.keys()):
                logger.info("the checkpoint's %s is dropped: this layer does not learn it", key)
                del state_dict[f"{prefix}{key}"]
            new = {key: value for key, value in new.items() if key in steps - learned}
            if new:
                logger.info("the checkpoint's layer has no %s: they start from initial values", " and ".join(new))
        state_dict.update({f"{prefix}{key}": value for key, value in new.items()})
        return state_dict


BASE = "base."


def leave_out_base(decoder: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give the base's weights their names without the layer, in the same order."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[prefix + key.removeprefix(prefix).removeprefix(BASE)] = state_dict.pop(key)


def put_in_base(decoder: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give weights outside the layer their names in the base."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        if not name.startswith((BASE, "fast_weight_layer.")):
            state_dict[prefix + BASE + name] = state_dict.pop(key)


# The models that can be below the layer, by their names in --fwl-base.
BASES: dict[str, Any] = {"fwp_lm": FwpLanguageModel, "fwp_xl_lm": FwpXlLanguageModel}


def build_base(cfg: "FwpFwlLanguageModelConfig", dictionary: Any) -> LanguageModelDecoder:
    """Return the decoder below the layer; its softmax has a bias that can change if that bias is a fast weight."""
    base: LanguageModelDecoder = BASES[str(cfg.fwl_base)].build_decoder(cfg, dictionary)
    if isinstance(base, FwpXlDecoder):
        # No dropout: these features are keys of what is learned while reading, and training would distrust noise.
        base.final_dropout = nn.Identity()
    if cfg.fwl_fast_weights == "softmax-bias":
        base.adaptive_softmax = build_shifted_softmax(base.embed_tokens, base.adaptive_softmax.bounds[1:-1])
        base.adaptive_softmax.apply(initialize)
    return base


def build_layer(cfg: "FwpFwlLanguageModelConfig", bias_entries: int) -> FastWeightLayer:
    """Return the layer of the configuration. Raises ValueError that names the flag for an invalid one."""
    options, dim = by_argument(FwpFwlLanguageModelConfig, "fwl_"), cfg.decoder_embed_dim
    given = {"hidden_dim": 4 * dim} if cfg.fwl_hidden_dim is None else {}
    layer: FastWeightLayer = construct(FastWeightLayer, cfg, options, dim, bias_entries=bias_entries, **given)
    return layer.apply(initialize)


def last_norm(cfg: "FwpFwlLanguageModelConfig") -> str | None:
    """Return the name of the last normalisation, whose weights an identity layer takes over; None if there is none."""
    if cfg.fwl_random_start or (cfg.decoder_normalize_before and cfg.no_decoder_final_norm):
        return None
    return "layer_norm" if cfg.decoder_normalize_before else f"layers.{cfg.decoder_layers - 1}.final_layer_norm"


@register_model("fwp_fwl_lm", dataclass=FwpFwlLanguageModelConfig)
class FwpFwlLanguageModel(FwpLanguageModel, FwpXlLanguageModel):
    """A language model that learns while it reads; it works wherever the models below the layer work."""

    config = FwpFwlLanguageModelConfig

    @classmethod
    def build_model(cls, cfg: FwpFwlLanguageModelConfig, task: Any) -> "FwpFwlLanguageModel":
        """Build the model; warn if no weights are carried. Raises ValueError for an invalid configuration."""
        model: FwpFwlLanguageModel = super().build_model(cfg, task)
        if model.decoder.fast_weight_layer.gradients_at == "carried" and forgets_segments(task):
            logger.warning(
                "--fwl-gradients-at carried has no effect without --task fwp_language_modeling --carry-state: "
                "gradients are taken at the trained weights"
            )
        return model

    @classmethod
    def adopt(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a model that can be below the layer, with the layer added."""
        base = ARCH_MODEL_NAME_REGISTRY.get(saved.get("_name"))
        return {**saved, "fwl_base": base} if base in BASES else saved

    @classmethod
    def build_decoder(cls, cfg: FwpFwlLanguageModelConfig, dictionary: Any) -> FwlDecoder:
        """The decoder of the configuration."""
        base = build_base(cfg, dictionary)
        layer = build_layer(cfg, getattr(base.adaptive_softmax, "shift_entries", 0))
        return FwlDecoder(base, layer, last_norm(cfg))

    @classmethod
    def unused_flags(cls, cfg: FwpFwlLanguageModelConfig) -> list[str]:
        """The options that are not at their defaults and that neither the layer nor the model below uses."""
        base = BASES[str(cfg.fwl_base)]
        shared = {option.name for option in fields(DecoderConfig)}
        others = [
            (option.name, option.default)
            for name, model in BASES.items()
            if name != cfg.fwl_base
            for option in fields(model.config)
            if option.name not in shared
        ]
        return base.unused_flags(cfg) + [name for name, default in others if getattr(cfg, name) != default]
