"""The base of every language model: a decoder made from a configuration; generation has no bound."""

import copy
import logging
from dataclasses import fields
from typing import Any, ClassVar

from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqLanguageModel
from omegaconf import OmegaConf

from fairseq_fwp.models.trained_model import TrainedModel

logger = logging.getLogger(__name__)

# A recurrent model can generate texts of any length.
MAX_GENERATED_POSITIONS = 10**6


class LanguageModel(TrainedModel, FairseqLanguageModel):
    """A decoder with fairseq's interface of a language model.

    A subclass has `config`, its options, and `build_decoder(cfg, dictionary)`, which checks them.
    """

    config: ClassVar[type[FairseqDataclass]]

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "LanguageModel":
        """Build the model. Raises ValueError that names the flag to change if it cannot be built."""
        cfg = fill_in_defaults(cfg, cls.config())
        words = len(task.target_dictionary)
        if words != len(getattr(task, "source_dictionary", task.target_dictionary)):
            raise ValueError(
                f"--output-dictionary-size must be left out with this model, which predicts every word that it reads, "
                f"got {words}"
            )
        decoder = cls.build_decoder(cfg, task.target_dictionary)
        warn_of_unused(cls.unused_flags(cfg))
        return cls(decoder)

    @classmethod
    def complete(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the configuration: these settings, and defaults for the others."""
        return {name: settings.get(name, default) for name, default in vars(cls.config()).items()}

    @classmethod
    def same_function(cls, name: str) -> bool:
        """Return whether the option's field says so; a field without a help text belongs to the task, or is a name."""
        metadata = cls.config.__dataclass_fields__[name].metadata
        return "help" not in metadata or metadata.get("same_function", False)

    def max_decoder_positions(self) -> int:
        """Longest generation: unlike training and scoring, it is not limited by --tokens-per-sample."""
        return MAX_GENERATED_POSITIONS


def forgets_segments(task: Any) -> bool:
    """Return whether training starts each segment without a state. (A conversion does not read segments.)"""
    settings = getattr(task, "args", None)
    return settings is not None and not getattr(settings, "carry_state", False)


def warn_of_unused(flags: list[str]) -> None:
    """Warn of flags without effect. They may come from an architecture, so they are not an error."""
    for flag in flags:
        logger.warning("--%s has no effect on the chosen attention", flag.replace("_", "-"))


def fill_in_defaults(cfg: Any, known: FairseqDataclass) -> Any:
    """Return the configuration with defaults for options that an earlier version's checkpoint does not have."""
    missing = {option.name: getattr(known, option.name) for option in fields(known) if option.name not in cfg}
    if not missing:
        return cfg
    completed = copy.deepcopy(cfg)
    OmegaConf.set_struct(completed, False)
    return OmegaConf.merge(completed, missing)
