"""What every language model here is for fairseq: a decoder of a configuration, which generates without a bound."""

import copy
import logging
from dataclasses import fields
from typing import Any, ClassVar

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel
from omegaconf import OmegaConf
from torch import Tensor

logger = logging.getLogger(__name__)

# Nothing but the user's patience bounds the length of what a recurrent model generates.
MAX_GENERATED_POSITIONS = 10**6


class LanguageModel(FairseqLanguageModel):
    """A decoder with fairseq's interface of a language model; a subclass says of which configuration, and which one."""

    config: ClassVar[type[FairseqDataclass]]

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "LanguageModel":
        """Raises ValueError where the configuration cannot be built, naming the flag to change."""
        cfg = fill_in_defaults(cfg, cls.config())
        decoder = cls.build_decoder(cfg, task.target_dictionary)
        warn_of_unused(cls.unused_flags(cfg))
        return cls(decoder)

    @classmethod
    def build_decoder(cls, cfg: Any, dictionary: Any) -> FairseqIncrementalDecoder:
        """The decoder of the configuration, in which no option is missing. Raises ValueError where it cannot be."""
        raise NotImplementedError

    @classmethod
    def unused_flags(cls, cfg: Any) -> list[str]:
        """The options given that this configuration, of which a decoder was built, does not look at: its fields."""
        raise NotImplementedError

    @classmethod
    def adopt(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """The settings by which this model takes over the weights of one with these, if that can be at all."""
        return saved

    @classmethod
    def misfits(
        cls, weights: dict[str, Tensor], saved: dict[str, Any], given: dict[str, Any], dictionary: Any
    ) -> dict[str, tuple[Any, Any]]:
        """The options, as `given`, that the weights of a model with the settings `saved` cannot be loaded with.

        By name, the value that the weights go with, and the one given: each alone is in the way. {} where other things
        are, or only several together.
        """
        defaults = {name: value for name, value in vars(cls.config()).items() if name != "_name"}
        saved, given = {**defaults, **cls.adopt(saved)}, {**defaults, **given}
        if not cls._fits(weights, saved, dictionary):
            return {}
        return {
            name: (saved[name], given[name])
            for name in defaults
            if saved[name] != given[name] and not cls._fits(weights, {**saved, name: given[name]}, dictionary)
        }

    @classmethod
    def _fits(cls, weights: dict[str, Tensor], settings: dict[str, Any], dictionary: Any) -> bool:
        """Whether a model with these settings takes the weights: only names and shapes are looked at."""
        level = logging.root.manager.disable
        logging.disable(logging.INFO)  # such a model is not there to be told of
        try:
            with torch.device("meta"):
                model = cls(cls.build_decoder(OmegaConf.create(settings), dictionary))
            model.load_state_dict({name: value.to("meta") for name, value in weights.items()})
        except (RuntimeError, ValueError):
            return False
        finally:
            logging.disable(level)
        return True

    def max_decoder_positions(self) -> int:
        """Longest generation: unlike training and scoring it is not bound to --tokens-per-sample."""
        return MAX_GENERATED_POSITIONS


def forgets_segments(task: Any) -> bool:
    """Whether a training reads each segment as if there were none before it. (A conversion reads nothing.)"""
    settings = getattr(task, "args", None)
    return settings is not None and not getattr(settings, "carry_state", False)


def warn_of_unused(flags: list[str]) -> None:
    """Names them in the log. Not refused: an architecture may have set one, and the command line made it void."""
    for flag in flags:
        logger.warning("--%s has no effect on the attention chosen here", flag.replace("_", "-"))


def fill_in_defaults(cfg: Any, known: FairseqDataclass) -> Any:
    """The configuration with the defaults of options that a checkpoint of an earlier version does not know."""
    missing = {option.name: getattr(known, option.name) for option in fields(known) if option.name not in cfg}
    if not missing:
        return cfg
    completed = copy.deepcopy(cfg)
    OmegaConf.set_struct(completed, False)
    return OmegaConf.merge(completed, missing)
