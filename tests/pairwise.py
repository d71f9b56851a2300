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


Values = Sequence[Any] | Callable[..., Sequence[Any]]


def looped(names: str | Sequence[str], values: Values, ids: Any = None) -> Callable[[Callable], Callable]:
    """Run a test with each of the values as one case; arguments as for pytest.mark.parametrize.

    For values that are not the subject of a test: an error names the value. Random numbers are the same for each.
    values: or a function that returns them, of arguments that are cases, which the test may take too.
    """
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    asked = dict(inspect.signature(values).parameters) if callable(values) else {}

    def decorate(test: Callable) -> Callable:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def over_all(**arguments: Any) -> None:
            seeds = random.getstate(), np.random.get_state(), torch.get_rng_state()
            given = {name: value for name, value in arguments.items() if name in signature.parameters}
            for value in values(**{name: arguments[name] for name in asked}) if callable(values) else values:
                random.setstate(seeds[0])
                np.random.set_state(seeds[1])
                torch.set_rng_state(seeds[2])
                case = dict(zip(listed, value if len(listed) > 1 else (value,), strict=True))
                try:
                    test(**given, **case)
                except BaseException as error:
                    if hasattr(error, "add_note"):  # Python 3.11
                        error.add_note(f"with {case}")
                    raise

        taken = {name: parameter for name, parameter in signature.parameters.items() if name not in listed}
        over_all.__signature__ = signature.replace(parameters=list((taken | asked).values()))
        return over_all

    return decorate
