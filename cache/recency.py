"""Numbers in the order of their last use: a list that is linked in two arrays. Pure."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Recency:
    """Numbers from 0 on, each at most once, least recently used first. 8 bytes for each."""

    def __init__(self, order: Sequence[int] = ()) -> None:
        """`order` has each of the numbers below its length."""
        # Place 0 stands before the first and behind the last; number n has place n + 1.
        self._before = array("I", bytes(4 * (len(order) + 1)))
        self._behind = array("I", self._before)
        before, behind = self._before, self._behind
        for one, next_ in pairwise((-1, *order, -1)):
            behind[one + 1], before[next_ + 1] = next_ + 1, one + 1

    def __iter__(self) -> Iterator[int]:
        place = self._behind[0]
        while place:
            yield place - 1
            place = self._behind[place]

    def add(self, number: int) -> None:
        """Take in a number that is not there, as the most recently used one."""
        while len(self._before) <= number + 1:
            self._before.append(0)
            self._behind.append(0)
        self._append(number + 1)

    def use(self, number: int) -> None:
        """Note that a number was used now."""
        self.remove(number)
        self._append(number + 1)

    def remove(self, number: int) -> None:
        """Forget a number."""
        before, behind = self._before[number + 1], self._behind[number + 1]
        self._behind[before], self._before[behind] = behind, before

    def _append(self, place: int) -> None:
        last = self._before[0]
        self._before[place], self._behind[place] = last, 0
        self._behind[last] = self._before[0] = place
