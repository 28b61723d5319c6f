"""NATS's service discovery (ADR-32 of NATS): answers `$SRV.PING`, `INFO` and `STATS` about this worker.

nats-py's implementation (`nats.micro`) is not used: its endpoints make their own subscriptions and
answer one request at a time, while `Endpoints` answers many, and it uses a clock that Python 3.12 deprecates.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import nats.errors

from .connection import confirm_subscriptions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from turnkeep_client.subjects import Subjects
    from worker.observe.telemetry import Telemetry

    from .outbox import Outbox

NAME: Final = "turnkeep"
#: The queue group of asks and control requests: each reaches one worker.
QUEUE: Final = "worker"
_SECOND_NS: Final = 1_000_000_000


class Discovery:
    """Answers for this worker as one service instance with its own id. Event loop only."""

    def __init__(
        self,
        nc: Client,
        subjects: Subjects,
        outbox: Outbox,
        telemetry: Telemetry,
        *,
        version: str,
        metadata: dict[str, str],
    ) -> None:
        self._nc = nc
        self._outbox = outbox
        self._telemetry = telemetry
        self._who = {"name": NAME, "id": uuid4().hex, "version": version, "metadata": metadata}
        self._started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        stored = {"stream": subjects.log_stream}
        self._endpoints = [
            {"name": "in", "subject": subjects.every("in"), "queue_group": "", "metadata": stored},
            {"name": "ctl", "subject": subjects.every("ctl"), "queue_group": QUEUE, "metadata": {}},
            {"name": "ask", "subject": subjects.every("ask"), "queue_group": QUEUE, "metadata": {}},
        ]
        self._subscriptions: list[Subscription] = []

    async def open(self) -> None:
        """Subscribe; return when the server has confirmed the subscriptions."""
        for verb, say in (("PING", dict[str, Any]), ("INFO", self._info), ("STATS", self._stats)):
            for whom in ("", f".{NAME}", f".{NAME}.{self._who['id']}"):
                answer = self._answering(f"io.nats.micro.v1.{verb.lower()}_response", say)
                self._subscriptions.append(await self._nc.subscribe(f"$SRV.{verb}{whom}", cb=answer))
        await confirm_subscriptions(self._nc)

    async def close(self) -> None:
        """Stop answering."""
        for subscription in self._subscriptions:
            with contextlib.suppress(nats.errors.Error):  # the connection may be gone for good
                await subscription.unsubscribe()

    def _answering(self, kind: str, say: Callable[[], dict[str, Any]]) -> Callable[[Msg], Awaitable[None]]:
        async def answer(message: Msg) -> None:
            if message.reply:
                await self._outbox.reply(message.reply, {"type": kind} | self._who | say())

        return answer

    def _info(self) -> dict[str, Any]:
        return {"description": "LLM sessions over NATS", "endpoints": self._endpoints}

    def _stats(self) -> dict[str, Any]:
        return {"started": self._started, "endpoints": [self._calls(one) for one in self._endpoints]}

    def _calls(self, endpoint: dict[str, Any]) -> dict[str, Any]:
        """Return an endpoint's request statistics for `$SRV.STATS`.

        For `in`, the time of a request runs from its arrival in the log to its result.
        """
        if endpoint["name"] == "in":
            outcomes = self._telemetry.requests.values()
            num = sum(one.total() for one in outcomes)
            num_errors = num - sum(one["ok"] for one in outcomes)
            duration = self._telemetry.request_duration.histogram()
            last_error, seconds, num_timed = "", duration.sum, duration.count
        else:
            calls = self._telemetry.calls[endpoint["name"]]
            num = num_timed = calls.num
            num_errors, last_error, seconds = calls.num_errors, calls.last_error, calls.seconds
        return {
            **{name: endpoint[name] for name in ("name", "subject", "queue_group")},
            "num_requests": num,
            "num_errors": num_errors,
            "last_error": last_error,
            "processing_time": int(seconds * _SECOND_NS),
            "average_processing_time": int(seconds / max(num_timed, 1) * _SECOND_NS),
            "data": None,
        }
