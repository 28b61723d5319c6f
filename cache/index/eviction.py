"""Which snapshots go when room is needed: leaves first, least recently used first. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Candidate(Protocol):
    """What the choice needs to know of a snapshot."""

    @property
    def digest(self) -> bytes:
        """Its name."""

    @property
    def parent(self) -> bytes:
        """The name of the prefix that it continues."""

    @property
    def size_bytes(self) -> int:
        """What its removal frees."""

    @property
    def held(self) -> bool:
        """Whether it must stay for now: being written, or being loaded."""


C = TypeVar("C", bound=Candidate)


def choose(
    candidates: Iterable[C], num_children: Callable[[bytes], int], *, need_bytes: int, limit: int
) -> list[C]:
    """Choose at most `limit` victims that free `need_bytes` together.

    `candidates` come least recently used first and every child before its parent; then one pass finds
    the leaves in order, and a parent becomes a leaf before it is reached. Nothing is given up in vain:
    where all that may go is too little, the answer is empty. Where only `limit` stands in the way, the
    answer holds `limit` victims, and a later call goes on.
    """
    victims: list[C] = []
    gone: Counter[bytes] = Counter()
    for candidate in candidates:
        if need_bytes <= 0 or len(victims) == limit:
            return victims
        if candidate.held or num_children(candidate.digest) > gone[candidate.digest]:
            continue
        victims.append(candidate)
        gone[candidate.parent] += 1
        need_bytes -= candidate.size_bytes
    return victims if need_bytes <= 0 or len(victims) == limit else []
