"""Remembers the boundaries of past conversations, to say where another one departs from them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Twice as many boundaries are remembered at most, some 90 bytes each.
_MOST: Final = 10_000


class Seen:
    """The last boundaries that were asked about, in two generations: the older one is dropped whole."""

    def __init__(self) -> None:
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def add(self, known: Sequence[bytes]) -> int:
        """Add a conversation's boundaries; return how many of its first ones were there already."""
        num = len(known)
        while num and known[num - 1] not in self._young and known[num - 1] not in self._old:
            num -= 1
        self._young.update(known[max(0, num - 1) :])
        if len(self._young) > _MOST:
            self._young, self._old = set(), self._young
        return num
