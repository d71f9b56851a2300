"""The tasks `fwp_associative_retrieval` and `fwp_sequence_problems`, whose sequences are new and drawn from --seed."""

import logging
import math
import zlib
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Optional

from fairseq.data import Dictionary
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II

from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings, flag, option
from fairseq_fwp.tasks.synthetic.data import Associations, GeneratedSequences, ProblemSequences
from fairseq_fwp.tasks.synthetic.problems import PROBLEMS, VARIABLES, Problem, Setting

logger = logging.getLogger(__name__)


class GeneratedTask(FairseqTask):
    """A task that reads no data from disk. smallest: the least value of each option, None is allowed too."""

    smallest: ClassVar[dict[str, int]]

    @classmethod
    def setup_task(cls, cfg: FairseqDataclass, **kwargs: object) -> "GeneratedTask":
        """Set up the task. Raises ValueError for settings that define no sequence."""
        for name, smallest in cls.smallest.items():
            value = getattr(cfg, name)
            # NaN is an error too.
            check(value is None or value >= smallest, f"{flag(name)} must be at least {smallest}, got {value}")
        task = cls(cfg)
        for name, training in (("--length", True), ("--valid-length", False)):
            task.check_length(name, training)
        return task

    def length(self, training: bool) -> int:
        """Return the length of a sequence, in training or in an evaluation."""
        valid_length = None if training else self.cfg.valid_length
        return self.cfg.length if valid_length is None else valid_length

    def check_length(self, flag: str, training: bool) -> None:
        """Raise ValueError for a length, of training or of an evaluation, that defines no sequence."""

    def load_dataset(self, split: str, combine: bool = False, **kwargs: object) -> None:
        """Load the sequences of a split: "train", or any other name for evaluation."""
        self.datasets[split] = self.sequences(split == "train", seed=(self.cfg.seed, zlib.crc32(split.encode())))

    def sequences(self, training: bool, seed: tuple[int, ...]) -> GeneratedSequences:
        """Return the sequences of training or of an evaluation."""
        raise NotImplementedError


@dataclass
class FwpAssociativeRetrievalTaskConfig(FairseqDataclass):
    """Sequences of key-value pairs. Defaults: setting 1 of Schlag et al. 2021; --with-replacement is its setting 2."""

    num_keys: int = option(20, "number S of keys, and of values, at least 1")
    with_replacement: bool = option(
        False, "draw a key and a value for each pair; the last value of a key is the right one"
    )
    length: Optional[int] = option(  # noqa: UP045  (fairseq's parser reads no other form)
        None, "number of pairs in a sequence, at least 1; none: S, with replacement 2 S"
    )
    valid_length: Optional[int] = option(  # noqa: UP045
        None, "number of pairs in a sequence of an evaluation; none: --length; the paper's public code has S"
    )
    updates_per_epoch: int = option(100, "number of updates between two evaluations, at least 1")
    valid_sequences: int = option(
        20, "number of sequences in an evaluation, at least 1; each is asked for all its keys"
    )
    stop_loss: float = option(0.001, "loss of an evaluation, at least 0, at which training ends")
    stop_updates: int = option(
        1000, "number of updates without a better evaluation after which training ends; 0: no limit"
    )
    seed: int = II("common.seed")
    update_freq: Any = II("optimization.update_freq")


@dataclass
class Progress:
    """The progress of a training: the best loss, its update, and the last update that was evaluated."""

    best_loss: float = math.inf
    best_update: int = 0
    evaluated_update: int = 0


@register_task("fwp_associative_retrieval", dataclass=FwpAssociativeRetrievalTaskConfig)
class FwpAssociativeRetrievalTask(GeneratedTask):
    """Synthetic retrieval (Schlag et al. 2021, arXiv 2102.11174, Sec. 6.1): write pairs, then retrieve values of keys.

    An epoch is the training between two evaluations. The progress is saved with the checkpoint, so that an interrupted
    run ends at the same update as an uninterrupted one.
    """

    smallest: ClassVar = {
        **dict.fromkeys(["num_keys", "length", "valid_length", "updates_per_epoch", "valid_sequences"], 1),
        **dict.fromkeys(["stop_loss", "stop_updates"], 0),
    }
    source_dictionary = target_dictionary = None  # keys and values are numbers

    def __init__(self, cfg: FwpAssociativeRetrievalTaskConfig) -> None:
        super().__init__(cfg)
        self.num_keys = cfg.num_keys
        self.progress = Progress()

    def length(self, training: bool) -> int:
        length = super().length(training)
        return self.num_keys * (2 if self.cfg.with_replacement else 1) if length is None else length

    def check_length(self, flag: str, training: bool) -> None:
        length = self.length(training)
        most = f"{flag} must be at most --num-keys = {self.num_keys} without --with-replacement"
        check(length <= self.num_keys or self.cfg.with_replacement, f"{most}, got {length}")

    def sequences(self, training: bool, seed: tuple[int, ...]) -> Associations:
        """Return sequences: infinitely many with one query each for training."""
        settings = {"seed": seed, "count": None if training else self.cfg.valid_sequences}
        with_replacement, length = self.cfg.with_replacement, self.length(training)
        return Associations(self.num_keys, with_replacement, not training, length=length, **settings)

    @property
    def ended(self) -> bool:
        """Return whether the loss is small enough, or has not improved for too long."""
        waited = self.progress.evaluated_update - self.progress.best_update
        return self.progress.best_loss <= self.cfg.stop_loss or 0 < self.cfg.stop_updates <= waited

    def get_batch_iterator(
        self,
        dataset: Associations,
        max_sentences: int | None = None,
        num_shards: int = 1,
        epoch: int = 1,
        disable_iterator_cache: bool = False,
        **options: object,
    ) -> EpochBatchIterator:
        """Return batches of max_sentences sequences. Raises ValueError without that number."""
        if max_sentences is None:
            raise ValueError("--batch-size must be the number of sequences that a process reads at once, got none")
        if not disable_iterator_cache and dataset in self.dataset_to_epoch_iter:
            return self.dataset_to_epoch_iter[dataset]
        dataset.set_epoch(epoch)
        training = dataset.count is None
        count = dataset.count or self.cfg.updates_per_epoch * self.cfg.update_freq[0] * num_shards * max_sentences
        iterator = (TrainingIterator if training else EpochBatchIterator)(
            dataset,
            dataset.collater,
            [range(start, min(start + max_sentences, count)) for start in range(0, count, max_sentences)],
            num_shards=num_shards,
            shard_id=options.get("shard_id", 0),
            num_workers=options.get("num_workers", 0),
            epoch=epoch,
            buffer_size=options.get("data_buffer_size", 0),
            disable_shuffling=True,
        )
        if training:
            iterator.task = self
        if not disable_iterator_cache:
            self.dataset_to_epoch_iter[dataset] = iterator
        return iterator

    def begin_valid_epoch(self, epoch: int, model: BaseFairseqModel) -> None:
        """Set the epoch: each evaluation has other sequences."""
        for split, dataset in self.datasets.items():
            if split != "train":
                dataset.set_epoch(epoch)

    def post_validate(self, model: BaseFairseqModel, stats: Settings, agg: object) -> None:
        """Record the loss of an evaluation; the first of several subsets counts, as for the best checkpoint.

        Evaluations in mid-epoch, because of an interruption, do not count: they would change when training ends.
        """
        loss, update = stats["loss"], stats["num_updates"]
        progress = self.progress
        if update <= progress.evaluated_update or update % self.cfg.updates_per_epoch:
            return
        progress.evaluated_update = update
        if loss < progress.best_loss:
            progress.best_loss, progress.best_update = loss, update
        if self.ended:
            logger.info(f"the training ends: best loss {progress.best_loss:g} at update {progress.best_update:,}")


class TrainingIterator(EpochBatchIterator):
    """Batches in their order, epoch after epoch, until the task has ended."""

    task: FwpAssociativeRetrievalTask

    @property
    def next_epoch_idx(self) -> float:
        """The number of the next epoch; NaN after the last one, so that it is not <= --max-epoch.

        fairseq trains `while next_epoch_idx <= max_epoch`, and has no other way to stop at a loss.
        """
        if self.task.ended and (self._cur_epoch_itr is None or self.end_of_epoch()):
            return math.nan
        return super().next_epoch_idx

    def state_dict(self) -> Settings:
        """Return fairseq's state for checkpoints, and the progress of the training."""
        return {**super().state_dict(), "progress": asdict(self.task.progress)}

    def load_state_dict(self, state_dict: Settings) -> None:
        """Load the progress. Raises RuntimeError for a checkpoint of another task."""
        if "progress" not in state_dict:
            raise RuntimeError(
                "the checkpoint must be of this task, got another: give --reset-dataloader to start from its model"
            )
        self.task.progress = Progress(**state_dict["progress"])
        super().load_state_dict(state_dict)


@dataclass
class FwpSequenceProblemsConfig(FairseqDataclass):
    """Generated problems of state tracking and recall. Defaults: those of parity."""

    problem: ChoiceEnum(list(PROBLEMS)) = option(  # type: ignore[valid-type]
        "parity",
        "parity: of bits; s3, a4, a5, s5, z60: product in that group; mqar: recall of many key-value pairs; listops: "
        "nested operators; code_execution: what a program prints; others: formal languages",
    )
    length: int = option(
        40,
        "tokens of a training sequence, at least 1; listops: depth of its operators; code_execution: statements; "
        "counters: the number of each letter",
    )
    valid_length: Optional[int] = option(None, "length of a sequence in an evaluation; none: --length")  # noqa: UP045
    shortest: Optional[int] = option(  # noqa: UP045
        None, "draw lengths evenly, from this one, at least 1, up to --length; none: all have that"
    )
    valid_shortest: Optional[int] = option(None, "the same in an evaluation; none: all have its length")  # noqa: UP045
    pairs: int = option(8, "mqar: number of key-value pairs in a sequence, at least 1")
    symbols: int = option(64, "mqar: number of keys, and of values, at least --pairs")
    double_pairs_every: Optional[int] = option(  # noqa: UP045
        None,
        "mqar: number of epochs after which the pairs, 2 at first, are doubled up to --pairs; none: always --pairs",
    )
    variables: int = option(3, f"code_execution: number of variables, from 1 to {len(VARIABLES)}")
    published_labels: bool = option(
        False,
        "code_execution: the labels of the paper's public code, in which an assignment behind a true condition changes "
        "only undefined variables; otherwise those of Python",
    )
    train_sequences: int = option(20000, "number of sequences between two evaluations, at least 1")
    repeat_sequences: bool = option(
        False, "train on the same sequences in every epoch, in batches of about equal lengths; otherwise on new ones"
    )
    valid_sequences: int = option(500, "number of sequences in an evaluation, at least 1")
    tokens_per_sample: int = option(
        1024, "greatest number of tokens in a sequence; learned positions have as many vectors"
    )
    max_target_positions: Optional[int] = II("task.tokens_per_sample")  # noqa: UP045
    seed: int = II("common.seed")


# Options that one problem has.
OF_ONE_PROBLEM = {
    **dict.fromkeys(["pairs", "symbols", "double_pairs_every"], "mqar"),
    **dict.fromkeys(["variables", "published_labels"], "code_execution"),
}


@register_task("fwp_sequence_problems", dataclass=FwpSequenceProblemsConfig)
class FwpSequenceProblemsTask(GeneratedTask):
    """State tracking and recall for any language model: predict a label for some tokens of a sequence.

    Train with `--criterion fwp_answers`, which prints the share of right answers, and of sequences with no wrong one.
    """

    smallest: ClassVar = dict.fromkeys(
        ["length", "valid_length", "shortest", "valid_shortest", "pairs", "symbols", "variables", "train_sequences",
         "valid_sequences", "double_pairs_every"], 1
    )  # fmt: skip
    source_dictionary: Dictionary | None = None  # attributes, where fairseq has properties
    target_dictionary: Dictionary | None = None

    def __init__(self, cfg: FwpSequenceProblemsConfig) -> None:
        super().__init__(cfg)
        for name, problem in OF_ONE_PROBLEM.items():
            usual = getattr(cfg, name) == getattr(FwpSequenceProblemsConfig, name)
            check(usual or problem == cfg.problem, f"--problem must be {problem} with {flag(name)}, got {cfg.problem}")
        # Answers are symbols too.
        self.dictionary = self.source_dictionary = self.target_dictionary = Dictionary()
        for symbol in range(self.problem.symbols(self.setting(True))):
            self.dictionary.add_symbol(str(symbol))

    @property
    def problem(self) -> Problem:
        return PROBLEMS[str(self.cfg.problem)]

    def setting(self, training: bool) -> Setting:
        """Return the setting of the sequences of training or of an evaluation."""
        cfg = self.cfg
        shortest = cfg.shortest if training else cfg.valid_shortest
        of_programs = cfg.variables, bool(cfg.published_labels)
        return Setting(self.length(training), cfg.pairs, cfg.symbols, shortest, *of_programs)

    def check_length(self, flag: str, training: bool) -> None:
        cfg, problem, setting = self.cfg, self.problem, self.setting(training)
        kind, length, shortest = str(cfg.problem), setting.length, setting.shortest
        most = f"{flag} must be at most --tokens-per-sample = {cfg.tokens_per_sample}"
        unit = f" / {problem.tokens}, the tokens of each," if problem.tokens > 1 else ""
        longest = problem.most or length
        slow = f"{flag} must be at most {longest} for {kind}: longer ones take long to draw"
        check(length <= longest, f"{slow}, got {length}")
        check(length * problem.tokens <= cfg.tokens_per_sample, f"{most}{unit} for {kind}, got {length}")
        drawn = f"{flag.replace('length', 'shortest')} must be left out for {kind}, whose length is never drawn"
        check(problem.varies or shortest is None, f"{drawn}, got {shortest}")
        fewest = -(-(shortest or 1) // problem.multiple) * problem.multiple
        enough = f"{flag} must be at least {fewest} for {kind} of at least {shortest or 1}"
        check(length >= fewest, f"{enough}, got {length}")
        doubles = cfg.double_pairs_every is not None
        both = "--repeat-sequences must be left out with --double-pairs-every, which needs new sequences"
        check(not (doubles and cfg.repeat_sequences), both)
        check(cfg.variables <= len(VARIABLES), f"--variables must be at most {len(VARIABLES)}, got {cfg.variables}")
        if kind == "mqar":
            check(cfg.pairs <= cfg.symbols, f"--pairs must be at most --symbols = {cfg.symbols}, got {cfg.pairs}")
            more = f"{flag} must be more than 2 x --pairs = {2 * cfg.pairs}"
            asks = "a pair takes two tokens, and what follows asks for values"
            check(length > 2 * cfg.pairs, f"{more}, got {length}: {asks}")

    def sequences(self, training: bool, seed: tuple[int, ...]) -> ProblemSequences:
        cfg, words = self.cfg, self.dictionary
        doubling, count = (cfg.double_pairs_every, cfg.train_sequences) if training else (None, cfg.valid_sequences)
        tokens = words.nspecial, words.pad(), cfg.tokens_per_sample
        repeated = bool(cfg.repeat_sequences) or not training
        return ProblemSequences(
            self.problem, self.setting(training), *tokens, doubling, repeated, seed=seed, count=count
        )
