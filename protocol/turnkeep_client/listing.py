"""Lists a tenant's sessions from the last request and the last result of each. Pure."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING

from msgspec import Struct

from .errors import InvalidMessageError
from .messages import Closed, decode_result

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .calls import Stored
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


def listed(requests: Mapping[SessionKey, Stored], results: Mapping[SessionKey, Stored]) -> list[Listed]:
    """Make the list of sessions from the last request and last result of each, most recently used first."""
    found = [_one(key, requests.get(key), results.get(key)) for key in {**requests, **results}]
    return sorted(found, key=lambda one: one.last, reverse=True)


def _one(key: SessionKey, asked: Stored | None, answered: Stored | None) -> Listed:
    result: Result | None = None
    if answered is not None:
        with suppress(InvalidMessageError):  # not written by a worker
            result = decode_result(answered.body)
    last = max(one.headers["Nats-Time-Stamp"] for one in (asked, answered) if one is not None)
    return Listed(
        name=key.session,
        position=None if result is None else result.position,
        last=datetime.fromisoformat(last),
        is_waiting=asked is not None and (result is None or (result.seq or 0) < asked.seq),
        is_closed=isinstance(result, Closed),
    )
