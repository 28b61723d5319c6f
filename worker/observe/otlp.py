"""Makes OpenTelemetry spans of finished turns, and sends them by OTLP over HTTP on a separate thread.

The event loop only puts a turn's times into a queue. If the collector is slow or dead, spans are lost, but no
turn waits. Imported only if a collector is configured.
"""

from __future__ import annotations

import contextlib
import logging
import time
from queue import Empty, Full, Queue
from threading import Thread
from typing import TYPE_CHECKING, Final

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.trace import ReadableSpan

    from .traces import TurnTimes

log = structlog.get_logger()

#: Limit of turns in the queue, of about 2 KB each; turns beyond it get no spans.
_MOST_WAITING: Final = 2048
#: Limit of turns sent together, and how long the first of them waits for others.
_BATCH: Final = 64
_BATCH_S: Final = 1.0
#: How long a worker that stops waits for its last spans to be sent.
_STOP_S: Final = 2.0


class Traces:
    """Accepts finished turns on the event loop, for a thread that sends their spans.

    OpenTelemetry's environment variables decide which turns are sampled.
    """

    def __init__(self, endpoint: str | None, attributes: Mapping[str, str]) -> None:
        """Take the collector's URL; None uses OpenTelemetry's environment variables.

        `attributes` describe the worker in each span.
        """
        if endpoint is not None:
            endpoint = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        self._exporter = OTLPSpanExporter(endpoint)
        resource = Resource.create({"service.name": "turnkeep", **attributes})
        resource = resource.merge(OTELResourceDetector().detect())  # the operator's values win
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._made = _Made()
        provider.add_span_processor(self._made)
        self._tracer = provider.get_tracer("turnkeep")
        self._complaint = _Complaint()
        self._num_lost = 0  # turns since the collector last took spans
        self._num_overflowed = 0
        self._queue: Queue[TurnTimes | None] = Queue(_MOST_WAITING)
        self._thread = Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def add(self, turn: TurnTimes) -> None:
        """Queue a turn for its spans. Never waits: if the queue is full, the turn gets no spans."""
        try:
            self._queue.put_nowait(turn)
        except Full:
            self._num_overflowed += 1

    def stop(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        with contextlib.suppress(Full):
            self._queue.put(None, timeout=_STOP_S)
            self._thread.join(_STOP_S)
        if self._thread.is_alive():
            log.warning("the collector is not waited for; the spans of the last turns are lost")

    def _run(self) -> None:
        is_over = False
        while not is_over:
            turns = [self._queue.get()]
            end_s = time.monotonic() + _BATCH_S
            while turns[-1] is not None and len(turns) < _BATCH:
                try:
                    turns.append(self._queue.get(timeout=max(end_s - time.monotonic(), 0)))
                except Empty:
                    break
            is_over = turns[-1] is None
            try:
                self._send([turn for turn in turns if turn is not None])
            except Exception:
                log.exception("spans could not be sent")  # the thread must go on

    def _send(self, turns: list[TurnTimes]) -> None:
        for turn in turns:
            self._make(turn)
        spans = self._made.take()
        if not spans:
            return
        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            if not self._num_lost:
                log.warning("spans are lost until the collector takes them", why=self._complaint.last)
            self._num_lost += len(turns)
            return
        self._num_overflowed, num_lost = 0, self._num_lost + self._num_overflowed
        self._num_lost = 0
        if num_lost:
            log.warning("the collector takes spans again", lost_turns=num_lost)

    def _make(self, turn: TurnTimes) -> None:
        """Make the spans of one turn, with times of the wall clock."""
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


class _Made(SpanProcessor):
    """A span processor that collects the sampled spans until `take` is called."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


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
