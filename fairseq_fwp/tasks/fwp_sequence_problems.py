"""The task `fwp_sequence_problems`: state tracking and recall on generated sequences, for any language model."""

import zlib
from dataclasses import dataclass
from typing import Any, Optional

from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II

from fairseq_fwp.options import option
from fairseq_fwp.tasks.sequence_problems import PROBLEMS, ProblemSequences, Setting


@dataclass
class FwpSequenceProblemsConfig(FairseqDataclass):
    """Generated problems of state tracking and recall. Defaults: those of parity."""

    problem: ChoiceEnum(list(PROBLEMS)) = option(  # type: ignore[valid-type]
        "parity", "parity: parity of bits; s3: product of permutations; mqar: recall of many key-value pairs"
    )
    length: int = option(40, "tokens of a training sequence, at least 1")
    valid_length: Optional[int] = option(None, "tokens of a sequence in an evaluation; none: --length")  # noqa: UP045
    pairs: int = option(8, "mqar: number of key-value pairs in a sequence, at least 1")
    symbols: int = option(64, "mqar: number of keys, and of values, at least --pairs")
    double_pairs_every: Optional[int] = option(  # noqa: UP045
        None,
        "mqar: number of epochs after which the pairs, 2 at first, are doubled up to --pairs; none: always --pairs",
    )
    train_sequences: int = option(
        20000, "number of sequences between two evaluations, at least 1; each is drawn only once"
    )
    valid_sequences: int = option(500, "number of sequences in an evaluation, at least 1")
    tokens_per_sample: int = option(
        1024, "greatest number of tokens in a sequence; learned positions have as many vectors"
    )
    max_target_positions: Optional[int] = II("task.tokens_per_sample")  # noqa: UP045
    seed: int = II("common.seed")


@register_task("fwp_sequence_problems", dataclass=FwpSequenceProblemsConfig)
class FwpSequenceProblemsTask(FairseqTask):
    """Predict a label for some tokens of new, generated sequences; no data is read from disk.

    Train with `--criterion label_smoothed_cross_entropy --report-accuracy`, which prints the share of right answers.
    """

    cfg: FwpSequenceProblemsConfig

    def __init__(self, cfg: FwpSequenceProblemsConfig) -> None:
        super().__init__(cfg)
        self.problem = PROBLEMS[str(cfg.problem)]
        self.dictionary = Dictionary()
        for symbol in range(self.problem.symbols(self._setting(cfg.length))):
            self.dictionary.add_symbol(str(symbol))

    @classmethod
    def setup_task(cls, cfg: FwpSequenceProblemsConfig, **kwargs: Any) -> "FwpSequenceProblemsTask":
        """Set up the task. Raises ValueError for settings that define no sequence."""
        lengths = {"length": cfg.length, "valid_length": cfg.length if cfg.valid_length is None else cfg.valid_length}
        counts = {name: getattr(cfg, name) for name in ("pairs", "symbols", "train_sequences", "valid_sequences")}
        if cfg.double_pairs_every is not None:
            counts["double_pairs_every"] = cfg.double_pairs_every
        for name, value in (lengths | counts).items():
            if value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        for name, length in lengths.items():
            if length > cfg.tokens_per_sample:
                flag, greatest = name.replace("_", "-"), cfg.tokens_per_sample
                raise ValueError(f"--{flag} must be at most --tokens-per-sample = {greatest}, got {length}")
        if cfg.double_pairs_every is not None and str(cfg.problem) != "mqar":
            raise ValueError(f"--problem must be mqar with --double-pairs-every, got {cfg.problem}")
        if str(cfg.problem) == "mqar":
            if cfg.pairs > cfg.symbols:
                raise ValueError(f"--pairs must be at most --symbols = {cfg.symbols}, got {cfg.pairs}")
            for name, length in lengths.items():
                if length <= 2 * cfg.pairs:
                    raise ValueError(
                        f"--{name.replace('_', '-')} must be more than 2 x --pairs = {2 * cfg.pairs}, got {length}: "
                        "a pair takes two tokens, and what follows asks for values"
                    )
        return cls(cfg)

    def _setting(self, length: int) -> Setting:
        return Setting(length, self.cfg.pairs, self.cfg.symbols)

    @property
    def source_dictionary(self) -> Dictionary:
        """The dictionary of symbols; answers are symbols too."""
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        """The dictionary of symbols; answers are symbols too."""
        return self.dictionary

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> None:
        """Load the sequences of a split: "train", or any other name for evaluation."""
        training = split == "train"
        length = self.cfg.length if training or self.cfg.valid_length is None else self.cfg.valid_length
        self.datasets[split] = ProblemSequences(
            self.problem,
            self._setting(length),
            (self.cfg.seed, zlib.crc32(split.encode())),
            self.cfg.train_sequences if training else self.cfg.valid_sequences,
            self.dictionary.nspecial,
            self.dictionary.pad(),
            self.cfg.double_pairs_every if training else None,
        )

    def max_positions(self) -> None:
        """None, because all sequences are short enough."""
