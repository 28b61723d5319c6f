"""Defines the times and token counts that a turn records for its spans, and starts the export of spans.

They include no text of the turn. The module `otlp` makes spans of them, and sends the spans; it imports
OpenTelemetry, and is imported only if a collector is configured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from turnkeep_client.errors import TurnkeepError
from worker.process.installed import as_installed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .otlp import Traces

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
    """The times and token counts for one turn's spans.

    The turn began `waited_s` before `end_s`, a reading of the monotonic clock. `parent` are the headers that
    name the publisher's span, `error` is the result's code. The first of the `phases` is the time that the
    turn waited.
    """

    name: str
    parent: Mapping[str, str]
    attributes: Mapping[str, Any]
    phases: list[Phase]
    waited_s: float
    end_s: float
    error: str | None = None


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return only the headers that name the publisher's span (W3C Trace Context), in lower case."""
    return {
        name.lower(): value
        for name, value in headers.items()
        if name.lower() in _HEADERS and len(value) <= _MOST_HEADER
    }


log = structlog.get_logger()

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_LACKS: Final = "OpenTelemetry's SDK is missing; pip install 'turnkeep[traces]' brings it"


class TracesError(TurnkeepError):
    """Spans cannot be created or exported; the message says how to fix this."""


def start_traces(endpoint: str | None, environ: Mapping[str, str], **attributes: str) -> Traces | None:
    """Start the export of spans.

    Returns None if neither `endpoint` nor OpenTelemetry's environment variables name a collector.
    `attributes` describe the worker. Raises `TracesError` if `endpoint` is given but the extra is not
    installed.
    """
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_off = is_off or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if endpoint is None and (is_off or not any(environ.get(name) for name in _ENDPOINTS)):
        return None
    try:
        from .otlp import Traces
    except ImportError:
        if endpoint is not None:
            raise TracesError(f"otlp_endpoint: {_LACKS}") from None
        # The environment may be meant for other programs.
        log.warning("no spans are made", why=as_installed(_LACKS))
        return None
    return Traces(endpoint, attributes)
