"""The base of every language model: a decoder made from a configuration, which generates without a bound."""

import copy
import logging
from dataclasses import fields
from typing import Any, ClassVar

from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel
from omegaconf import OmegaConf

from fairseq_fwp.models.trained_model import TrainedModel

logger = logging.getLogger(__name__)

# Nothing but the user's patience bounds the length of what a recurrent model generates.
MAX_GENERATED_POSITIONS = 10**6


class LanguageModel(TrainedModel, FairseqLanguageModel):
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
    def complete(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """The options of the configuration, by these settings and else by their defaults."""
        return {name: settings.get(name, default) for name, default in vars(cls.config()).items()}

    @classmethod
    def same_function(cls, name: str) -> bool:
        """Whether its field says so; one without a help text is the task's, or a name."""
        metadata = cls.config.__dataclass_fields__[name].metadata
        return "help" not in metadata or metadata.get("same_function", False)

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
