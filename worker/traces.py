"""What a turn's spans are made of: plain times and numbers, gathered as the turn runs; no text of it.

Imports OpenTelemetry only where a collector is named: `otlp` makes the spans and sends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from turnkeep_client.errors import TurnkeepError

from .installed import as_installed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .otlp import Traces

log = structlog.get_logger()

#: W3C Trace Context, in lower case; some clients write header names in another.
_HEADERS: Final = ("traceparent", "tracestate")
#: The standard's limit for all of `tracestate`; a longer header is ignored.
_MOST_HEADER: Final = 512
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_LACKS: Final = "OpenTelemetry's SDK is missing; pip install 'turnkeep[traces]' brings it"


class TracesError(TurnkeepError):
    """Spans cannot be made; the message says what would help."""


class Phase(NamedTuple):
    """A part of a turn, between two readings of the monotonic clock."""

    name: str
    start_s: float
    end_s: float
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """All that the spans of one turn say.

    The turn began `waited_s` before `end_s`, a reading of the monotonic clock. `parent` are the headers that
    name the publisher's span, `error` is the result's code. The first of the `phases` is the wait.
    """

    name: str
    parent: Mapping[str, str]
    attributes: Mapping[str, Any]
    phases: list[Phase]
    waited_s: float
    end_s: float
    error: str | None = None


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Pick the headers that name a publisher's span."""
    return {
        name.lower(): value
        for name, value in headers.items()
        if name.lower() in _HEADERS and len(value) <= _MOST_HEADER
    }


def start_traces(endpoint: str | None, environ: Mapping[str, str], **attributes: str) -> Traces | None:
    """Start what sends spans; None if neither `endpoint` nor the standard's variables name a collector.

    `attributes` describe the worker. Raises `TracesError` if a given `endpoint` lacks the extra.
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
        log.warning(
            "no spans are made", why=as_installed(_LACKS)
        )  # the environment may be meant for other programs
        return None
    return Traces(endpoint, attributes)
