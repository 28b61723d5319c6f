"""Remembers the boundaries of past conversations, to find where a new one differs from them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Boundaries of one generation, some 90 bytes each; two generations are kept.
_MOST: Final = 10_000


class RecentBoundaries:
    """The boundaries of recent conversations: digests of a conversation up to each of its messages.

    They are kept in two generations; the older one is dropped as a whole.
    """

    def __init__(self) -> None:
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def add(self, known: Sequence[bytes]) -> int:
        """Add a conversation's boundaries; return how many of them, from the first on, were known before."""
        num = len(known)
        while num and known[num - 1] not in self._young and known[num - 1] not in self._old:
            num -= 1
        self._young.update(known[max(0, num - 1) :])
        if len(self._young) > _MOST:
            self._young, self._old = set(), self._young
        return num
