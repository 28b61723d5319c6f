"""Batched direct gets: one request for many messages of a stream (NATS ADR-31), which nats-py lacks.

Raises nats-py's errors, as `nats_client` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any, Final

import msgspec
import nats.errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

_END_OF_BATCH: Final = "204"
_NOTHING: Final = "404"
_TOO_MANY: Final = "413"
#: In each message of a batch, and at its end: the sequence of the message before it; 0 in the first one.
_BEFORE: Final = "Nats-Last-Sequence"


class TooManyError(nats.errors.Error):
    """A request for each subject's last message matches more subjects than the server accepts."""


class DirectGets:
    """Sends batched direct gets over one connection. Event loop only."""

    def __init__(self, connection: Client, *, timeout_s: float) -> None:
        """`timeout_s` limits the wait for the next message of a batch."""
        self._connection = connection
        self._timeout_s = timeout_s
        self._inbox = ""
        self._opening = asyncio.Lock()
        # One subscription for all requests: one for each takes a third longer.
        self._subscription: Subscription | None = None
        self._waiting: dict[str, _Batch] = {}
        self._numbers = itertools.count()

    async def read(self, stream: str, request: Mapping[str, Any]) -> tuple[list[Msg], int]:
        """Return one batch of the messages that match `request`, and how many more match after the batch.

        `request` is the body of a `$JS.API.DIRECT.GET` request, including the field `batch`. Raises nats-py's
        TimeoutError if a message does not come, for instance because of a reconnection.
        """
        async with self._opening:
            if self._subscription is None:
                self._inbox = self._connection.new_inbox()
                self._subscription = await self._connection.subscribe(f"{self._inbox}.*", cb=self._arrived)
        inbox = f"{self._inbox}.{next(self._numbers)}"
        self._waiting[inbox] = batch = _Batch()
        try:
            subject = f"$JS.API.DIRECT.GET.{stream}"
            await self._connection.publish(subject, msgspec.json.encode(request), reply=inbox)
            await batch.wait(self._timeout_s)
        finally:
            del self._waiting[inbox]
        status = batch.end.get("Status", "")
        if status not in (_END_OF_BATCH, _NOTHING):
            kind = TooManyError if status == _TOO_MANY else nats.errors.Error
            why = batch.end.get("Description", "").split("\n")[0]  # nats-py leaves the next headers in it
            raise kind(f"direct get: {status} {why}".strip())
        batch.check_whole()
        return batch.messages, int(batch.end.get("Nats-Num-Pending", "0"))

    async def _arrived(self, message: Msg) -> None:
        batch = self._waiting.get(message.subject)
        if batch is not None:  # else the request is over
            batch.add(message)


class _Batch:
    """One batch: the messages received so far, and the headers of the message that ends the batch."""

    def __init__(self) -> None:
        self.messages: list[Msg] = []
        self.end: Mapping[str, str] = {}
        self._ended = asyncio.Event()

    def add(self, message: Msg) -> None:
        headers = message.headers or {}
        # Not `Status`: a stored message keeps its publisher's headers, which may contain that name.
        if "Nats-Sequence" in headers:
            self.messages.append(message)
        else:
            self.end = headers
            self._ended.set()

    def check_whole(self) -> None:
        """Raise nats-py's TimeoutError if a message is missing, as after a short loss of the connection."""
        last = "0"
        for headers in (*(message.headers or {} for message in self.messages), self.end):
            if headers.get(_BEFORE, last) != last:
                raise nats.errors.TimeoutError
            last = headers.get("Nats-Sequence", last)

    async def wait(self, timeout_s: float) -> None:
        """Wait for the batch's last message; `timeout_s` restarts whenever messages have arrived.

        There is no wait for each message: that would take longer than reading the message.
        """
        num_before = 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._ended.wait()
                    return
            if len(self.messages) == num_before:
                raise nats.errors.TimeoutError
            num_before = len(self.messages)
