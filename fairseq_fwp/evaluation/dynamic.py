"""Dynamic evaluation: after a window is scored, the weights take a step down the gradient of its loss.

Krause, Kahembwe, Murray & Renals 2018, "Dynamic Evaluation of Neural Sequence Models" (arXiv 1709.07432), and 2019,
"Dynamic Evaluation of Transformer Language Models" (arXiv 1904.08378). theta are the weights, theta_g the trained
weights, and g is the gradient of a window's mean loss:

    SGD:      theta <- theta - lr g + decay (theta_g - theta)
    RMS:      theta <- theta - lr g / (RMS + epsilon) + min(decay RMS / mean(RMS), 1) (theta_g - theta)
    RMS-sum:  theta <- theta - lr g / (sqrt(N) RMS + epsilon) + decay sqrt(N) RMS (theta_g - theta)

where RMS is the root of the mean of g^2 over N windows of the training text, read as in the evaluation.

RMS is the rule of the papers and of their code for recurrent networks (benkrause/dynamic-evaluation). mean(RMS) is over
all weights; their code averages the means of tensors. RMS-sum is the rule of their code for Transformer-XL
(benkrause/dynamiceval-transformer), which sums g^2 and never divides. The published values are for RMS-sum, with the
first 1/5000 of the windows: N = 161 of WikiText-103.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_fwp.evaluation.scoring import Scorer
from fairseq_fwp.evaluation.windows import Window
from fairseq_fwp.modules.decoding import Model

KINDS = {"sgd": "SGD", "rms": "RMS", "rms-sum": "RMS-sum"}


class Statistics(NamedTuple):
    """Statistics of N windows. rms: RMS of each learned weight, or sqrt(N) RMS for RMS-sum; windows: N."""

    rms: list[Tensor]
    windows: int


@dataclass(frozen=True)
class DynamicRule:
    """The step of dynamic evaluation: one of the equations above.

    kind: one of KINDS. windows: greatest number of windows of the training text for the statistics, None = all.
    statistics: divisors of the RMS rules, see `gather_statistics`. SGD uses neither of these nor an epsilon.
    Raises ValueError for another kind, and for a number below 0.
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
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)}")

    @property
    def needs_statistics(self) -> bool:
        return self.kind != "sgd"

    def __str__(self) -> str:
        text = KINDS[self.kind]
        if self.kind == "rms-sum":  # a mean hardly depends on the number
            text += f" of {self.statistics.windows if self.statistics else self.windows} windows"
        if self.needs_statistics:
            text += f", epsilon {self.epsilon:g}"
        return f"dynamic evaluation ({text}, lr {self.lr:g}, decay {self.decay:g})"


def learned_weights(model: Model) -> list[Tensor]:
    """Return all weights that training changes, each once."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def score_and_differentiate(scorer: Scorer, batch: list[Window], weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the log-probabilities of a batch, and the gradients of their mean loss, zero for unused weights."""
    with torch.enable_grad():
        log_probs = scorer.log_probs(batch)
        gradients = torch.autograd.grad(-log_probs.mean(), weights, materialize_grads=True)
    return log_probs.detach(), list(gradients)


def measure(scorer: Scorer, plan: Iterable[list[Window]], kind: str) -> Statistics:
    """Return the statistics of a kind of rule over a plan of N batches. Raises ValueError for an empty plan."""
    weights = learned_weights(scorer.model)
    squares, count = [torch.zeros_like(weight) for weight in weights], 0
    for count, batch in enumerate(plan, start=1):  # noqa: B007
        _, gradients = score_and_differentiate(scorer, batch, weights)
        for square, gradient in zip(squares, gradients, strict=True):
            square.addcmul_(gradient, gradient)
    if not count:
        raise ValueError("`train` must have at least one window for the statistics, got none")
    return Statistics([square.div_(count if kind == "rms" else 1).sqrt_() for square in squares], count)


class DynamicScorer:
    """A scorer of windows in order: each is scored with the weights that earlier windows have changed.

    The model's own weights change; a document starts with the trained ones. Raises ValueError if the rule lacks
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
        parts = zip(self.weights, self.trained, gradients, self.steps, self.decays, strict=True)
        with torch.no_grad():
            for weight, trained, gradient, step, decay in parts:
                back = decay * (trained - weight) if self.rule.decay else 0.0
                weight += back - step * gradient
        return log_probs

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the trained weights of the model."""
        for weight, trained in zip(self.weights, self.trained, strict=True):
            weight.copy_(trained)
