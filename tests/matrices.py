"""Products of parameters: a part of them in each run, all of them in `make soak`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def thinned(*axes: Sequence[Any], strength: int = 1) -> list[Any]:
    """Return all cases of a product; those that are not needed to cover its values have the mark `soak`.

    Without the mark is each value of each axis, or with `strength` 2 each pair of values of two axes.
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
    """Return all cases; those behind the first ones have the mark `soak`."""
    return [*cases[:number], *(pytest.param(case, marks=pytest.mark.soak) for case in cases[number:])]
