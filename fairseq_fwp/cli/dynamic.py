"""Dynamic evaluation: after a window is scored, the weights take a step down the gradient of its loss.

Krause, Kahembwe, Murray & Renals 2018, "Dynamic Evaluation of Neural Sequence Models" (arXiv 1709.07432), and 2019,
"Dynamic Evaluation of Transformer Language Models" (arXiv 1904.08378). With theta the weights, theta_g the trained
ones, and g the gradient of the mean loss of the tokens that a window scores:

    SGD:  theta <- theta - lr g + decay (theta_g - theta)
    RMS:  theta <- theta - lr g / (RMS + epsilon) + min(decay RMS / mean(RMS), 1) (theta_g - theta)

where RMS is the root of the mean of g^2 over windows of the training text, which are read as those of the evaluation.
mean(RMS) is over all weights; the authors' first code averages each tensor's mean, their second has no such factor.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_fwp.cli.scoring import DocumentScorer, Scorer, Window


@dataclass(frozen=True)
class DynamicRule:
    """The step above: `rms` chooses the second rule, the only one with an epsilon."""

    lr: float
    decay: float = 0.0
    epsilon: float = 1e-5
    rms: bool = False

    def __str__(self) -> str:
        kind = f"RMS, epsilon {self.epsilon:g}" if self.rms else "SGD"
        return f"dynamic evaluation ({kind}, lr {self.lr:g}, decay {self.decay:g})"


def learned_weights(model: Any) -> list[Tensor]:
    """All that training changes, each once."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def score_and_differentiate(scorer: Any, batch: list[Window], weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The log-probabilities of a batch, and the gradients of their mean loss; zero where a weight has no part in it."""
    with torch.enable_grad():
        log_probs = scorer.log_probs(batch)
        gradients = torch.autograd.grad(-log_probs.mean(), weights, materialize_grads=True)
    return log_probs.detach(), list(gradients)


def gather_statistics(scorer: Scorer | DocumentScorer, plan: Iterable[list[Window]]) -> list[Tensor]:
    """RMS for each learned weight, over the batches of a plan. Raises ValueError for a plan without any."""
    weights = learned_weights(scorer.model)
    squares, count = [torch.zeros_like(weight) for weight in weights], 0
    for count, batch in enumerate(plan, start=1):  # noqa: B007
        _, gradients = score_and_differentiate(scorer, batch, weights)
        for square, gradient in zip(squares, gradients, strict=True):
            square.addcmul_(gradient, gradient)
    if not count:
        raise ValueError("no window of the training text to gather the statistics of --dynamic rms on")
    return [square.div_(count).sqrt_() for square in squares]


class DynamicScorer:
    """Scores windows one after the other, each with the weights as the ones before it left them.

    The model's own weights change. rms: what `gather_statistics` returned, for a rule that uses it.
    """

    def __init__(self, scorer: Scorer, rule: DynamicRule, rms: list[Tensor] | None = None) -> None:
        if rule.rms != (rms is not None):
            raise ValueError("the RMS rule, and it alone, needs statistics of the training text")
        self.scorer = scorer
        self.weights = learned_weights(scorer.model)
        self.trained = [weight.detach().clone() for weight in self.weights]
        self.rule = rule
        self.steps: list[Tensor | float] = [rule.lr] * len(self.weights)
        self.decays: list[Tensor | float] = [rule.decay] * len(self.weights)
        if rms is not None:
            mean = sum(float(part.sum()) for part in rms) / sum(part.numel() for part in rms)
            self.steps = [rule.lr / (part + rule.epsilon) for part in rms]
            self.decays = [(rule.decay / mean * part).clamp(max=1) if rule.decay else 0.0 for part in rms]

    def __call__(self, batch: list[Window]) -> Tensor:
        log_probs, gradients = score_and_differentiate(self.scorer, batch, self.weights)
        self._learn(gradients)
        return log_probs

    @torch.no_grad()
    def _learn(self, gradients: list[Tensor]) -> None:
        parts = zip(self.weights, self.trained, gradients, self.steps, self.decays, strict=True)
        for weight, trained, gradient, step, decay in parts:
            back = decay * (trained - weight) if self.rule.decay else 0.0
            weight += back - step * gradient

    @torch.no_grad()
    def restart(self, first: int) -> None:
        """Where token `first` starts a document: the weights are the trained ones again, and nothing was read."""
        for weight, trained in zip(self.weights, self.trained, strict=True):
            weight.copy_(trained)
        self.scorer.restart(first)
