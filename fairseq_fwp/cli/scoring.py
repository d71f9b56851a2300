"""Evaluation protocols of language models: which tokens are read before each is scored, and its log-probability.

A scorer takes a batch of windows, consecutive and of one shape, and returns the log-probabilities (base e) of the
tokens that they score, in the text's order. Shapes: N tokens of the text, B windows of a batch, L tokens that a window
reads, n that it scores.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Text(NamedTuple):
    """inputs (N,) and tokens (N,): tokens[i] is to be predicted after inputs[: i + 1], whose first ends a line."""

    inputs: Tensor
    tokens: Tensor


class Window(NamedTuple):
    """What reads inputs[start:end] and scores tokens[first:end]."""

    start: int
    first: int
    end: int


def windows(length: int, size: int, given: int) -> Iterator[Window]:
    """Windows of `size` tokens, of which `given` are read only; together they score each of `length` tokens once.

    What `fairseq-eval-lm --tokens-per-sample size --context-window given` scores: blocks of size - given tokens, after
    `given` tokens or all that there are. The blocks within the first `size` tokens are one window here, since what
    comes later changes nothing (but positions that count from the end of a sample; Schlag's public code reads them as
    one window too). given = size - 1 is the sliding window of Schlag et al. 2021, Sec. 6.3; given = 0 are blocks
    without context. Every window is read anew: from the second layer on vectors depend on where their window begins.
    """
    step = size - given
    window = Window(0, 0, min(size // step * step, length))
    while window.first < length:
        yield window
        window = Window(window.end - given, window.end, min(window.end + step, length))


def document_windows(starts: Iterable[int], length: int, size: int, given: int) -> Iterator[Window]:
    """The windows of each document of a text of `length` tokens; the documents begin with the tokens `starts`."""
    for start, end in pairwise([*starts, length]):
        for window in windows(end - start, size, given):
            yield Window(*(start + place for place in window))


def batches(found: Iterable[Window], size: int) -> Iterator[list[Window]]:
    """Up to `size` consecutive windows that read and score the same numbers of tokens."""
    for _, alike in groupby(found, lambda window: (window.end - window.start, window.end - window.first)):
        while batch := list(islice(alike, size)):
            yield batch


class Scorer:
    """Scores batches of windows of a text with a model, in evaluation mode."""

    def __init__(self, model: Any, text: Text) -> None:
        self.model = model.eval()
        self.text = text

    @torch.no_grad()
    def __call__(self, batch: list[Window]) -> Tensor:
        return self.log_probs(batch)

    def log_probs(self, batch: list[Window]) -> Tensor:
        """The same, with a graph where gradients are enabled."""
        raise NotImplementedError

    def restart(self, first: int) -> None:
        """To be called where token `first` starts a document: what was before is forgotten."""
        raise NotImplementedError


class DocumentScorer:
    """A scorer that restarts where a document does; `starts` are their first tokens, which windows begin with."""

    def __init__(self, scorer: Any, starts: Iterable[int]) -> None:
        self.scorer = scorer
        self.starts = frozenset(starts)

    @property
    def model(self) -> Any:
        """What scores."""
        return self.scorer.model

    def __call__(self, batch: list[Window]) -> Tensor:
        self._restart(batch)
        return self.scorer(batch)

    def log_probs(self, batch: list[Window]) -> Tensor:
        """The same, with a graph where gradients are enabled."""
        self._restart(batch)
        return self.scorer.log_probs(batch)

    def _restart(self, batch: list[Window]) -> None:
        if batch[0].first in self.starts:
            self.scorer.restart(batch[0].first)


class WindowScorer(Scorer):
    """Scores each window by itself, as if nothing had come before it."""

    def restart(self, first: int) -> None:
        """Nothing is remembered."""

    def log_probs(self, batch: list[Window]) -> Tensor:
        """Of the tokens that the windows score."""
        inputs = torch.stack([self.text.inputs[window.start : window.end] for window in batch])
        tokens = torch.stack([self.text.tokens[window.first : window.end] for window in batch])
        decoder, scored = self.model.decoder, tokens.shape[1]
        if "last" in inspect.signature(getattr(decoder, "extract_features", decoder.forward)).parameters:
            output = decoder.output_layer(decoder.extract_features(inputs, last=scored)[0])
        else:
            output = decoder(inputs)[0][:, -scored:]
        return target_log_prob(self.model, output, tokens).flatten()


class StreamScorer(Scorer):
    """Scores windows one after the other, each with the state that the one before it left.

    The decoder takes `state` and returns a new one as "state" in its second value.
    """

    def __init__(self, model: Any, text: Text) -> None:
        super().__init__(model, text)
        self.restart(0)

    def restart(self, first: int) -> None:
        """The next window is read without a state."""
        self.state: Any = None
        self.read = first

    def log_probs(self, batch: list[Window]) -> Tensor:
        """Of the window's tokens; gradients do not flow into the windows before it."""
        (window,) = batch
        if not self.read == window.start == window.first:
            raise ValueError(f"the state has read {self.read} tokens, which {window} does not go on from")
        read = slice(window.start, window.end)
        output, extra = self.model.decoder(self.text.inputs[read].unsqueeze(0), state=self.state)
        self.state, self.read = extra["state"].detach(), window.end
        return target_log_prob(self.model, output, self.text.tokens[read].unsqueeze(0)).flatten()


def target_log_prob(model: Any, output: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities (B, n) of tokens (B, n), from what the decoder of a fairseq model returned for them."""
    softmax: Any = getattr(model.decoder, "adaptive_softmax", None)
    if hasattr(softmax, "target_log_prob"):
        return softmax.target_log_prob(output, tokens)
    log_probs = model.get_normalized_probs((output, None), log_probs=True, sample={"target": tokens})
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def score(
    scorer: Callable[[list[Window]], Tensor],
    plan: Iterable[list[Window]],
    length: int,
    report: Callable[[dict[str, float]], None] = lambda numbers: None,
) -> Tensor:
    """The log-probabilities (N,), float64, of a text of N = length tokens; `report` gets the perplexity so far.

    Raises RuntimeError unless the plan scores every token once, ValueError at a log-probability that is not finite.
    """
    log_probs = torch.zeros(length, dtype=torch.float64)
    times = torch.zeros(length, dtype=torch.int64)
    total = 0.0
    for batch in plan:
        scored = slice(batch[0].first, batch[-1].end)
        log_probs[scored] = scorer(batch).double().cpu()
        times[scored] += 1
        total += float(log_probs[scored].sum())
        if not math.isfinite(total):
            raise ValueError(
                f"the model gives tokens {scored.start:,} to {scored.stop:,} probabilities that are not above 0: "
                "it has diverged or overflows, or its vocabulary lacks one of them (a converted one may lack line ends)"
            )
        report({"tokens": scored.stop, "ppl": math.exp(min(-total / scored.stop, 100))})
    wrong = int(times.ne(1).sum())
    if wrong:
        raise RuntimeError(f"{wrong:,} of {length:,} tokens were not scored exactly once")
    return log_probs
