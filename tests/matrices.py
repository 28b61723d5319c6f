"""Makes products of test parameters: each run has some of the cases, `make soak` all."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def thinned(*axes: Sequence[Any], strength: int = 1) -> list[Any]:
    """Return all cases of a product; most have the mark `soak`, by which ordinary runs leave them out.

    The unmarked cases cover each value of each axis, or with `strength` 2 each pair of values of two axes.
    """
    cases = list(product(*(range(len(axis)) for axis in axes)))
    covers = {case: set(combinations(enumerate(case), strength)) for case in cases}
    missing = set().union(*covers.values())
    needed: set[tuple[int, ...]] = set()
    while missing:
        best = max(cases, key=lambda case: len(covers[case] & missing))
        needed.add(best)
        missing -= covers[best]
    marks = {case: () if case in needed else (pytest.mark.soak,) for case in cases}
    return [
        pytest.param(*(axis[i] for axis, i in zip(axes, case, strict=True)), marks=marks[case])
        for case in cases
    ]


def first(cases: Sequence[Any], number: int = 1) -> list[Any]:
    """Return all cases; all but the first `number` of them have the mark `soak`."""
    return [*cases[:number], *(pytest.param(case, marks=pytest.mark.soak) for case in cases[number:])]
