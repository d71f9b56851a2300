"""The task `fwp_associative_retrieval`: write pairs of keys and values, then retrieve the values of keys."""

import logging
import math
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Optional

from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II

from fairseq_fwp.options import option
from fairseq_fwp.tasks.associations import Associations, Setting

logger = logging.getLogger(__name__)


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


# What is refused below.
SMALLEST = {
    **dict.fromkeys(["num_keys", "length", "valid_length", "updates_per_epoch", "valid_sequences"], 1),
    **dict.fromkeys(["stop_loss", "stop_updates"], 0),
}


@dataclass
class Progress:
    """The progress of a training: the best loss, its update, and the last update that was evaluated."""

    best_loss: float = math.inf
    best_update: int = 0
    evaluated_update: int = 0


@register_task("fwp_associative_retrieval", dataclass=FwpAssociativeRetrievalTaskConfig)
class FwpAssociativeRetrievalTask(FairseqTask):
    """Synthetic retrieval (Schlag et al. 2021, arXiv 2102.11174, Sec. 6.1).

    No data is read: every sequence is new and generated from --seed, in training and in evaluation. An epoch is the
    training between two evaluations. The progress is saved with the checkpoint, so that an interrupted run ends at the
    same update as an uninterrupted one.
    """

    cfg: FwpAssociativeRetrievalTaskConfig

    def __init__(self, cfg: FwpAssociativeRetrievalTaskConfig) -> None:
        super().__init__(cfg)
        self.num_keys = cfg.num_keys
        self.progress = Progress()

    @classmethod
    def setup_task(cls, cfg: FwpAssociativeRetrievalTaskConfig, **kwargs: Any) -> "FwpAssociativeRetrievalTask":
        """Set up the task. Raises ValueError for settings that define no sequence."""
        for name, smallest in SMALLEST.items():
            value = getattr(cfg, name)
            if value is not None and not value >= smallest:  # NaN is an error too
                raise ValueError(f"--{name.replace('_', '-')} must be at least {smallest}, got {value}")
        task = cls(cfg)
        for flag, length in (("--length", task._length(False)), ("--valid-length", task._length(True))):
            if length > cfg.num_keys and not cfg.with_replacement:
                raise ValueError(
                    f"{flag} must be at most --num-keys = {cfg.num_keys} without --with-replacement, got {length}"
                )
        return task

    def _length(self, evaluation: bool) -> int:
        """Pairs of a sequence."""
        length = self.cfg.valid_length if evaluation else None
        if length is None:
            length = self.cfg.length
        return self.num_keys * (2 if self.cfg.with_replacement else 1) if length is None else length

    @property
    def ended(self) -> bool:
        """Return whether the loss is small enough, or has not improved for too long."""
        waited = self.progress.evaluated_update - self.progress.best_update
        return self.progress.best_loss <= self.cfg.stop_loss or 0 < self.cfg.stop_updates <= waited

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> None:
        """Load a split: "train" has infinitely many sequences with one query each; others are for evaluation."""
        training = split == "train"
        self.datasets[split] = Associations(
            Setting(self.num_keys, self._length(not training), self.cfg.with_replacement),
            (self.cfg.seed, zlib.crc32(split.encode())),
            count=None if training else self.cfg.valid_sequences,
            all_queries=not training,
        )

    def get_batch_iterator(
        self,
        dataset: Associations,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        disable_iterator_cache: bool = False,
        **options: Any,
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
            shard_id=shard_id,
            num_workers=num_workers,
            epoch=epoch,
            buffer_size=data_buffer_size,
            disable_shuffling=True,
        )
        if training:
            iterator.task = self
        if not disable_iterator_cache:
            self.dataset_to_epoch_iter[dataset] = iterator
        return iterator

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        """Set the epoch: each evaluation has other sequences."""
        for split, dataset in self.datasets.items():
            if split != "train":
                dataset.set_epoch(epoch)

    def post_validate(self, model: Any, stats: dict[str, Any], agg: Any) -> None:
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

    @property
    def source_dictionary(self) -> None:
        """None, because keys are numbers."""

    @property
    def target_dictionary(self) -> None:
        """None, because values are numbers."""


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

    def state_dict(self) -> dict[str, Any]:
        """Return fairseq's state for checkpoints, and the progress of the training."""
        return {**super().state_dict(), "progress": asdict(self.task.progress)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the progress. Raises RuntimeError for a checkpoint of another task."""
        if "progress" not in state_dict:
            raise RuntimeError(
                "the checkpoint must be of this task, got another: give --reset-dataloader to start from its model"
            )
        self.task.progress = Progress(**state_dict["progress"])
        super().load_state_dict(state_dict)
