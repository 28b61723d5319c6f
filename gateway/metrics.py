"""Counts the gateway's requests, answers and tokens, and formats the counts for Prometheus and NATS."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from turnkeep_client import __version__
from turnkeep_client.messages import GatewayMetrics

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from turnkeep_client.messages import Generated

_PREFIX: Final = "turnkeep_gateway_"


class Counters:
    """The gateway's counts since its start. Event loop only."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self.requests = Counter[tuple[str, int]]()
        self.answers = Counter[str]()
        self.tokens = Counter[str]()
        self.num_resumed = 0
        self.num_running = 0

    def note(self, how: str, result: Generated) -> None:
        """Count an answer and its tokens; `how` is one of `planning.How`, such as `continued` or `forked`."""
        self.answers[how] += 1
        self.num_resumed += bool(result.resumed_tokens)
        if how != "repeated":
            used = result.usage
            self.tokens["reused"] += used.cached_tokens
            self.tokens["prefilled"] += used.prompt_tokens - used.cached_tokens
            self.tokens["generated"] += used.completion_tokens

    def counting(self, app: ASGIApp, paths: Iterable[str]) -> ASGIApp:
        """Wrap `app` to count its requests by path and status; paths not in `paths` count as `other`."""
        known = {*paths}

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "")

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self.requests[path if path in known else "other", message["status"]] += 1
                await send(message)

            self.num_running += 1
            try:
                await app(scope, receive, noting)
            finally:
                self.num_running -= 1

        return counted

    def message(self, gateway: str, num_conversations: int, interval_s: float) -> GatewayMetrics:
        """Build the metrics message for NATS from all counts; messages are `interval_s` apart."""
        by_status = Counter[str]()
        for (_, status), count in self.requests.items():
            by_status[str(status)] += count
        return GatewayMetrics(
            gateway=gateway,
            version=__version__,
            uptime_s=time.monotonic() - self._begun_s,
            interval_s=interval_s,
            running=self.num_running,
            conversations=num_conversations,
            requests=dict(by_status),
            answers=dict(self.answers),
            tokens=dict(self.tokens),
            resumed=self.num_resumed,
        )

    def page(self, num_conversations: int) -> bytes:
        """Return all counts in Prometheus's text format."""
        by_path = {
            f'path="{path}",status="{status}"': count for (path, status), count in self.requests.items()
        }
        families: list[tuple[str, str, str, dict[str, int]]] = [
            ("http_requests_total", "counter", "Requests by path and status", by_path),
            ("requests_in_flight", "gauge", "Requests that are being answered", {"": self.num_running}),
            ("conversations", "gauge", "Conversations that are known", {"": num_conversations}),
            (
                "answers_total",
                "counter",
                "Answers by how their conversation was found",
                _by("found", self.answers),
            ),
            (
                "resumed_answers_total",
                "counter",
                "Answers that continued after their worker had ended",
                {"": self.num_resumed},
            ),
            ("tokens_total", "counter", "Tokens reused, prefilled and generated", _by("kind", self.tokens)),
        ]
        return "".join(line for family in families for line in _lines(*family)).encode()


def _by(label: str, counts: Counter[str]) -> dict[str, int]:
    return {f'{label}="{value}"': count for value, count in counts.items()}


def _lines(name: str, kind: str, meaning: str, values: dict[str, Any]) -> Iterator[str]:
    yield f"# HELP {_PREFIX}{name} {meaning}.\n# TYPE {_PREFIX}{name} {kind}\n"
    for labels, value in values.items():
        yield f"{_PREFIX}{name}{f'{{{labels}}}' if labels else ''} {value}\n"
