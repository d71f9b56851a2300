"""A few configurations that cover every pair of values, and tests that run all their cases."""

import functools
import inspect
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
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
Loop = tuple[list[str], Values]  # names of arguments, and their values
LOOPS: dict[Callable, tuple[Callable, list[Loop]]] = {}  # of each test over all cases: the test of one, and the loops
ONLY = os.environ.get("FWP_CASE", "")  # text that the name of a case must have


def looped(names: str | Sequence[str], values: Values, ids: Any = None) -> Callable[[Callable], Callable]:
    """Run a test with each of the values as one case; arguments as for pytest.mark.parametrize.

    For values that are not the subject of a test. An error prints the case; with FWP_CASE, text of that line, only the
    cases run that have it. Random numbers are the same for each.
    values: or a function that returns them, of arguments that are cases, which the test may take too.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

    def decorate(test: Callable) -> Callable:
        of_one_case, inner = LOOPS.get(test, (test, []))
        loops = [(arguments, values), *inner]
        taken = inspect.signature(of_one_case).parameters

        @functools.wraps(test)
        def over_all(**given: Any) -> None:
            own = {name: value for name, value in given.items() if name in taken}
            seeds, has_run = (random.getstate(), np.random.get_state(), torch.get_rng_state()), False
            for case in cases_of(loops, given):
                if ONLY and ONLY not in named(case):
                    continue
                random.setstate(seeds[0])
                np.random.set_state(seeds[1])
                torch.set_rng_state(seeds[2])
                try:
                    of_one_case(**own, **case)
                except BaseException:
                    print(f"the case: {named(case)}", file=sys.stderr)
                    raise
                has_run = True
            if ONLY and not has_run:
                pytest.skip(f"no case of it has FWP_CASE={ONLY}")

        of_loops = {name for names, _ in loops for name in names}
        outside = {name: parameter for name, parameter in taken.items() if name not in of_loops}
        for _, chosen in loops:
            outside |= {name: x for name, x in parameters_of(chosen).items() if name not in of_loops}
        over_all.__signature__ = inspect.signature(of_one_case).replace(parameters=list(outside.values()))
        LOOPS[over_all] = of_one_case, loops
        return over_all

    return decorate


def parameters_of(values: Values) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(values).parameters) if callable(values) else {}


def cases_of(loops: list[Loop], given: Case) -> Iterator[Case]:
    """Yield the arguments of each case; those of the last loop change fastest."""
    if not loops:
        yield {}
        return
    (names, values), *inner = loops
    for value in values(**{name: given[name] for name in parameters_of(values)}) if callable(values) else values:
        case = dict(zip(names, value if len(names) > 1 else (value,), strict=True))
        yield from (case | others for others in cases_of(inner, given | case))


def named(case: Case) -> str:
    """Return how a case is shown: functions and classes by their names, without addresses."""
    return ", ".join(f"{name}={getattr(value, '__qualname__', None) or repr(value)}" for name, value in case.items())
