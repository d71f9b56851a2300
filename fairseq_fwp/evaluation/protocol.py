"""Evaluation protocols: tokens read at a time, their context, a carried state and dynamic evaluation."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from fairseq_fwp.evaluation.dynamic import DynamicRule, DynamicScorer, measure
from fairseq_fwp.evaluation.scoring import Scorer, StreamScorer, WindowScorer, score
from fairseq_fwp.evaluation.windows import Text, Window, batches, document_windows
from fairseq_fwp.modules.decoding import Model, streaming
from fairseq_fwp.modules.onednn import faster_linear

logger = logging.getLogger(__name__)

# Default tokens of a batch. A CPU computes from its caches: larger batches are not faster.
TOKENS_AT_ONCE = {"cpu": 1536, "cuda": 32768}


@dataclass(frozen=True)
class Protocol:
    """An evaluation protocol: the way in which a text is scored.

    window: tokens that a window reads; context: the first of them, which it does not score;
    carry_state: a window continues from the state of the one before;
    dynamic: the rule by which weights learn from scored windows, None = they are fixed;
    warm_up: last tokens of the training text that the carried state has read where a document begins.

    Raises ValueError for an empty window, and for a context that leaves no token to score.
    """

    window: int
    context: int = 0
    carry_state: bool = False
    dynamic: DynamicRule | None = None
    warm_up: int = 0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"`window` must be at least 1, got {self.window}")
        most = 0 if self.carry_state else self.window - 1
        if not 0 <= self.context <= most:
            raise ValueError(f"`context` must be from 0 to {most}, got {self.context}: one token at least is scored")
        if self.warm_up and not self.carry_state:
            raise ValueError("`carry_state` must be on with `warm_up`, got off")

    def __str__(self) -> str:
        text = f"windows of {self.window} tokens, each after at least {self.context} given ones where the text has them"
        if self.carry_state:
            text = f"state carried over segments of {self.window} tokens"
            text += f", after the last {self.warm_up:,} tokens of the training text" if self.warm_up else ""
        elif not self.context:
            text = f"blocks of {self.window} tokens, each by itself"
        return text if self.dynamic is None else f"{text}, {self.dynamic}"

    def check(self, model: Model) -> None:
        """Raise ValueError for a model that cannot follow the protocol."""
        limit = model.max_positions()
        if self.window > limit:
            remedy = f"pass at most {limit}, or allow more by `max_target_positions`"
            expected = f"at most {limit}, the longest sample in training"
            raise ValueError(f"`window` must be {expected}, got {self.window}: {remedy}")
        decoder = streaming(model)
        if self.carry_state and not (decoder and decoder.carries_state):
            name = type(model).__name__
            raise ValueError(f"`carry_state` must be off for {name}, which has no state of constant size: leave it out")

    def plan(self, text: Text, batch_size: int | None = None) -> list[list[Window]]:
        """Return the windows of a text in batches; a batch has one window if windows depend on earlier ones."""
        if self.carry_state or self.dynamic is not None:
            batch_size = 1
        size = batch_size or max(1, TOKENS_AT_ONCE.get(text.tokens.device.type, 1) // self.window)
        return list(batches(document_windows(text, self.window, self.context), size))

    def scorer(self, model: Model, text: Text) -> Scorer:
        """Return the scorer of the windows of a plan, with fixed weights, on the model's device."""
        device = next(model.parameters()).device
        return (StreamScorer if self.carry_state else WindowScorer)(model, text.to(device))


@dataclass(frozen=True)
class Scores:
    """The result of an evaluation.

    log_probs (N,): of each token of the text, base e, float64; protocol: the one used, with its statistics;
    state_size: numbers kept of a sequence, None for a model that does not count them; seconds: of the scoring, without
    what is built and loaded at first use.
    """

    log_probs: Tensor
    protocol: Protocol
    state_size: int | None
    seconds: float

    @property
    def loss(self) -> float:
        """Mean loss of a token, base e."""
        return -float(self.log_probs.mean())

    @property
    def bits(self) -> float:
        """Mean loss of a token, base 2."""
        return self.loss / math.log(2)

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that exceeds the range of a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def evaluate(
    model: Model,
    text: Text,
    protocol: Protocol,
    train: Text | None = None,
    batch_size: int | None = None,
    progress: Callable[[list[list[Window]]], Iterable[list[Window]]] = iter,
) -> Scores:
    """Score every token of a text once by a protocol; the model's weights are the same afterwards.

    train: the training text, if a dynamic rule still needs its statistics, or for `warm_up`.
    batch_size: windows at once, if they do not depend on each other; None = a fast number.
    progress: wraps the batches to show progress; its result may have a method `log`, which gets {"tokens", "ppl"}.
    Raises ValueError for a model that cannot follow the protocol, for a training text that is missing or too short, or
    for probabilities that are not finite.
    """
    protocol.check(model)
    if protocol.warm_up > (there := 0 if train is None else len(train.tokens)):
        raise ValueError(f"`warm_up` must be at most {there:,}, the tokens of `train`, got {protocol.warm_up:,}")
    if train is not None:
        protocol = gather_statistics(model, train, protocol)
    scorer = protocol.scorer(model, text)
    if protocol.warm_up and train is not None and isinstance(scorer, StreamScorer):
        scorer.warm_up(train.inputs[len(train.inputs) - protocol.warm_up :], protocol.window)
    plan = protocol.plan(scorer.text, batch_size)
    bar = progress(plan)
    dynamic = None if protocol.dynamic is None else DynamicScorer(scorer, protocol.dynamic)
    try:
        with faster_linear():
            for batch in plan[:1]:  # builds and loads what is used for the first time
                scorer(batch[:1])
            started = time.perf_counter()
            word = model.decoder.dictionary.__getitem__
            log_probs = score(dynamic or scorer, bar, text.tokens, word, getattr(bar, "log", lambda numbers: None))
            seconds = time.perf_counter() - started
    finally:
        if dynamic is not None:
            dynamic.restore()
    decoder = streaming(model)
    state_size = None if decoder is None else decoder.state_size(protocol.window, protocol.carry_state)
    return Scores(log_probs, protocol, state_size, seconds)


def gather_statistics(model: Model, train: Text, protocol: Protocol) -> Protocol:
    """Return the protocol with the statistics of the training text, read by the protocol, if its rule needs them."""
    rule = protocol.dynamic
    if rule is None or not rule.needs_statistics or rule.statistics is not None:
        return protocol
    started, scorer = time.perf_counter(), protocol.scorer(model, train)
    statistics = measure(scorer, protocol.plan(train)[: rule.windows], rule.kind)
    seconds = time.perf_counter() - started
    logger.info("gathered statistics of %s windows of train in %.1fs", f"{statistics.windows:,}", seconds)
    return replace(protocol, dynamic=replace(rule, statistics=statistics))
