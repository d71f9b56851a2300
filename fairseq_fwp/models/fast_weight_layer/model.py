"""The language model `fwp_fwl_lm`: another language model with a fast weight layer on top.

The layer learns from a token when the token after it is read. So scoring, training and decoding are those of the models
below it. The state of the layer is the last one of the decoder's layers.
"""

import logging
from dataclasses import dataclass, fields
from typing import Optional

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, register_model
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_fwp.models import presets
from fairseq_fwp.models.attentions import construct
from fairseq_fwp.models.decoder import DecoderConfig, DecoderState, LanguageModelDecoder, initialize
from fairseq_fwp.models.fast_weight_layer.layer import GRADIENTS_AT, FastWeightLayer
from fairseq_fwp.models.fast_weight_layer.update import FAST_WEIGHTS, FastWeightLayerState
from fairseq_fwp.models.fwp_lm import FwpDecoder, FwpLanguageModel, FwpLanguageModelConfig
from fairseq_fwp.models.fwp_xl_lm import FwpXlDecoder, FwpXlLanguageModel, FwpXlLanguageModelConfig
from fairseq_fwp.models.language_model import LanguageModel
from fairseq_fwp.modules.adaptive_softmax import AdaptiveSoftmax
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings, option

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
        False, "add a linear map before the layer, with which fwp-add-layer whitens its inputs; not in the paper"
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
        None, "fixed step size of all fast weights, at least 0; none: learned for each weight, from 0.01"
    )
    fwl_global_step_size: bool = option(False, "learn one step size for all fast weights, instead of one for each")
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


# The option of each argument of `FastWeightLayer`; the model computes the others.
LAYER_OPTIONS = {
    option.name.removeprefix("fwl_"): option.name
    for option in fields(FwpFwlLanguageModelConfig)
    if option.name.startswith("fwl_") and option.name != "fwl_base"
}


def split_layer(state: DecoderState | None) -> tuple[DecoderState | None, FastWeightLayerState | None]:
    """Return the states of the decoder below the layer and of the layer; None = nothing read."""
    return (None, None) if state is None else (DecoderState(state.layers[:-1], state.positions), state.layers[-1])


class LearningDecoder(LanguageModelDecoder):
    """A decoder whose last layer is a fast weight layer; a subclass adds the class of the decoder below the layer.

    Incremental decoding gives the same as a stream of segments of --tokens-per-sample tokens.
    """

    def __init__(self, cfg: FwpFwlLanguageModelConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg, dictionary)
        identity = "the layer is the identity at first only on features of layer normalisation"
        check(not cfg.rms_norm, f"--rms-norm must be off with a fast weight layer, got on: {identity}")
        self.packs_documents = False
        if cfg.fwl_fast_weights == "softmax-bias":
            softmax = AdaptiveSoftmax(self.embed_tokens, self.adaptive_softmax.bounds[1:-1], shifted=True)
            self.adaptive_softmax = softmax.apply(initialize)
        dim = cfg.decoder_embed_dim
        sizes = {"bias_entries": self.adaptive_softmax.shift_entries}
        if cfg.fwl_hidden_dim is None:
            sizes["hidden_dim"] = 4 * dim
        layer = construct(FastWeightLayer, cfg, LAYER_OPTIONS, dim, **sizes)
        self.fast_weight_layer = layer.apply(initialize)
        if self.fast_weight_layer.gradients_at == "carried":
            self.needs_state["--fwl-gradients-at carried"] = "gradients are taken at the trained weights"
        # The last normalisation, whose weights an identity layer takes over.
        last = "layer_norm" if cfg.decoder_normalize_before else f"layers.{cfg.decoder_layers - 1}.final_layer_norm"
        without = cfg.fwl_random_start or (cfg.decoder_normalize_before and cfg.no_decoder_final_norm)
        self.last_norm = None if without else last

    def extract_inputs(self, tokens: Tensor, state: DecoderState | None = None) -> tuple[Tensor, DecoderState]:
        """Return the inputs (B, L, D) of the layer: the features of the decoder below, and its new state."""
        return super().extract_features(tokens, state)

    def extract_features(
        self, tokens: Tensor, state: DecoderState | None = None, last: int | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, DecoderState]:
        base, layer = split_layer(state)
        x, base = self.extract_inputs(tokens, base)
        y, layer = self._adapt(x, tokens, layer)
        return y if last is None else y[:, y.shape[1] - last :], DecoderState((*base.layers, layer), base.positions)

    def step(self, tokens: Tensor, state: DecoderState | None, start: int) -> tuple[Tensor, DecoderState]:
        base, layer = split_layer(state)
        x, base = super().step(tokens, base, start)
        pieces = []
        for begin, end in self.parts_of_segments(start, tokens.shape[1]):
            part = slice(begin - start, end - start)
            y, layer = self._adapt(x[:, part], tokens[:, part], layer, begin % self.sample_length > 0)
            pieces.append(y)
        return torch.cat(pieces, 1), DecoderState((*base.layers, layer), base.positions)

    @property
    def steps_are_alike(self) -> bool:
        return False  # the layer learns by segments

    def _adapt(
        self, x: Tensor, tokens: Tensor, state: FastWeightLayerState | None, same_segment: bool = False
    ) -> tuple[Tensor, FastWeightLayerState]:
        padding = tokens.eq(self.padding_idx)
        mask = padding if padding.any() else None
        return self.fast_weight_layer(x, tokens, self.adaptive_softmax, state, mask, same_segment)

    def state_size(self, length: int, carried: bool = False) -> int:
        return super().state_size(length, carried) + self.fast_weight_layer.state_size(length, carried)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> dict[str, Tensor]:
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


class FwlDecoder(LearningDecoder, FwpDecoder):
    """A fast weight layer on the decoder of `fwp_lm`."""


class FwlXlDecoder(LearningDecoder, FwpXlDecoder):
    """A fast weight layer on the decoder of `fwp_xl_lm`."""

    def __init__(self, cfg: FwpFwlLanguageModelConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg, dictionary)
        # No dropout: these features are keys of what is learned while reading, and training would distrust noise.
        self.final_dropout = nn.Identity()


# The models that can be below the layer, by their names in --fwl-base, and the decoders with the layer.
BASES: dict[str, type[FwpLanguageModel | FwpXlLanguageModel]] = {
    "fwp_lm": FwpLanguageModel,
    "fwp_xl_lm": FwpXlLanguageModel,
}
DECODERS: dict[str, type[LearningDecoder]] = {"fwp_lm": FwlDecoder, "fwp_xl_lm": FwlXlDecoder}


@register_model("fwp_fwl_lm", dataclass=FwpFwlLanguageModelConfig)
class FwpFwlLanguageModel(FwpLanguageModel, FwpXlLanguageModel):
    """A language model that learns while it reads; it works wherever the models below the layer work."""

    config = FwpFwlLanguageModelConfig

    @classmethod
    def adopt(cls, saved: Settings) -> Settings:
        """Return the settings of a model that can be below the layer, with the layer added."""
        base = ARCH_MODEL_NAME_REGISTRY.get(saved.get("_name"))
        return {**saved, "fwl_base": base} if base in BASES else saved

    @classmethod
    def build_decoder(cls, cfg: FwpFwlLanguageModelConfig, dictionary: Dictionary) -> LearningDecoder:
        return DECODERS[str(cfg.fwl_base)](cfg, dictionary)

    @classmethod
    def unused_flags(cls, cfg: FwpFwlLanguageModelConfig) -> list[str]:
        used = {option.name for shared in (DecoderConfig, BASES[str(cfg.fwl_base)].config) for option in fields(shared)}
        others = [option for model in BASES.values() for option in fields(model.config) if option.name not in used]
        unused = [option.name for option in others if getattr(cfg, option.name) != option.default]
        return BASES[str(cfg.fwl_base)].unused_flags(cfg) + unused


presets.register_presets("fwp_fwl_lm")


def add_layer(
    base: LanguageModel, options: FairseqDataclass, arch: str, task: FairseqTask, hidden_dim: int | None
) -> tuple[FwpFwlLanguageModel, FairseqDataclass]:
    """Return the model with a layer that does not learn yet, and its options, from a base and its options.

    arch: the name of the base's architecture. Raises ValueError for a model that the layer cannot be put on.
    """
    names = [name for name, model in BASES.items() if type(base) is model]
    if not names:
        raise ValueError(f"the model below the layer must be {' or '.join(BASES)}, got {arch}")
    settings = OmegaConf.to_container(options) if OmegaConf.is_config(options) else vars(options)
    settings |= {
        "_name": "fwp_fwl_lm", "arch": "fwp_fwl_lm", "fwl_base": names[0], "fwl_fast_weights": "none",
        "fwl_map_inputs": True, "fwl_hidden_dim": hidden_dim,
    }  # fmt: skip
    completed = OmegaConf.create({**vars(FwpFwlLanguageModel.config()), **settings})
    model = FwpFwlLanguageModel.build_model(completed, task)
    if model.decoder.last_norm is None:
        raise ValueError(
            "the model must end with a layer normalisation, got --no-decoder-final-norm: train the base without this "
            "flag, because the layer is the identity only on normalised features"
        )
    model.load_state_dict(base.state_dict())
    return model, completed
