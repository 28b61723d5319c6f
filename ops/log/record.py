"""Selects the requests of sessions that can be replayed, with their results. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import structs

from turnkeep_client.messages import (
    STOPPED,
    Append,
    Close,
    Failed,
    Generate,
    Generated,
    Open,
    UnknownResult,
)
from turnkeep_client.session_log import Exchange, paired

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from turnkeep_client.messages import Request
    from turnkeep_client.session_log import SessionLog


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded sessions that can be replayed."""

    #: The exchanges to replay, by session.
    sessions: dict[str, list[Exchange]]
    #: The number of all other requests, by reason.
    left_out: dict[str, int]

    @property
    def num_requests(self) -> int:
        """The number of requests of all sessions."""
        return sum(map(len, self.sessions.values()))

    @property
    def begin(self) -> datetime:
        """The time at which the first request was stored."""
        return min(exchanges[0].asked.stored for exchanges in self.sessions.values())


def within(log: SessionLog, since: datetime | None, until: datetime | None) -> SessionLog:
    """Return the part of a session's log from before `until`; an empty log if it begins before `since`."""
    entries = [*(one.entry for one in log.asked), *(one.entry for one in log.answers)]
    if since is not None and entries and min(one.first_stored for one in entries) < since:
        return paired(log.key, [])
    return paired(log.key, [one for one in entries if until is None or one.first_stored < until])


def fold(logs: Iterable[SessionLog]) -> Recording:
    """Return the sessions and requests that can be replayed; count those that cannot, such as forks'."""
    sessions: dict[str, list[Exchange]] = {}
    left_out = Counter[str]()
    for log in logs:
        valid = sorted(log.exchanges, key=lambda one: one.asked.seq)
        left_out["not valid, or not answered"] += len(log.asked) - len(valid)
        found: list[Exchange] = []
        is_fork = False
        for one in valid:
            if isinstance(one.request, Open) and not isinstance(one.result, Failed):
                is_fork = one.request.from_ is not None
            if is_fork:
                left_out["of a fork"] += 1
            elif one.result.repeat_of is not None:
                left_out["repeated"] += 1
            elif isinstance(one.result, UnknownResult):
                left_out["of a newer version"] += 1
            elif isinstance(one.result, Failed):
                left_out["refused"] += 1
            elif not one.changes_session:
                left_out["cancelled before the first token"] += 1
            elif isinstance(one.request, Close) and not found:
                left_out["of a forgotten session"] += 1
            else:
                found.append(one._replace(request=_playable(one)))
        if found and isinstance(found[-1].request, Close):  # a replay ends all of its sessions itself
            found.pop()
        if found:
            sessions[log.key.session] = found
    return Recording(sessions, {reason: times for reason, times in left_out.items() if times})


def _playable(one: Exchange) -> Request:
    """Return the request to replay: it has the answer's seed and length, but no deadline or position."""
    request, result = one.request, one.result
    changes: dict[str, object] = {"expect_position": None}
    if isinstance(request, Append | Generate):
        changes["deadline_s"] = None
    if isinstance(request, Close):
        changes["forget"] = False  # later exchanges are compared, too
        changes["cancel"] = False  # an answer that it has ended is replayed with its length
    if isinstance(request, Generate) and isinstance(result, Generated):
        changes["seed"] = request.seed if one.seed is None else one.seed
        if result.finish_reason in STOPPED:
            changes["max_tokens"] = len(result.tokens)
            changes["min_tokens"] = min(request.min_tokens, len(result.tokens))
    return structs.replace(request, **changes)
