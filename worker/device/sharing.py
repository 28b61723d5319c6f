"""Lets one turn prefill a prefix that several turns share, while the other turns wait. Pure.

Device thread only. Knows which turns are under way and their progress; `acquisition` copies the KV.
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
    """The submitted turns, by session, and which of them wait for another turn's KV."""

    def __init__(self) -> None:
        self._active: dict[SessionKey, Turn] = {}
        self._following: list[_Following] = []

    @property
    def following(self) -> list[Turn]:
        """The turns that wait for another turn's KV."""
        return [one.turn for one in self._following]

    def add(self, turn: Turn) -> bool:
        """Add a turn whose `target` is set; return True if it must wait for another turn.

        The turn waits until the other one has prefilled the common prefix, without the other prompt's last
        token, which may have to wait for a batch row. No turn waits for a turn of lower priority, which other
        turns may delay.
        """
        self._active[turn.key] = turn
        leader = self.source(turn)
        if leader is None or turn.restored is not None or leader.priority < turn.priority:
            return False
        num_tokens = min(leader.context.num_common(turn.reusable), leader.target - 1)
        if num_tokens <= max(leader.num_cached, turn.num_kept):
            return False
        self._following.append(_Following(turn, leader, num_tokens))
        return True

    def remove(self, turn: Turn) -> None:
        """Remove an ended turn, whether it was waiting or not; turns that wait for it become ready."""
        if self._active.get(turn.key) is turn:
            del self._active[turn.key]
        self.stop_waiting(turn)

    def stop_waiting(self, turn: Turn) -> bool:
        """End a turn's wait for another turn; return False if it was not waiting."""
        waited = len(self._following)
        self._following = [one for one in self._following if one.turn is not turn]
        return len(self._following) < waited

    def source(self, turn: Turn) -> Turn | None:
        """Return the running turn of the session from which `turn` copies KV; None if none is running."""
        return self._active.get(turn.source) if turn.source is not None else None

    def ready(self) -> list[Turn]:
        """Remove and return the turns whose wait is over.

        The turn for which they waited has prefilled the common prefix, or has ended.
        """
        ready = [
            one
            for one in self._following
            if one.leader.num_cached >= one.num_tokens or self._active.get(one.leader.key) is not one.leader
        ]
        self._following = [one for one in self._following if one not in ready]
        return [one.turn for one in ready]
