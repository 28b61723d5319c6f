"""An OpenTelemetry collector for tests: receives OTLP over HTTP, and keeps the spans."""

import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PATIENCE_S = 20.0


@dataclass
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    kind: int
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    return getattr(value, kind)


def _attributes(rows: Any) -> dict[str, Any]:
    return {row.key: _plain(row.value) for row in rows}


class Receiver:
    """Listens on a port of 127.0.0.1; answers each request with 200."""

    def __init__(self, port: int = 0) -> None:
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        self.bodies.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _attributes(group.resource.attributes)
            self.spans += [
                Span(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    state=span.trace_state,
                    kind=span.kind,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    is_error=span.status.code == 2,
                    attributes=_attributes(span.attributes),
                    resource=resource,
                )
                for scope in group.scope_spans
                for span in scope.spans
            ]

    def turns(self) -> list[Span]:
        """Return the spans of whole turns."""
        return [span for span in self.spans if span.kind == 2]

    def children(self, turn: Span) -> dict[str, Span]:
        """Return the phases of a turn by name; if several have the same name, the last one."""
        return {span.name: span for span in self.spans if span.parent_id == turn.span_id}

    def wait_for(self, num_turns: int) -> list[Span]:
        """Block until `num_turns` turns have arrived, and return them; call it on a thread."""
        deadline_s = time.monotonic() + PATIENCE_S
        while len(self.turns()) < num_turns and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert len(self.turns()) == num_turns, self.spans
        return self.turns()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
