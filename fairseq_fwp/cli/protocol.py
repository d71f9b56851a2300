"""By which protocol a text is read and scored: how much at a time, with what given, carried or learned."""

import logging
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_fwp.cli.dynamic import DynamicRule, DynamicScorer
from fairseq_fwp.cli.scoring import (
    DocumentScorer,
    StreamScorer,
    Text,
    Window,
    WindowScorer,
    batches,
    document_windows,
)
from fairseq_fwp.tasks.text_blocks import BLANK_LINE

logger = logging.getLogger(__name__)


@dataclass
class Protocol:
    """size: tokens that a window reads; given: those that it does not score; carry: the state goes on to the next.

    dynamic: how the weights learn from what was scored; reset_after: what ends a document, after which all starts anew.
    """

    size: int
    given: int
    carry: bool
    dynamic: DynamicRule | None = None
    reset_after: str | None = None

    def __str__(self) -> str:
        text = f"windows of {self.size} tokens, each after at least {self.given} given ones where the text has them"
        if not self.given:
            text = f"blocks of {self.size} tokens, each by itself"
        if self.carry:
            text = f"state carried over segments of {self.size} tokens"
        if self.dynamic is not None:
            text += f", {self.dynamic}"
        return text + (f", anew after {self.reset_after}" if self.reset_after else "")


def choose_protocol(args: Namespace, model: Any, task: Any) -> Protocol:
    """The protocol that the arguments name; ValueError where the model, or the task's settings, cannot follow it."""
    limit = model.max_positions()
    size = args.tokens_per_sample or min(getattr(task, "tokens_per_sample", None) or limit, limit)
    if size > limit:
        raise ValueError(
            f"--tokens-per-sample {size} is longer than the {limit} tokens that the model was trained on: pass at most "
            f"{limit}, or allow more with --model-overrides \"{{'max_target_positions': {size}}}\""
        )
    dynamic = None
    if args.dynamic:
        given = {"lr": args.dynamic_lr, "decay": args.dynamic_decay, "epsilon": args.dynamic_epsilon}
        given["windows"] = args.dynamic_statistics
        dynamic = DynamicRule(kind=args.dynamic, **{name: value for name, value in given.items() if value is not None})
    if args.carry_state:
        check_carries(model, task, args.reset_after)
        return Protocol(size, 0, True, dynamic, args.reset_after)
    given = size - args.stride if args.context_window is None else args.context_window
    if not 0 <= given < size:
        raise ValueError(
            f"of {size} tokens (--tokens-per-sample) a window scores 1 to {size}: --stride must be in that range, "
            f"--context-window from 0 to {size - 1}"
        )
    return Protocol(size, given, False, dynamic, args.reset_after)


def check_carries(model: Any, task: Any, reset_after: str | None = None) -> None:
    """Raises ValueError for a model without a state of constant size, and where it forgets it at other documents."""
    if not getattr(model.decoder, "carries_state", False):
        raise ValueError(
            f"this {type(model).__name__} has no state of constant size to carry: evaluate it without --carry-state"
        )
    separator = getattr(task, "reset_state_after", None)
    if separator and separator != reset_after:
        raise ValueError(
            f"trained with --reset-state-after {separator}, this model is to be evaluated so too: pass --reset-after "
            f"{separator}, or leave out --carry-state"
        )


def count_state(model: Any, protocol: Protocol) -> int | None:
    """Numbers that a sequence needs kept; None for a model that does not count them."""
    return model.decoder.state_size(protocol.size, protocol.carry) if hasattr(model.decoder, "state_size") else None


def warn_of_positions(model: Any, protocol: Protocol, length: int) -> None:
    """Says so where a carried state comes with absolute positions that training has not seen."""
    if (
        protocol.carry
        and getattr(model.decoder, "embed_positions", None) is not None
        and length > model.max_positions()
    ):
        logger.warning(
            "absolute positions go on to %s, of which the model has seen %s in training: Schlag et al. 2021 carry the "
            "state of models with --no-token-positional-embeddings",
            f"{length:,}",
            f"{model.max_positions():,}",
        )


def document_starts(tokens: Tensor, dictionary: Any, separator: str | None) -> list[int]:
    """The first token of each document of a text (N,) whose documents end with the separator, or with an empty line.

    Without a separator the text is one document. Raises ValueError for one that is no symbol of the dictionary.
    """
    if separator is None:
        return [0]
    if separator != BLANK_LINE and separator not in dictionary:
        raise ValueError(f"--reset-after: {separator!r} is not in the dictionary: give a symbol of it, or {BLANK_LINE}")
    ends = tokens.eq(dictionary.eos() if separator == BLANK_LINE else dictionary.index(separator))
    if separator == BLANK_LINE:
        ends &= torch.cat([ends.new_ones(1), ends[:-1]])
    return [0, *(place + 1 for place in ends[:-1].nonzero().flatten().tolist())]


def plan_windows(starts: list[int], length: int, protocol: Protocol, batch_size: int) -> list[list[Window]]:
    """The batches of windows of a protocol; of one window each where one depends on those before it."""
    one_by_one = protocol.carry or protocol.dynamic is not None
    found = document_windows(starts, length, protocol.size, protocol.given)
    return list(batches(found, 1 if one_by_one else batch_size))


def make_scorer(model: Any, text: Text, protocol: Protocol, starts: list[int], rms: list[Tensor] | None) -> Any:
    """What scores the windows of a plan."""
    scorer: Any = (StreamScorer if protocol.carry else WindowScorer)(model, text)
    if protocol.dynamic is not None:
        scorer = DynamicScorer(scorer, protocol.dynamic, rms)
    return DocumentScorer(scorer, starts) if protocol.reset_after else scorer
