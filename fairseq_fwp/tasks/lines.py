"""The task `fwp_lines`: each line of a text is a sample by itself, such as a sentence, a molecule or a protein."""

from argparse import ArgumentTypeError, Namespace
from copy import copy
from dataclasses import dataclass
from typing import Optional, TypeAlias

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, MonolingualDataset
from fairseq.data.indexed_dataset import get_available_dataset_impl
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models import FairseqLanguageModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import II
from torch import Tensor
from torch.utils.data import Subset

from fairseq_fwp.modules.decoding import END, STARTS, Beginning, Sample
from fairseq_fwp.ops.checks import check
from fairseq_fwp.patches.options import Settings, option, setting
from fairseq_fwp.tasks.text import read_split

LINES = "fwp_lines"

# What a generator writes after each prompt of a batch, best first.
Hypotheses: TypeAlias = list[list[Settings]]


def line_start(text: str) -> str:
    """Read a value of --line-start from the command line."""
    if text not in STARTS:
        raise ArgumentTypeError(f"it must be {' or '.join(STARTS)}, got {text!r}")
    return text


@dataclass
class FwpLinesConfig(FairseqDataclass):
    """A text whose lines are samples; fairseq shuffles them, and pads those of a batch."""

    data: Optional[str] = option(None, "folder that fairseq-preprocess --only-source has written")  # noqa: UP045
    line_start: ChoiceEnum([*STARTS]) = option(  # type: ignore[valid-type]
        END, "what the model reads first: </s> (end), or the line's first word (word), which then is not predicted"
    )
    tokens_per_sample: int = option(1024, "longest line that is accepted, in tokens that the model reads")
    add_bos_token: bool = option(False, "with --line-start end: the model reads <s> first, not </s>")
    max_target_positions: Optional[int] = option(  # noqa: UP045
        None, "longest line in tokens that the model accepts; none: --tokens-per-sample"
    )
    dataset_impl: Optional[ChoiceEnum(get_available_dataset_impl())] = II(  # type: ignore[valid-type]  # noqa: UP045
        "dataset.dataset_impl"
    )


class Lines(MonolingualDataset):
    """The lines of an indexed data set, each with </s> at its end. Those in which nothing is predicted are left out.

    first: the token that is read before each line, None = the line's first word. Their order is random, by length.
    """

    def __init__(self, lines: FairseqDataset, first: int | None, dictionary: Dictionary) -> None:
        targets = np.asarray(lines.sizes) - (first is None)
        self.first, self.places = first, np.flatnonzero(targets)
        kept = Subset(lines, self.places)  # type: ignore[arg-type]  # an array of integers will do
        super().__init__(kept, targets[self.places], dictionary, shuffle=True)

    def __getitem__(self, index: int) -> Sample:
        """Return {"id", "source" (L,), "target" (L,)}."""
        tokens = self.dataset[index].long()
        if self.first is not None:
            tokens = torch.cat([tokens.new_tensor([self.first]), tokens])
        return {"id": int(index), "source": tokens[:-1], "target": tokens[1:]}


@register_task(LINES, dataclass=FwpLinesConfig)
class FwpLinesTask(LanguageModelingTask):
    """Language modelling of separate lines, which end with </s>.

    A model that somebody else has pretrained on separate sequences may never have read </s> in front of one. Then
    --line-start word gives it each sequence as it was trained: from its own first word, at the first position.
    """

    prefix_size: int = 0  # of the generator that was built last

    @classmethod
    def setup_task(cls, args: Namespace, **kwargs: object) -> "FwpLinesTask":
        """Set up the task. Raises ValueError for impossible settings, and FileNotFoundError without a dictionary."""
        dictionary, _ = cls.setup_dictionary(Namespace(data=args.data, output_dictionary_size=-1))
        length = args.tokens_per_sample
        check(length >= 1, f"--tokens-per-sample must be at least 1, got {length}")
        check(
            not args.add_bos_token or args.line_start == END,
            f"--line-start must be {END} with --add-bos-token, got {args.line_start}",
        )
        return cls(args, dictionary)

    @property
    def first_token(self) -> int | None:
        """The token that the model reads before each line, None = the line's first word."""
        return Beginning.of(self.dictionary, self.args.line_start, self.args.add_bos_token).first

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: object) -> None:
        """Load the lines of a split. Raises FileNotFoundError, or ValueError for a line too long, or without lines."""
        path, text = read_split(self.args, self.dictionary, split, epoch, combine)
        lines = Lines(text, self.first_token, self.dictionary)
        check(len(lines), f"{path}.bin must hold a line of words, got none")
        limit = min(self.args.tokens_per_sample, self.args.max_target_positions or self.args.tokens_per_sample)
        longest = int(lines.sizes.argmax())
        check(
            lines.sizes[longest] <= limit,
            f"lines of {path}.bin must have at most {limit} tokens (--tokens-per-sample), got {lines.sizes[longest]} "
            f"in line {lines.places[longest] + 1}: give a larger limit, or shorten the lines before fairseq-preprocess",
        )
        self.datasets[split] = lines

    def eval_lm_dataloader(
        self, dataset: FairseqDataset, *args: object, context_window: int = 0, **kwargs: object
    ) -> EpochBatchIterator:
        """Return fairseq's batches. Raises ValueError for a context window, which would be words of other lines."""
        check(not context_window, f"--context-window must be 0 with the task {LINES}, got {context_window}")
        return super().eval_lm_dataloader(dataset, *args, **kwargs)

    def build_generator(
        self, models: list[FairseqLanguageModel], args: GenerationConfig, *more: object, **named: object
    ) -> SequenceGenerator | SequenceScorer:
        """Return fairseq's generator, or its scorer for --score-reference; args: the settings of generation."""
        self.prefix_size = setting(args, "prefix_size", 0)
        return super().build_generator(models, args, *more, **named)

    def inference_step(
        self,
        generator: SequenceGenerator | SequenceScorer,
        models: list[FairseqLanguageModel],
        sample: Sample,
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
    ) -> Hypotheses:
        """Continue the beginning of a line, or score it. Raises ValueError for one without a word to begin with."""
        ended = None
        if prefix_tokens is not None and self.prefix_size:  # fairseq-generate cuts them off the targets of lines
            read = sample["net_input"]["src_tokens"][:, :1] if self.first_token is None else prefix_tokens[:, :0]
            prefix_tokens = torch.cat([read, prefix_tokens], 1)[:, : self.prefix_size]
            ended = prefix_tokens.eq(self.dictionary.eos()).any(1)
        if isinstance(generator, SequenceScorer):
            inside = sample["net_input"]["src_tokens"][:, 1:].eq(self.dictionary.eos())
            check(
                not inside.any(),
                "a line to score must have its end last, got words after it: score each line by itself",
            )
        if prefix_tokens is not None and ended is not None and ended.any():
            hypotheses = self._without_whole_lines(generator, models, sample, prefix_tokens, ended)
        else:
            hypotheses = self._continue(generator, models, sample, prefix_tokens, constraints)
        self._show_whole_lines(sample)
        return hypotheses

    def _show_whole_lines(self, sample: Sample) -> None:
        """Put first words, which are only read, into the targets with which fairseq-generate compares hypotheses."""
        read, targets = sample["net_input"]["src_tokens"], sample.get("target")
        if self.first_token is None and targets is not None and targets.shape == read.shape:
            sample["target"] = torch.cat([read[:, :1], targets], 1)

    def _without_whole_lines(
        self,
        generator: SequenceGenerator | SequenceScorer,
        models: list[FairseqLanguageModel],
        sample: Sample,
        prefix_tokens: Tensor,
        ended: Tensor,
    ) -> Hypotheses:
        """Continue prefixes, and score those that are whole lines, where ended (B,) is True: fairseq's beams fail."""
        hypotheses: Hypotheses = [[] for _ in ended]
        for method, rows in ((SequenceScorer(self.dictionary), ended), (generator, ~ended)):
            if rows.any():
                prompts = {name: x[rows] for name, x in sample["net_input"].items()}
                part = {"net_input": prompts, "target": sample["target"][rows]}
                found = self._continue(method, models, part, prefix_tokens[rows])
                for row, of_row in zip(rows.nonzero().flatten().tolist(), found, strict=True):
                    hypotheses[row] = of_row
        return hypotheses

    def _continue(
        self,
        generator: SequenceGenerator | SequenceScorer,
        models: list[FairseqLanguageModel],
        sample: Sample,
        prefix_tokens: Tensor | None,
        constraints: Tensor | None = None,
    ) -> Hypotheses:
        if self.first_token is not None:
            hypotheses: Hypotheses = super().inference_step(generator, models, sample, prefix_tokens, constraints)
            return hypotheses
        prompts, lengths = (sample["net_input"][name] for name in ("src_tokens", "src_lengths"))
        if prompts[:, 0].eq(self.dictionary.eos()).all():  # fairseq puts </s> in front of prompts, not of lines
            check(bool((lengths > 1).all()), "a line must begin with a word, got none: the model cannot begin one")
            prompts, lengths = prompts[:, 1:], lengths - 1
            sample = {**sample, "net_input": {"src_tokens": prompts, "src_lengths": lengths}}
            if sample.get("target") is not None:
                sample["target"] = sample["target"][:, 1:]
        if isinstance(generator, SequenceScorer):
            hypotheses = super().inference_step(generator, models, sample, prefix_tokens, constraints)
            return _after_first_word(prompts[:, 0], hypotheses)
        return super().inference_step(_FromFirstWord(generator), models, sample, prefix_tokens, constraints)


class _FromFirstWord:
    """A generator that reads the first word of each prompt in place of </s>."""

    def __init__(self, generator: SequenceGenerator) -> None:
        self.generator = generator

    def __getattr__(self, name: str) -> object:
        return getattr(self.generator, name)

    def generate(
        self, models: list[FairseqLanguageModel], sample: Sample, prefix_tokens: Tensor, bos_token: int
    ) -> Hypotheses:
        """Return fairseq's hypotheses, each with its prompt; the first word has the score 0."""
        first, prefix = prefix_tokens[:, 0], prefix_tokens[:, 1:] if prefix_tokens.shape[1] > 1 else None
        beams = first.repeat_interleave(self.generator.beam_size)
        generator = copy(self.generator)  # which counts the words of a line from the second one on
        generator.min_len, generator.max_len_b = max(generator.min_len - 1, 0), max(generator.max_len_b - 1, 0)
        hypotheses: Hypotheses = generator.generate(models, sample, prefix_tokens=prefix, bos_token=beams)
        return _after_first_word(first, hypotheses)


def _after_first_word(first: Tensor, hypotheses: Hypotheses) -> Hypotheses:
    """Put the first word (B,) of each line, which was read and not predicted, in front of its hypotheses."""
    for word, of_prompt in zip(first, hypotheses, strict=True):
        for hypothesis in of_prompt:
            scores = hypothesis["positional_scores"]
            hypothesis["tokens"] = torch.cat([word.unsqueeze(0), hypothesis["tokens"]])
            hypothesis["positional_scores"] = torch.cat([scores.new_zeros(1), scores])
    return hypotheses
