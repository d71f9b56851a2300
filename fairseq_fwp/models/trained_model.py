"""What a model knows of the settings that its weights were trained with, once others are given for them."""

import logging
import warnings
from argparse import Namespace
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor

# Options that change how weights are trained, or how their function is computed, but not that function: with another
# value of them the same weights give, in evaluation, the same scores. All other options are taken to change these.
SAME_FUNCTION = frozenset(
    {
        *("dropout", "attention_dropout", "activation_dropout", "adaptive_softmax_dropout", "relu_dropout"),
        *("final_dropout", "encoder_layerdrop", "decoder_layerdrop", "favor_redraw", "half_loss", "base_shuffle"),
        "fwl_random_start",
        *("quant_noise_pq", "quant_noise_pq_block_size", "quant_noise_scalar"),
        *("encoder_embed_path", "decoder_embed_path"),
        *("tokens_per_sample", "add_bos_token", "max_source_positions", "max_target_positions"),
        "_name",  # of an architecture, which says no more than its options
        *("fwp_backend", "checkpoint_activations", "offload_activations", "min_params_to_wrap", "export"),
    }
)


class TrainedModel(BaseFairseqModel):
    """To be put before a model of fairseq among the bases of a class.

    Settings are dictionaries by name, as a checkpoint or a command line has them: with more than the model's options,
    and not with those that they leave at their defaults.
    """

    @classmethod
    def complete(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """The options of the model, and no others, by these settings and else by their defaults."""
        raise NotImplementedError

    @classmethod
    def unused_flags(cls, cfg: Any) -> list[str]:
        """The options given that this configuration does not look at: its fields."""
        raise NotImplementedError

    @classmethod
    def adopt(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """The settings by which this model takes over the weights of one with these, if that can be at all.

        `saved` itself for a model of this class; what the weights know nothing of is not among those of another.
        """
        return saved

    @classmethod
    def misfits(
        cls, weights: dict[str, Tensor], saved: dict[str, Any], given: dict[str, Any], task: Any
    ) -> dict[str, tuple[Any, Any]]:
        """The options, as `given`, that the weights of a model with the settings `saved` cannot be loaded with.

        By name, the value that the weights go with, and the one given: each alone is in the way. {} where other things
        are, or only several together.
        """
        saved, given = cls.complete(cls.adopt(saved)), cls.complete(given)
        if not cls._fits(weights, saved, task):
            return {}
        return {
            name: (saved[name], given[name])
            for name in saved
            if saved[name] != given[name] and not cls._fits(weights, {**saved, name: given[name]}, task)
        }

    @classmethod
    def changes(cls, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The options by which weights trained with the settings `saved` compute something else as `given`, by name.

        Without those that one of the two does not look at.
        """
        adopted = cls.adopt(saved)
        before, after = cls.complete(adopted), cls.complete(given)
        known = before.keys() if adopted is saved else before.keys() & adopted.keys()
        ignored = SAME_FUNCTION.union(*(cls.unused_flags(Namespace(**options)) for options in (before, after)))
        return {
            name: (before[name], after[name])
            for name in before
            if name in known - ignored and before[name] != after[name]
        }

    @classmethod
    def _fits(cls, weights: dict[str, Tensor], options: dict[str, Any], task: Any) -> bool:
        """Whether a model with these options takes the weights: only names and shapes are looked at."""
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)  # such a model is not there to be told of
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a model without numbers takes none
                cls.build_model(Namespace(**options), task).load_state_dict(dict(weights))
        except (OSError, RuntimeError, ValueError):
            return False
        finally:
            logging.disable(level)
        return True
