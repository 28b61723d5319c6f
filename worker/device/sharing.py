"""Turns of other sessions that begin with the same tokens: one of them reads, the others wait for it. Pure.

Belongs to the device thread. Knows which turns are under way and how far they are; what is copied, and from
where, is the device's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .turn import num_common

if TYPE_CHECKING:
    from turnkeep_client.subjects import SessionKey

    from .turn import Turn


@dataclass(frozen=True, slots=True)
class _Following:
    turn: Turn
    leader: Turn
    num_tokens: int


class Sharing:
    """The turns under way by session, and those of them that wait."""

    def __init__(self) -> None:
        self._active: dict[SessionKey, Turn] = {}
        self._following: list[_Following] = []

    @property
    def following(self) -> list[Turn]:
        """The turns that wait."""
        return [one.turn for one in self._following]

    def add(self, turn: Turn) -> bool:
        """Take in a turn whose target is known; True where it has to wait for another one.

        It waits for the tokens that both have, but not for the other's last one, which may wait for a row,
        nor for a turn of lower priority, which may wait for others.
        """
        self._active[turn.key] = turn
        leader = self.source(turn)
        if leader is None or turn.restored is not None or leader.priority < turn.priority:
            return False
        num_tokens = min(num_common(leader.context, turn.context), leader.target - 1)
        if num_tokens <= max(leader.num_cached, turn.num_kept):
            return False
        self._following.append(_Following(turn, leader, num_tokens))
        return True

    def remove(self, turn: Turn) -> None:
        """Forget a turn that is over, whether it waited or not."""
        if self._active.get(turn.key) is turn:
            del self._active[turn.key]
        self.stop_waiting(turn)

    def stop_waiting(self, turn: Turn) -> bool:
        """Let a turn wait no more; False if it did not."""
        waited = len(self._following)
        self._following = [one for one in self._following if one.turn is not turn]
        return len(self._following) < waited

    def source(self, turn: Turn) -> Turn | None:
        """Return the turn that is under way in the session from which this one is to take KV."""
        return self._active.get(turn.source) if turn.source is not None else None

    def ready(self) -> list[Turn]:
        """Let go those that need not wait any more: the other one is far enough, or over."""
        ready = [
            one
            for one in self._following
            if one.leader.num_cached >= one.num_tokens or self._active.get(one.leader.key) is not one.leader
        ]
        self._following = [one for one in self._following if one not in ready]
        return [one.turn for one in ready]
