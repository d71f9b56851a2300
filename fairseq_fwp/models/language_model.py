"""The bases of models: one compares options with those of loaded weights, one makes a language model of a decoder."""

import logging
from argparse import Namespace
from collections.abc import Mapping
from typing import ClassVar, Protocol, runtime_checkable

from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import BaseFairseqModel, FairseqLanguageModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from fairseq_fwp.models.decoder import LanguageModelDecoder
from fairseq_fwp.modules.decoding import Sample
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings, as_given, flag, plain, read_options, setting

logger = logging.getLogger(__name__)

# A recurrent model can generate texts of any length.
MAX_GENERATED_POSITIONS = 10**6


class Training(Protocol):
    """The training of weights: its checkpoint, the model's options, and whether other options are wanted."""

    path: str
    options: Settings
    overridden: bool


@runtime_checkable
class TrainedWeights(Protocol):
    """Weights that know their training, as checkpoint_utils.load_checkpoint_to_cpu loads them."""

    saved: Training


class TrainedModel(BaseFairseqModel):
    """A base class that checks the options of loaded weights; list it before a model of fairseq among the bases.

    Settings are dictionaries by name, as in a checkpoint or a command line. They may have more than the model's
    options, and lack options at their defaults. A subclass has `config`, the class of its options, and
    `unused_flags(cfg)`, the given options that this configuration does not use.
    """

    config: ClassVar[type[FairseqDataclass]]

    @classmethod
    def complete(cls, settings: Settings) -> Settings:
        """Return only the options of the model: these settings, and defaults for the others."""
        return {name: settings.get(name, default) for name, default in vars(cls.config()).items()}

    @classmethod
    def same_function(cls, name: str) -> bool:
        """Return whether trained weights compute the same function with every value of an option.

        The option's field says so; a field without a help text belongs to the task, or is a name.
        """
        metadata = cls.config.__dataclass_fields__[name].metadata
        return "help" not in metadata or metadata.get("same_function", False)

    @classmethod
    def adopt(cls, saved: Settings) -> Settings:
        """Return the settings with which this model can load weights that were trained with the settings `saved`.

        For a model of this class these are `saved` itself. For another one, options that its weights do not determine
        are left out.
        """
        return saved

    @classmethod
    def differences(cls, saved: Settings, wanted: Settings) -> dict[str, tuple[object, object]]:
        """Return (saved value, wanted value) of differing options, without options that one of the two does not use."""
        adopted = cls.adopt(saved)
        before, after = cls.complete(adopted), cls.complete(wanted)
        determined = before.keys() if adopted is saved else before.keys() & adopted.keys()
        ignored = {name for options in (before, after) for name in cls.unused_flags(Namespace(**options))}
        return {
            name: (before[name], after[name])
            for name in before
            if name in determined - ignored and before[name] != after[name] and not cls.same_function(name)
        }

    def load_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        strict: bool = True,
        model_cfg: FairseqDataclass | None = None,
        args: Namespace | None = None,
    ) -> object:
        """Load weights; warn if they were trained with other options. Raises ValueError if those do not fit.

        The options are in the attribute `saved` of the weights, which checkpoint_utils.load_checkpoint_to_cpu sets.
        """
        saved = state_dict.saved if isinstance(state_dict, TrainedWeights) else None
        changed = self.differences(saved.options, plain(model_cfg)) if saved and model_cfg else {}
        theirs, ours = (", ".join(as_given(name, pair[side]) for name, pair in changed.items()) for side in (0, 1))
        try:
            loaded = super().load_state_dict(state_dict, strict, model_cfg, args)
        except RuntimeError:
            if not (saved and changed):
                raise
            wanted = "--model-overrides asks for" if saved.overridden else "this model has"
            raise ValueError(
                f"{saved.path} holds a model with {theirs}, but {wanted} {ours}, which its weights do not fit: give "
                "the flags of the saved model, or another checkpoint"
            ) from None
        if saved and changed and not saved.overridden:
            logger.warning(
                f"{saved.path} was trained with {theirs}, but is loaded with {ours}: its weights now compute another "
                "function; if you do not want this, give the flags of its training"
            )
        return loaded


class LanguageModel(TrainedModel, FairseqLanguageModel):
    """A decoder with fairseq's interface of a language model; a subclass has `build_decoder`."""

    decoder: LanguageModelDecoder

    @classmethod
    def build_decoder(cls, cfg: FairseqDataclass, dictionary: Dictionary) -> LanguageModelDecoder:
        """Return the decoder. Raises ValueError for options that cannot be."""
        raise NotImplementedError

    @classmethod
    def build_model(cls, cfg: FairseqDataclass, task: FairseqTask) -> "LanguageModel":
        """Build the model. Raises ValueError that names the flag to change if it cannot be built."""
        cfg = read_options(cls.config, cfg)
        words = len(task.target_dictionary)
        check(
            words == len(setting(task, "source_dictionary", task.target_dictionary)),
            f"--output-dictionary-size must be left out with this model, which predicts every word that it reads, got "
            f"{words}",
        )
        decoder = cls.build_decoder(cfg, task.target_dictionary)
        warn_of_unused(cls.unused_flags(cfg))
        settings = setting(task, "args", None)  # a conversion, which does not read segments, has none
        if settings is not None and not setting(settings, "carry_state", False):
            for given, instead in decoder.needs_state.items():
                logger.warning(f"{given} has no effect without --task fwp_language_modeling --carry-state: {instead}")
        return cls(decoder)

    def get_targets(self, sample: Sample, net_output: object) -> Tensor:
        """Return the targets of a batch, for a criterion.

        Raises ValueError for a word whose probability is always 0: its loss is infinite, but no gradient is.
        """
        targets: Tensor = super().get_targets(sample, net_output)
        absent = self.decoder.adaptive_softmax.absent
        if absent is not None:
            impossible = targets[absent[targets] & (targets != self.decoder.dictionary.pad())]
            if len(impossible):
                word = self.decoder.dictionary[int(impossible[0])]
                raise ValueError(
                    f"the text must have only words that the model can predict, got {word!r}, whose probability is "
                    "always 0: the model was converted without it (an end of a text is named by fwp-convert --end)"
                )
        return targets

    def max_decoder_positions(self) -> int:
        """Longest generation: unlike training and scoring, it is not limited by --tokens-per-sample."""
        return MAX_GENERATED_POSITIONS


def warn_of_unused(names: list[str]) -> None:
    """Warn of options without effect. They may come from an architecture, so they are not an error."""
    for name in names:
        logger.warning(f"{flag(name)} has no effect on the chosen attention")
