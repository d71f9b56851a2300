"""A few configurations that cover every pair of values."""

import functools
import inspect
import random
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import torch

Case = dict[str, Any]


def pairwise(when: Callable[[Case], bool] = lambda case: True, **factors: Sequence[Any]) -> list[Case]:
    """Return cases that cover every pair of values of two factors, among the cases that `when` allows.

    Greedy: each case is the one with most new pairs; of equals, the first in the order of the product.
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


def looped(names: str | Sequence[str], values: Sequence[Any], ids: Any = None) -> Callable[[Callable], Callable]:
    """Run a test with each of the values as one case; arguments as for pytest.mark.parametrize.

    For values that are not the subject of a test: an error names the value. Random numbers are the same for each.
    """
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def over_all(**arguments: Any) -> None:
            seeds = random.getstate(), np.random.get_state(), torch.get_rng_state()
            for value in values:
                random.setstate(seeds[0])
                np.random.set_state(seeds[1])
                torch.set_rng_state(seeds[2])
                case = dict(zip(listed, value if len(listed) > 1 else (value,), strict=True))
                try:
                    test(**arguments, **case)
                except BaseException as error:
                    if hasattr(error, "add_note"):  # Python 3.11
                        error.add_note(f"with {case}")
                    raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in listed]
        over_all.__signature__ = signature.replace(parameters=left)
        return over_all

    return decorate
