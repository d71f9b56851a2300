"""The criterion `fwp_squared_error`: half the squared distance to a one-hot vector."""

from typing import Any

from fairseq import metrics
from fairseq.criterions import FairseqCriterion, register_criterion
from torch import Tensor

# Digits that are logged and compared: a loss of 0.001 counts as solved, and smaller losses must still differ.
DIGITS = 9


@register_criterion("fwp_squared_error")
class SquaredErrorCriterion(FairseqCriterion):
    """The mean over queries of 1/2 sum_j (v*_j - v_j)^2, with v* the one-hot vector of the target.

    Schlag et al. 2021, arXiv 2102.11174, Sec. 6.1. A sample has net_input, the inputs of the model, and target (B, Q).
    A target is the index of the value that each query should retrieve, or -1 for a query that is not asked.
    """

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the sum over queries, their number, and what is logged."""
        target = sample["target"]
        retrieved = model(**sample["net_input"])
        losses = squared_errors(retrieved, target.clamp(min=0)).masked_fill(target < 0, 0)
        asked = int((target >= 0).sum())
        loss = losses.sum() if reduce else losses
        log = {"loss": losses.sum().data, "ntokens": asked, "nsentences": len(target), "sample_size": asked}
        return loss, asked, log

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the mean loss over all processes."""
        total = sum(float(log.get("loss", 0)) for log in logging_outputs)
        asked = sum(int(log.get("sample_size", 0)) for log in logging_outputs)
        metrics.log_scalar("loss", total / asked, asked, round=DIGITS)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True


def squared_errors(retrieved: Tensor, target: Tensor) -> Tensor:
    """Return 1/2 |onehot(target) - retrieved|^2: retrieved (B, Q, S), target (B, Q) -> (B, Q)."""
    index = target.unsqueeze(-1)
    error = retrieved.scatter_add(-1, index, retrieved.new_full((1,), -1).expand_as(index))
    return error.square().sum(-1) / 2
