"""Scorers: each returns the log-probabilities (base e) of the tokens that a batch of windows scores.

The windows of a batch are consecutive and of one shape; the log-probabilities are in the text's order.
Shapes: B windows of a batch, n tokens that each scores.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fairseq_fwp.evaluation.windows import Text, Window
from fairseq_fwp.modules.decoding import Model, State, streaming


class Scorer:
    """A scorer of batches of windows of a text with a model, in evaluation mode."""

    def __init__(self, model: Model, text: Text) -> None:
        self.model = model.eval()
        self.streaming = streaming(model)
        self.text = text
        self.starts = frozenset(text.starts)

    @torch.no_grad()
    def __call__(self, batch: list[Window]) -> Tensor:
        return self.log_probs(batch)

    def log_probs(self, batch: list[Window]) -> Tensor:
        """Return the log-probabilities (B n,), with a graph where gradients are enabled."""
        raise NotImplementedError

    def starts_document(self, batch: list[Window]) -> bool:
        """Return whether a document starts with the batch, so that the state must be empty."""
        return batch[0].first in self.starts


class WindowScorer(Scorer):
    """A scorer that reads each window by itself, as if nothing had come before it."""

    def log_probs(self, batch: list[Window]) -> Tensor:
        inputs = torch.stack([self.text.inputs[window.start : window.end] for window in batch])
        tokens = torch.stack([self.text.tokens[window.first : window.end] for window in batch])
        scored = tokens.shape[1]
        if self.streaming is None:
            output = self.model.decoder(inputs)[0][:, -scored:]
            log_probs = self.model.get_normalized_probs((output, None), log_probs=True, sample={"target": tokens})
            return log_probs.gather(-1, tokens.unsqueeze(-1)).flatten()
        features, _ = self.streaming.extract_features(inputs, last=scored)
        output = self.streaming.output_layer(features)
        return self.streaming.adaptive_softmax.target_log_prob(output, tokens).flatten()


class StreamScorer(Scorer):
    """A scorer that reads windows one after the other, each from the state that the one before it left.

    A document starts without a state, or with that of `warm_up`. Raises ValueError for a model that does not continue
    from a state.
    """

    def __init__(self, model: Model, text: Text) -> None:
        super().__init__(model, text)
        if self.streaming is None:
            raise ValueError(f"the model must continue from a state, got {type(model).__name__}")
        self.decoder = self.streaming
        self.start: State | None = None
        self.state: State | None = None
        self.read = 0

    @torch.no_grad()
    def warm_up(self, inputs: Tensor, window: int) -> None:
        """Read inputs (N,), by windows, without scores: from now on a document starts with the state after them."""
        for part in inputs.to(self.text.inputs.device).split(window):
            _, self.start = self.decoder.extract_features(part.unsqueeze(0), self.start, last=1)

    def log_probs(self, batch: list[Window]) -> Tensor:
        """Return the window's log-probabilities (n,); gradients do not flow into the windows before it."""
        (window,) = batch
        if self.starts_document(batch):
            self.state, self.read = self.start, window.first
        if not self.read == window.start == window.first:
            raise ValueError(f"the next window must begin after the {self.read} tokens read, got {window}")
        read = slice(window.start, window.end)
        output, extra = self.decoder(self.text.inputs[read].unsqueeze(0), state=self.state)
        self.state, self.read = extra["state"].detach(), window.end
        return self.decoder.adaptive_softmax.target_log_prob(output, self.text.tokens[read].unsqueeze(0)).flatten()


def score(
    scorer: Callable[[list[Window]], Tensor],
    plan: Iterable[list[Window]],
    tokens: Tensor,
    word: Callable[[int], str] = str,
    report: Callable[[dict[str, float]], None] = lambda numbers: None,
) -> Tensor:
    """Return the log-probabilities (N,), float64, of the tokens (N,) of a text.

    word: the name of a token, for an error. report gets {"tokens", "ppl"}, the perplexity so far, after each batch of
    the plan. Raises RuntimeError unless the plan scores every token once, ValueError at a log-probability that is not
    finite.
    """
    length = len(tokens)
    log_probs = torch.zeros(length, dtype=torch.float64)
    times = torch.zeros(length, dtype=torch.int64)
    total = 0.0
    for batch in plan:
        scored = slice(batch[0].first, batch[-1].end)
        log_probs[scored] = scorer(batch).double().cpu()
        times[scored] += 1
        total += float(log_probs[scored].sum())
        if not math.isfinite(total):
            first = scored.start + int(log_probs[scored].isfinite().logical_not().nonzero()[0])
            token = f"{log_probs[first].exp():g} for the token {word(int(tokens[first]))!r}"
            raise ValueError(
                f"probabilities must be above 0, got {token}: the model diverged or overflows, or its vocabulary lacks "
                "this word (in a converted model perhaps the end of a line)"
            )
        report({"tokens": scored.stop, "ppl": math.exp(min(-total / scored.stop, 100))})
    if wrong := int(times.ne(1).sum()):
        raise RuntimeError(f"every token must be scored exactly once, got {wrong:,} of {length:,} that were not")
    return log_probs


def kl_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the sum over rows of KL(teacher | student), of log-probabilities (N, V).

    Raises ValueError for a student without some of the teacher's words: its divergence is infinite.
    """
    # Entries without a word have probability 0 in both, and 0 log 0 would be NaN.
    divergence = torch.where(teacher.isneginf(), 0, teacher.exp() * (teacher - student)).sum()
    if divergence.isinf():
        raise ValueError(
            "the model must give a probability to every word that its teacher predicts, got 0 for some: choose a "
            "teacher with the words of the model, or another --criterion"
        )
    return divergence
