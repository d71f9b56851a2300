"""The task `fwp_language_modeling`: a text in contiguous streams, and states carried from segment to segment."""

import logging
import os
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Optional, TypeAlias

from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary, FairseqDataset
from fairseq.data.indexed_dataset import get_available_dataset_impl
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import FairseqLanguageModel
from fairseq.optim import FairseqOptimizer
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import II
from torch import Tensor

from fairseq_fwp.modules.decoding import Sample, streaming
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import flag, option
from fairseq_fwp.tasks.carried_state import CarriedState
from fairseq_fwp.tasks.streams import StreamIterator, Streams, warn_of_age
from fairseq_fwp.tasks.text import BLANK_LINE, JoinedLines, TextBlocks, document_starts, read_split

logger = logging.getLogger(__name__)

# The loss, its denominator and what is logged.
StepResult: TypeAlias = tuple[Tensor, int, dict[str, Any]]


@dataclass
class FwpLanguageModelingConfig(FairseqDataclass):
    """A text in streams; --batch-size is their number in each process."""

    data: Optional[str] = option(None, "folder that fairseq-preprocess --only-source has written")  # noqa: UP045
    tokens_per_sample: int = option(1024, "length of a segment in tokens, at least 1; gradients flow within a segment")
    carry_state: bool = option(False, "start each segment with the state that its stream had after the segment before")
    reset_state_after: Optional[str] = option(  # noqa: UP045  (fairseq's parser reads no other form)
        None, f"with --carry-state: symbol that ends a document, or {BLANK_LINE}; the next one starts without a state"
    )
    validate_from_training_state: bool = option(
        False, "with --carry-state: validation starts from the states that training has then, not from empty ones"
    )
    add_bos_token: bool = option(False, "read <s> instead of </s> before the first token of the text")
    max_target_positions: Optional[int] = option(  # noqa: UP045
        None, "longest segment in tokens that the model accepts; none: --tokens-per-sample"
    )
    dataset_impl: Optional[ChoiceEnum(get_available_dataset_impl())] = II(  # type: ignore[valid-type]  # noqa: UP045
        "dataset.dataset_impl"
    )


@register_task("fwp_language_modeling", dataclass=FwpLanguageModelingConfig)
class FwpLanguageModelingTask(LanguageModelingTask):
    """Language modelling by truncated back-propagation through time.

    The text is cut into blocks of --tokens-per-sample tokens. All processes together read several streams of
    consecutive blocks; step t of an epoch reads block t of every stream. Every token is a target once. With
    --carry-state a block starts from the last state of its stream, without its gradients (Schlag et al. 2021, Sec. 6.3,
    "Without truncating context"). `carried_state` gives the state to the model.
    """

    def __init__(self, args: Namespace, dictionary: Dictionary) -> None:
        super().__init__(args, dictionary)
        self.training_state = CarriedState(off=not args.carry_state)
        self.validation_state = CarriedState(off=not args.carry_state)
        self.packs_documents = False
        self.trained_segments: int | None = None  # of a stream; fairseq asks for those of training first

    @classmethod
    def setup_task(cls, args: Namespace, **kwargs: object) -> "FwpLanguageModelingTask":
        """Set up the task. Raises ValueError for impossible settings, and FileNotFoundError without a dictionary."""
        dictionary, _ = cls.setup_dictionary(Namespace(data=args.data, output_dictionary_size=-1))
        length, separator = args.tokens_per_sample, args.reset_state_after
        check(length >= 1, f"--tokens-per-sample must be at least 1, got {length}")
        for name in ("reset_state_after", "validate_from_training_state"):
            check(args.carry_state or not getattr(args, name), f"--carry-state must be on with {flag(name)}, got off")
        check(
            not (separator and args.validate_from_training_state),
            f"--reset-state-after must be left out with --validate-from-training-state, got {separator!r}",
        )
        if separator and dictionary and separator != BLANK_LINE:
            symbols = f"symbol of {os.path.join(args.data, 'dict.txt')}, {dictionary.eos_word} (the end of a line)"
            is_symbol = separator in dictionary
            check(is_symbol, f"--reset-state-after must be a {symbols} or {BLANK_LINE}, got {separator!r}")
        return cls(args, dictionary)

    def build_model(self, args: FairseqDataclass, from_checkpoint: bool = False) -> FairseqLanguageModel:
        """Build the model. Raises ValueError if it has no state to carry."""
        model = super().build_model(args, from_checkpoint)
        decoder = streaming(model)
        check(
            (decoder and decoder.carries_state) or not self.args.carry_state,
            f"--carry-state needs a model with a state of constant size, got {type(model).__name__} without one: "
            "choose an --arch with fast weights in every layer or with a memory, give softmax layers an "
            "--attention-window, or leave --carry-state out",
        )
        self.packs_documents = decoder is not None and decoder.packs_documents
        return model

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: object) -> None:
        """Load the text of a split in blocks. Raises FileNotFoundError, or ValueError for an empty text."""
        _, lines = read_split(self.args, self.dictionary, split, epoch, combine)
        text = JoinedLines(lines)
        separator = self.args.reset_state_after
        documents = document_starts(text, self.dictionary, separator) if separator else None
        if documents is not None:
            level = logging.WARNING if len(documents) == 1 else logging.INFO
            logger.log(level, f"{split}: {len(documents):,} documents that end with {separator!r}")
        self.datasets[split] = TextBlocks(
            text,
            self.dictionary,
            self.args.tokens_per_sample,
            self.dictionary.bos() if self.args.add_bos_token else self.dictionary.eos(),
            documents,
            packed=documents is not None and self.packs_documents,
        )

    def get_batch_iterator(
        self,
        dataset: FairseqDataset,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        max_positions: int | None = None,
        num_shards: int = 1,
        shard_id: int = 0,
        **options: object,
    ) -> EpochBatchIterator:
        """Return the streams of process shard_id in their order; fairseq's shuffling and filters have no effect.

        Raises ValueError without a number of streams, and for segments longer than the model allows.
        """
        if not isinstance(dataset, TextBlocks):  # prompts for generation
            return super().get_batch_iterator(
                dataset, max_tokens, max_sentences, max_positions, num_shards=num_shards, shard_id=shard_id, **options
            )
        use_cache = not options.get("disable_iterator_cache", False)
        if use_cache and dataset in self.dataset_to_epoch_iter:
            return self.dataset_to_epoch_iter[dataset]
        length = self.args.tokens_per_sample
        check(
            max_positions is None or length <= max_positions,
            f"--tokens-per-sample must be at most {max_positions}, as in training, got {length}: give "
            f"--max-target-positions {length} to allow more",
        )
        batch_size = self._batch_size(max_tokens, max_sentences)
        separator, packed = self.args.reset_state_after, dataset.documents is not None
        iterator = StreamIterator(
            Streams(dataset, batch_size, num_shards, shard_id),
            # fairseq saves and loads only the iterator over the training text.
            self.training_state,
            {
                "processes": num_shards,
                "--batch-size": batch_size,
                "--tokens-per-sample": length,
                "--carry-state": self.args.carry_state,
                # It decides where segments are cut.
                "--reset-state-after": f"{separator} within segments" if packed else separator,
                "tokens of text": len(dataset.text),
            },
            shard_id,
            num_workers=options.get("num_workers", 0),
            epoch=options.get("epoch", 1),
            buffer_size=options.get("data_buffer_size", 0),
            skip_remainder_batch=options.get("skip_remainder_batch", False),
        )
        tokens, streams, segments = len(dataset.text), batch_size * num_shards, len(iterator)
        logger.info(f"{tokens:,} tokens: {streams} streams of {segments} segments, {batch_size} in this process")
        self.trained_segments = self.trained_segments or segments
        self._warn_of_age(streams, segments, self.trained_segments)
        if use_cache:
            self.dataset_to_epoch_iter[dataset] = iterator
        return iterator

    def _warn_of_age(self, streams: int, segments: int, trained: int) -> None:
        """Warn where no state is carried, or where one is far older than in training."""
        length = self.args.tokens_per_sample
        if self.args.carry_state and segments == 1:
            logger.warning(
                f"no state is carried, because {streams} streams have at most one segment of {length} tokens each: "
                "give a smaller --batch-size or --tokens-per-sample"
            )
        if self.args.carry_state and not self.args.reset_state_after:
            warn_of_age(segments * length, trained * length, "give a larger --batch-size-valid")

    def _batch_size(self, max_tokens: int | None, max_sentences: int | None) -> int:
        """Return the number of streams in a process."""
        length = self.args.tokens_per_sample
        limit_of_tokens = None if max_tokens is None else max_tokens // length
        limits = [limit for limit in (max_sentences, limit_of_tokens) if limit is not None]
        check(limits, "--batch-size must be the number of streams that a process reads in parallel, got none")
        requirement = f"--batch-size and --max-tokens must allow one stream of {length} tokens (--tokens-per-sample)"
        check(min(limits) >= 1, f"{requirement}, got {max_sentences} and {max_tokens}")
        return min(limits)

    def eval_lm_dataloader(
        self, dataset: FairseqDataset, *args: object, context_window: int = 0, **kwargs: object
    ) -> EpochBatchIterator:
        """Return fairseq's batches. Raises ValueError for a carried state and a context window."""
        check(
            not (self.args.carry_state or context_window),
            "fairseq-eval-lm cannot carry a state or use a context window with this task: use fwp-eval-lm, or "
            "fairseq-validate for a carried state and --task language_modeling for a window",
        )
        return super().eval_lm_dataloader(dataset, *args, **kwargs)

    def train_step(self, sample: Sample, model: FairseqLanguageModel, *args: object, **kwargs: object) -> StepResult:
        with self.training_state.given_to(model, sample) as sample:
            return super().train_step(sample, model, *args, **kwargs)

    def optimizer_step(self, optimizer: FairseqOptimizer, model: FairseqLanguageModel, update_num: int) -> None:
        super().optimizer_step(optimizer, model, update_num)
        self.training_state.end_update()

    def valid_step(self, sample: Sample, model: FairseqLanguageModel, criterion: FairseqCriterion) -> StepResult:
        if self.args.validate_from_training_state and sample.get("segment") == 0:
            self.validation_state, sample = self.training_state.continue_with(sample)
        with self.validation_state.given_to(model, sample) as sample:
            result = super().valid_step(sample, model, criterion)
        if sample.get("last"):
            self.validation_state = CarriedState(off=not self.args.carry_state)  # its memory is for training
        return result
