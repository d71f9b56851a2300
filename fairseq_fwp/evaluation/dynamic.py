"""Dynamic evaluation: after a window is scored, the weights take a step down the gradient of its loss.

Krause, Kahembwe, Murray & Renals 2018, "Dynamic Evaluation of Neural Sequence Models" (arXiv 1709.07432), and 2019,
"Dynamic Evaluation of Transformer Language Models" (arXiv 1904.08378). With theta the weights, theta_g the trained
ones, and g the gradient of the mean loss of the tokens that a window scores:

    SGD:      theta <- theta - lr g + decay (theta_g - theta)
    RMS:      theta <- theta - lr g / (RMS + epsilon) + min(decay RMS / mean(RMS), 1) (theta_g - theta)
    RMS-sum:  theta <- theta - lr g / (sqrt(N) RMS + epsilon) + decay sqrt(N) RMS (theta_g - theta)

where RMS is the root of the mean of g^2 over N windows of the training text, which are read as those of the evaluation.

RMS is the rule of the papers and of their code for recurrent networks (benkrause/dynamic-evaluation). mean(RMS) is over
all weights; their code averages each tensor's mean. RMS-sum is the rule of the code for Transformer-XL
(benkrause/dynamiceval-transformer), which adds up g^2 and never divides. The published values are for this rule, with
the first 5000th part of the windows: N = 161 of WikiText-103. RMS takes the same step with the rate lr / sqrt(N), the
epsilon epsilon / sqrt(N) and, where the pull is not cut off at 1, the decay sqrt(N) mean(RMS) decay.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_fwp.evaluation.scoring import Scorer
from fairseq_fwp.evaluation.windows import Window

KINDS = {"sgd": "SGD", "rms": "RMS", "rms-sum": "RMS-sum"}


class Statistics(NamedTuple):
    """rms: RMS, or for RMS-sum sqrt(N) RMS, of each learned weight; windows: N."""

    rms: list[Tensor]
    windows: int


@dataclass(frozen=True)
class DynamicRule:
    """The step above. kind: one of KINDS; windows: at most so many of the training text count, None = all there are.

    SGD uses neither these nor an epsilon. statistics: what the RMS rules divide by, see `gather_statistics`. Raises
    ValueError for another kind, and for a number below 0.
    """

    lr: float
    decay: float = 0.0
    epsilon: float = 1e-5
    kind: str = "sgd"
    windows: int | None = None
    statistics: Statistics | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("lr", "decay", "epsilon"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must be 0 or more, got {getattr(self, name)}")

    @property
    def needs_statistics(self) -> bool:
        """Whether the rule divides by statistics of the training text."""
        return self.kind != "sgd"

    def __str__(self) -> str:
        text = KINDS[self.kind]
        if self.kind == "rms-sum":  # of the mean, the number hardly matters
            text += f" of {self.statistics.windows if self.statistics else self.windows} windows"
        if self.needs_statistics:
            text += f", epsilon {self.epsilon:g}"
        return f"dynamic evaluation ({text}, lr {self.lr:g}, decay {self.decay:g})"


def learned_weights(model: Any) -> list[Tensor]:
    """Return all that training changes, each once."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def score_and_differentiate(scorer: Scorer, batch: list[Window], weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the log-probabilities of a batch, and the gradients of their mean loss, zero for unused weights."""
    with torch.enable_grad():
        log_probs = scorer.log_probs(batch)
        gradients = torch.autograd.grad(-log_probs.mean(), weights, materialize_grads=True)
    return log_probs.detach(), list(gradients)


def measure(scorer: Scorer, plan: Iterable[list[Window]], kind: str) -> Statistics:
    """Return the statistics of a kind of rule over a plan of N batches. Raises ValueError for a plan without any."""
    weights = learned_weights(scorer.model)
    squares, count = [torch.zeros_like(weight) for weight in weights], 0
    for count, batch in enumerate(plan, start=1):  # noqa: B007
        _, gradients = score_and_differentiate(scorer, batch, weights)
        for square, gradient in zip(squares, gradients, strict=True):
            square.addcmul_(gradient, gradient)
    if not count:
        raise ValueError("`train` must have at least one window to gather statistics on, got none")
    return Statistics([square.div_(count if kind == "rms" else 1).sqrt_() for square in squares], count)


class DynamicScorer:
    """Scores windows one after the other, each with the weights as the ones before it left them.

    The model's own weights change; a document starts with the trained ones. Raises ValueError for a rule without the
    statistics that it needs.
    """

    def __init__(self, scorer: Scorer, rule: DynamicRule) -> None:
        if rule.needs_statistics and rule.statistics is None:
            raise ValueError(f"`train` must be given for the statistics of kind {rule.kind!r}, got None")
        self.scorer = scorer
        self.weights = learned_weights(scorer.model)
        self.trained = [weight.detach().clone() for weight in self.weights]
        self.rule = rule
        self.steps: list[Tensor | float] = [rule.lr] * len(self.weights)
        self.decays: list[Tensor | float] = [rule.decay] * len(self.weights)
        if not rule.needs_statistics or rule.statistics is None:
            return
        rms = rule.statistics.rms
        self.steps = [rule.lr / (part + rule.epsilon) for part in rms]
        if rule.decay:
            mean = sum(float(part.sum()) for part in rms) / sum(part.numel() for part in rms)
            summed = rule.kind == "rms-sum"
            self.decays = [rule.decay * part if summed else (rule.decay / mean * part).clamp(max=1) for part in rms]

    def __call__(self, batch: list[Window]) -> Tensor:
        if self.scorer.starts_document(batch):
            self.restore()
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
    def restore(self) -> None:
        """Make the model's weights the trained ones again."""
        for weight, trained in zip(self.weights, self.trained, strict=True):
            weight.copy_(trained)
