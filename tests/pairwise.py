"""Few configurations that still try every two values together."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairwise(when: Callable[[Case], bool] = lambda case: True, **factors: Sequence[Any]) -> list[Case]:
    """Return cases in which every pair of values of two factors occurs that occurs in any case that `when` allows.

    Greedy: each case is the one with most pairs that are new, of equals the first in the order of the product.
    """
    names = list(factors)
    cases = [values for values in product(*factors.values()) if when(dict(zip(names, values, strict=True)))]
    indexed = [{(i, j, repr(case[i]), repr(case[j])) for i, j in combinations(range(len(names)), 2)} for case in cases]
    if len(names) == 1:
        return [{names[0]: case[0]} for case in cases]
    left, chosen = set().union(*indexed), []
    while left:
        best = max(range(len(cases)), key=lambda i: len(indexed[i] & left))
        left -= indexed[best]
        chosen.append(dict(zip(names, cases[best], strict=True)))
    return chosen
