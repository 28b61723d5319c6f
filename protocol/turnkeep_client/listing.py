"""Describes a tenant's sessions by the ends of their logs. Pure."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003  # msgspec reads the annotations
from typing import TYPE_CHECKING

from msgspec import Struct

from .messages import Closed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .session_log import End
    from .subjects import SessionKey


class Listed(Struct, frozen=True, kw_only=True):
    """A session in the log. `position` is the number of its tokens, None before the first result.

    `last` is the time of its last request or result; `is_waiting` while a request has no result.
    """

    name: str
    position: int | None
    last: datetime
    is_waiting: bool
    is_closed: bool


def listed(ends: Mapping[SessionKey, End]) -> list[Listed]:
    """Make the list of sessions, most recently used first."""
    found = [
        Listed(
            name=key.session,
            position=end.position,
            last=end.last.stored,
            is_waiting=bool(end.waiting),
            is_closed=end.changed is not None and isinstance(end.changed.result, Closed),
        )
        for key, end in ends.items()
    ]
    return sorted(found, key=lambda one: one.last, reverse=True)
