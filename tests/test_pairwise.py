"""The lists of configurations that the laws are tried with."""

from itertools import combinations

from pairwise import pairwise

FACTORS = {"a": [1, 2, 3], "b": "xyz", "c": [True, False], "d": [None, 0]}


def pairs(cases):
    return {(p, q, case[p], case[q]) for case in cases for p, q in combinations(FACTORS, 2)}


def test_every_two_values_meet_in_few_cases():
    found = pairwise(**FACTORS)
    everything = [
        dict(zip(FACTORS, (a, b, c, d), strict=True))
        for a in (1, 2, 3)
        for b in "xyz"
        for c in (True, False)
        for d in (None, 0)
    ]
    assert pairs(found) == pairs(everything) and len(found) <= 11
    assert pairwise(**FACTORS) == found


def test_nothing_is_made_that_is_not_allowed():
    found = pairwise(lambda case: not (case["a"] == 1 and case["c"]), **FACTORS)
    assert (1, True) not in {(case["a"], case["c"]) for case in found} and {case["a"] for case in found} == {1, 2, 3}


def test_one_factor_has_each_value_once():
    assert pairwise(a=[1, 2]) == [{"a": 1}, {"a": 2}]
