"""Turns whose sessions begin with the same tokens: one turn prefills them, the others wait. Pure.

Device thread only. Knows which turns are under way and how far they are; `acquisition` copies the KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnkeep_client.subjects import SessionKey

    from .turn import Turn


@dataclass(frozen=True, slots=True)
class _Following:
    turn: Turn
    leader: Turn
    num_tokens: int


class Sharing:
    """The turns under way by session, and which of them wait."""

    def __init__(self) -> None:
        self._active: dict[SessionKey, Turn] = {}
        self._following: list[_Following] = []

    @property
    def following(self) -> list[Turn]:
        """The turns that wait."""
        return [one.turn for one in self._following]

    def add(self, turn: Turn) -> bool:
        """Add a turn whose target is known; True if it has to wait for another one.

        A turn waits for the common tokens, except the other turn's last one, which may wait for a row. It
        does not wait for a turn of lower priority, which may itself wait for others.
        """
        self._active[turn.key] = turn
        leader = self.source(turn)
        if leader is None or turn.restored is not None or leader.priority < turn.priority:
            return False
        num_tokens = min(leader.context.num_common(turn.context), leader.target - 1)
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
        """End a turn's waiting; False if it did not wait."""
        waited = len(self._following)
        self._following = [one for one in self._following if one.turn is not turn]
        return len(self._following) < waited

    def source(self, turn: Turn) -> Turn | None:
        """Return the turn under way in the session whose KV this turn is to copy."""
        return self._active.get(turn.source) if turn.source is not None else None

    def ready(self) -> list[Turn]:
        """Return, and no longer keep, the turns whose leader is far enough, or over."""
        ready = [
            one
            for one in self._following
            if one.leader.num_cached >= one.num_tokens or self._active.get(one.leader.key) is not one.leader
        ]
        self._following = [one for one in self._following if one not in ready]
        return [one.turn for one in ready]
