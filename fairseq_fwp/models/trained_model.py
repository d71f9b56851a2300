"""The options that weights were trained with, compared with those of the model that loads them."""

import logging
from argparse import Namespace
from typing import Any

from fairseq.models import BaseFairseqModel

from fairseq_fwp.options import as_given, plain

logger = logging.getLogger(__name__)


class TrainedModel(BaseFairseqModel):
    """A base class that checks the options of loaded weights; list it before a model of fairseq among the bases.

    Settings are dictionaries by name, as in a checkpoint or a command line. They may have more than the model's
    options, and lack options at their defaults. A subclass has these class methods:

    - `complete(settings)` returns only the options of the model: these settings, and defaults for the others.
    - `same_function(name)` says whether trained weights compute the same function with every value of an option.
    - `unused_flags(cfg)` returns the given options that this configuration does not use.
    """

    @classmethod
    def adopt(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the settings with which this model can load weights that were trained with the settings `saved`.

        For a model of this class these are `saved` itself. For another one, options that its weights do not determine
        are left out.
        """
        return saved

    @classmethod
    def differences(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return (saved value, given value) of differing options, without options that one of the two does not use."""
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
        """Load weights; warn if they were trained with other options. Raises ValueError if those do not fit.

        The options are in the attribute `saved` of the weights, which checkpoint_utils.load_checkpoint_to_cpu sets.
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
                f"{saved.path} holds a model with {theirs}, but {asked} {ours}, which its weights do not fit: give the "
                "flags of the saved model, or another checkpoint"
            ) from None
        if found and not saved.overridden:
            logger.warning(
                "%s was trained with %s, but is loaded with %s: its weights now compute another function; if you do "
                "not want this, give the flags of its training",
                *(saved.path, theirs, ours),
            )
        return loaded
