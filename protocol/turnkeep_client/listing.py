"""Lists a tenant's sessions from the last request and the last results of each. Pure."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

from msgspec import Struct

from .errors import InvalidMessageError
from .messages import Closed, Failed, decode_result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .log import Stored
    from .messages import Result
    from .subjects import SessionKey


class Listed(Struct, frozen=True, kw_only=True):
    """A session in the log. `position` is the number of its tokens, None before the first result.

    `last` is the time of its last request or result; `is_waiting` while its last request has no result.
    """

    name: str
    position: int | None
    last: datetime
    is_waiting: bool
    is_closed: bool


def listed(
    requests: Mapping[SessionKey, Stored], results: Mapping[SessionKey, Sequence[Stored]]
) -> list[Listed]:
    """Make the list of sessions, most recently used first.

    Takes the last request of each session, and as many of its last results as `is_enough` wants.
    """
    found = [_one(key, requests.get(key), results.get(key, ())) for key in {**requests, **results}]
    return sorted(found, key=lambda one: one.last, reverse=True)


def is_enough(asked: Stored | None, results: Sequence[Stored]) -> bool:
    """Say whether a session's last results, oldest first, show its state; if not, earlier ones may.

    A refused or repeated request says nothing of the session, and a request that was cancelled while it
    waited has its result before the requests that came before it.
    """
    found = _decoded(results)
    return _last_change(found) is not None and (
        asked is None or results[0].seq < asked.seq or _is_answered(asked, found)
    )


def _one(key: SessionKey, asked: Stored | None, results: Sequence[Stored]) -> Listed:
    found = _decoded(results)
    state = _last_change(found) or (found[-1] if found else None)
    last = max(one.headers["Nats-Time-Stamp"] for one in (asked, *results[-1:]) if one is not None)
    return Listed(
        name=key.session,
        position=None if state is None else state.position,
        last=datetime.fromisoformat(last),
        is_waiting=asked is not None and not _is_answered(asked, found),
        is_closed=isinstance(state, Closed),
    )


def _decoded(results: Sequence[Stored]) -> list[Result]:
    found = []
    for one in results:
        with suppress(InvalidMessageError):  # not written by a worker
            found.append(decode_result(one.body))
    return found


def _last_change(results: Sequence[Result]) -> Result | None:
    changes = (one for one in reversed(results) if not isinstance(one, Failed) and one.repeat_of is None)
    return next(changes, None)


def _is_answered(asked: Stored, results: Sequence[Result]) -> bool:
    return any(one.seq is not None and one.seq >= asked.seq for one in results)
