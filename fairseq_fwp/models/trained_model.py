"""The options that weights were trained with, compared with those of the model that loads them."""

import logging
from argparse import Namespace
from typing import Any

from fairseq.models import BaseFairseqModel

from fairseq_fwp.options import as_given, plain

logger = logging.getLogger(__name__)


class TrainedModel(BaseFairseqModel):
    """To be put before a model of fairseq among the bases of a class.

    Settings are dictionaries by name, as a checkpoint or a command line has them: with more than the model's options,
    and without those that they leave at their defaults.
    """

    @classmethod
    def complete(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the model, and no others, by these settings and else by their defaults."""
        raise NotImplementedError

    @classmethod
    def same_function(cls, name: str) -> bool:
        """Whether trained weights compute the same whatever the value of this option."""
        raise NotImplementedError

    @classmethod
    def unused_flags(cls, cfg: Any) -> list[str]:
        """Return the options given that this configuration does not look at: its fields."""
        raise NotImplementedError

    @classmethod
    def adopt(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the settings by which this model takes the weights of one with these, if that can be at all.

        `saved` itself for a model of this class; what the weights know nothing of is not among those of another.
        """
        return saved

    @classmethod
    def differences(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return (value saved, value given) by option, without those that one of the two does not look at."""
        adopted = cls.adopt(saved)
        before, after = cls.complete(adopted), cls.complete(given)
        known = before.keys() if adopted is saved else before.keys() & adopted.keys()
        ignored = {name for options in (before, after) for name in cls.unused_flags(Namespace(**options))}
        return {
            name: (before[name], after[name])
            for name in before
            if name in known - ignored and before[name] != after[name] and not cls.same_function(name)
        }

    def load_state_dict(self, state_dict: Any, strict: bool = True, model_cfg: Any = None, args: Any = None) -> Any:
        """Load weights. Where they were trained with other options, say so, or why they cannot be loaded: ValueError.

        The options are an attribute of the weights, `saved`, as checkpoint_utils.load_checkpoint_to_cpu puts it there.
        """
        saved: Any = getattr(state_dict, "saved", None)
        found = self.differences(saved.options, plain(model_cfg)) if saved and model_cfg else {}
        theirs, ours = (", ".join(as_given(name, pair[side]) for name, pair in found.items()) for side in (0, 1))
        try:
            loaded = super().load_state_dict(state_dict, strict, model_cfg, args)
        except RuntimeError:
            if not found:
                raise
            asked = "--model-overrides asks for" if saved.overridden else "this model has"
            raise ValueError(
                f"{saved.path} goes with {theirs}, and {asked} {ours}: give the flags of its model, or another "
                "checkpoint"
            ) from None
        if found and not saved.overridden:
            logger.warning(
                "%s was trained with %s, and goes on here with %s: its weights compute something else so",
                *(saved.path, theirs, ours),
            )
        return loaded
