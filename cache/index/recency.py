"""Numbers in the order of their last use: a list that is linked in two arrays. Pure."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: So many are compared with the list at once in less time than they are moved one by one.
_MANY: Final = 24


class Recency:
    """Numbers from 0 on, each at most once, least recently used first. 8 bytes for each."""

    def __init__(self, order: Sequence[int]) -> None:
        """`order` has each of the numbers below its length."""
        import numpy as np  # here, because a command line that is asked for help has no time for it

        # Place 0 stands before the first and behind the last; number n has place n + 1.
        places = np.pad(np.array(order, np.uint32) + 1, 1)
        links = np.zeros((2, len(order) + 1), np.uint32)
        links[0, places[1:]], links[1, places[:-1]] = places[:-1], places[1:]
        self._before, self._behind = (array("I", side.tobytes()) for side in links)

    def __iter__(self) -> Iterator[int]:
        place = self._behind[0]
        while place:
            yield place - 1
            place = self._behind[place]

    def add(self, number: int, before: int | None = None) -> None:
        """Take in a number that is not there, as the most recently used one or just before another."""
        place, behind = number + 1, 0 if before is None else before + 1
        while len(self._before) <= place:
            self._before.append(0)
            self._behind.append(0)
        last = self._before[behind]
        self._before[place], self._behind[place] = last, behind
        self._behind[last] = self._before[behind] = place

    def use(self, numbers: Sequence[int]) -> None:
        """Note that numbers were used now, one after the other."""
        if self._are_in_a_row(numbers):
            self._move(numbers[0] + 1, numbers[-1] + 1)
        else:
            for number in numbers:
                self._move(number + 1, number + 1)

    def _are_in_a_row(self, numbers: Sequence[int]) -> bool:
        """Say whether numbers stand behind one another: a long chain that was last used as a whole."""
        if len(numbers) < _MANY:
            return False
        import numpy as np  # here, because a command line that is asked for help has no time for it

        places = np.array(numbers, np.uint32) + 1
        return bool((np.frombuffer(self._behind, np.uint32)[places[:-1]] == places[1:]).all())

    def _move(self, first: int, end: int) -> None:
        """Take the places from `first` to `end` out of the list, and put them back as the last ones."""
        before, behind = self._before, self._behind
        one, other = before[first], behind[end]
        behind[one], before[other] = other, one
        last = before[0]
        before[first], behind[end] = last, 0
        behind[last], before[0] = first, end

    def remove(self, number: int) -> None:
        """Forget a number."""
        one, other = self._before[number + 1], self._behind[number + 1]
        self._behind[one], self._before[other] = other, one
