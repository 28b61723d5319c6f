"""Makes OpenTelemetry spans of finished turns, which the SDK's batch processor sends by OTLP over HTTP.

The event loop only makes spans and puts them into the processor's queue. If the collector is slow or dead,
spans are lost, but no turn waits. Imported only if a collector is configured.
"""

from __future__ import annotations

import logging
import time
from threading import Thread
from typing import TYPE_CHECKING, Final

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from .traces import TurnTimes

log = structlog.get_logger()

#: Limit of spans in the queue, each of about 1 KB, beyond which the oldest are dropped; a turn has five.
_MOST_WAITING: Final = 8192
#: Limit of spans sent together, and how long the first of them waits for others.
_BATCH: Final = 256
_BATCH_MS: Final = 1000
#: How long a worker that stops waits for its last spans to be sent.
_STOP_S: Final = 2.0


class Traces:
    """Makes the spans of finished turns, on the event loop; a thread of the SDK sends them.

    OpenTelemetry's environment variables decide which turns are sampled.
    """

    def __init__(self, endpoint: str | None, attributes: Mapping[str, str]) -> None:
        """Take the collector's URL; None uses OpenTelemetry's environment variables.

        `attributes` describe the worker in each span.
        """
        if endpoint is not None:
            endpoint = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        resource = Resource.create({"service.name": "turnkeep", **attributes})
        resource = resource.merge(OTELResourceDetector().detect())  # the operator's values win
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(_Exporter(endpoint), _MOST_WAITING, _BATCH_MS, _BATCH)
        )
        self._tracer = self._provider.get_tracer("turnkeep")

    def stop(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        ending = Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(_STOP_S)
        if ending.is_alive():
            log.warning("the collector is not waited for; the spans of the last turns are lost")

    def add(self, turn: TurnTimes) -> None:
        """Make the spans of one turn, with times of the wall clock, and queue them. Never waits."""
        offset_s = time.time() - time.monotonic()

        def at(moment_s: float) -> int:
            return int((moment_s + offset_s) * 1e9)

        # The log's clock may be ahead of this machine's.
        begin_s = min([turn.end_s - turn.waited_s, *(phase.start_s for phase in turn.phases)])
        parent = TraceContextTextMapPropagator().extract(turn.parent, Context())
        whole = self._tracer.start_span(
            turn.name, parent, SpanKind.SERVER, dict(turn.attributes), start_time=at(begin_s)
        )
        if turn.error is not None:
            whole.set_attribute("error.type", turn.error)
            whole.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(whole, Context())
        first, *others = turn.phases  # the first is the wait, which begins when the log has the request
        for phase in (first._replace(start_s=begin_s), *others):
            span = self._tracer.start_span(phase.name, inside, start_time=at(phase.start_s))
            if phase.num_tokens:
                span.set_attribute("turnkeep.tokens", phase.num_tokens)
            span.end(at(phase.end_s))
        whole.end(at(turn.end_s))


class _Exporter(OTLPSpanExporter):
    """Sends spans, and logs when the collector begins to lose them and when it takes them again."""

    def __init__(self, endpoint: str | None) -> None:
        super().__init__(endpoint)
        self._complaint = _Complaint()
        self._is_losing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        is_lost, why = result is not SpanExportResult.SUCCESS, self._complaint.last
        if is_lost and not self._is_losing:
            log.warning("spans are lost until the collector takes them", why=why)
        elif not is_lost and (self._is_losing or "Queue full" in why):
            log.warning("the collector takes spans again; some are lost", why=why)
            self._complaint.last = ""
        self._is_losing = is_lost
        return result


class _Complaint(logging.Handler):
    """Keeps the SDK's last log message, instead of logging one line for each failed attempt."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()[:200]
