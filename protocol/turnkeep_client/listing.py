"""Lists a tenant's sessions from the last parts of their logs. Pure."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003  # msgspec reads the annotations
from typing import TYPE_CHECKING

from msgspec import Struct

from .messages import Closed
from .session_log import last_change

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .session_log import SessionLog


class Listed(Struct, frozen=True, kw_only=True):
    """A session in the log. `position` is the number of its tokens, None before the first result.

    `last` is the time of its last request or result; `is_waiting` while its last request has no result.
    """

    name: str
    position: int | None
    last: datetime
    is_waiting: bool
    is_closed: bool


def listed(logs: Iterable[SessionLog]) -> list[Listed]:
    """Make the list of sessions, most recently used first, from parts of their logs that are enough."""
    return sorted(map(_one, logs), key=lambda one: one.last, reverse=True)


def is_enough(log: SessionLog) -> bool:
    """Say whether a last part of a session's log shows its state; if not, a longer one may.

    A refused or repeated request says nothing of the session, and a request that was cancelled while it
    waited has its result before the requests that came before it.
    """
    if not log.answers:
        return True
    is_read_since = not log.asked or log.start <= log.asked[-1].entry.seq or not _is_waiting(log)
    return last_change(log) is not None and is_read_since


def _one(log: SessionLog) -> Listed:
    valid = [one for one in log.answers if one.result]
    last = last_change(log) or (valid[-1] if valid else None)
    state = last.result if last else None
    stored = [*(one.entry.stored for one in log.asked[-1:]), *(one.entry.stored for one in log.answers[-1:])]
    return Listed(
        name=log.key.session,
        position=None if state is None else state.position,
        last=max(stored),
        is_waiting=_is_waiting(log),
        is_closed=isinstance(state, Closed),
    )


def _is_waiting(log: SessionLog) -> bool:
    return bool(log.waiting) and log.waiting[-1] is log.asked[-1]
