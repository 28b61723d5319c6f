"""Defines the times and token counts that a turn records for its spans; they include none of its text.

The module `otlp` makes spans of them, and sends the spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Headers of W3C Trace Context in lower case; some clients send another case.
_HEADERS: Final = ("traceparent", "tracestate")
#: The standard's limit for all of `tracestate`; a longer header is ignored.
_MOST_HEADER: Final = 512


class Phase(NamedTuple):
    """A named part of a turn's time, between two readings of the monotonic clock."""

    name: str
    start_s: float
    end_s: float
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """The times and token counts for one turn's spans."""

    name: str
    #: The headers that name the publisher's span.
    parent: Mapping[str, str]
    attributes: Mapping[str, Any]
    #: The first one is the time that the turn waited.
    phases: list[Phase]
    #: The seconds from the request's arrival in the log to `end_s`, a reading of the monotonic clock.
    waited_s: float
    end_s: float
    #: The code of a failed result.
    error: str | None = None


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return only the headers that name the publisher's span (W3C Trace Context), in lower case."""
    return {
        name.lower(): value
        for name, value in headers.items()
        if name.lower() in _HEADERS and len(value) <= _MOST_HEADER
    }
