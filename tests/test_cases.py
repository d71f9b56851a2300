"""Tests of many cases: each runs with the same random numbers, a failed one is named, and FWP_CASE selects."""

import pytest
import torch
from support import pairwise
from support.pairwise import looped

SEEN = []


@looped("rule, size", [("delta", 2), ("sum", 3)])
@looped("dtype", lambda offset, size: [torch.float32, range(size + offset)])
def all_cases(rule, size, dtype):
    assert rule != "sum" or dtype == torch.float32
    SEEN.append((rule, dtype, torch.rand(1).item()))


def test_a_failed_case_is_named(capsys):
    SEEN.clear()
    with pytest.raises(AssertionError):
        all_cases(offset=1)
    assert capsys.readouterr().err == "the case: rule='sum', size=3, dtype=range(0, 4)\n"
    assert [seen[:2] for seen in SEEN] == [("delta", torch.float32), ("delta", range(3)), ("sum", torch.float32)]
    assert len({number for *_, number in SEEN}) == 1


def test_a_part_of_the_name_selects_cases(monkeypatch):
    SEEN.clear()
    monkeypatch.setattr(pairwise, "ONLY", "size=2, dtype=torch")
    all_cases(offset=1)
    assert [seen[:2] for seen in SEEN] == [("delta", torch.float32)]
    monkeypatch.setattr(pairwise, "ONLY", "size=4")
    with pytest.raises(pytest.skip.Exception, match="no case of it has FWP_CASE=size=4"):
        all_cases(offset=1)
