"""Half the squared distance to a one-hot vector, over the queries that are asked."""

import pytest
import torch
import torch.nn.functional as F
from fairseq import metrics

from fairseq_fwp.criterions.fwp_squared_error import SquaredErrorCriterion, squared_errors


def test_errors_are_those_of_one_hot_vectors():
    retrieved = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)
    target = torch.randint(7, (3, 4))
    expected = ((F.one_hot(target, 7) - retrieved) ** 2 / 2).sum(-1)
    found = squared_errors(retrieved, target)
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn(3, 4).double()
    grads = [torch.autograd.grad((x * cotangent).sum(), retrieved)[0] for x in (found, expected)]
    torch.testing.assert_close(*grads)


def test_queries_that_are_not_asked_count_nothing():
    retrieved = torch.randn(2, 3, 5)
    sample = {"net_input": {"x": retrieved}, "target": torch.tensor([[1, -1, 0], [4, 2, -1]])}
    loss, asked, log = SquaredErrorCriterion(None)(lambda x: x, sample)
    rows, columns = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 2, 0, 1])
    expected = squared_errors(retrieved[rows, columns].unsqueeze(0), torch.tensor([[1, 0, 4, 2]])).sum()
    assert asked == log["sample_size"] == 4
    assert loss.item() == log["loss"].item() == pytest.approx(expected.item())


def test_the_mean_is_over_queries_of_all_processes():
    logs = [{"loss": 3.0, "sample_size": 4}, {"loss": 1.0, "sample_size": 1}]
    with metrics.aggregate(new_root=True) as log:
        SquaredErrorCriterion.reduce_metrics(logs)
    assert log.get_smoothed_values()["loss"] == pytest.approx(4 / 5)
