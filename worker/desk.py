"""Request and reply: `ctl` (info, cancel) and `ask`. Core NATS, so whoever asks waits for the answer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING
from uuid import uuid4

import nats.errors
import structlog

from protocol.errors import InvalidMessageError
from protocol.messages import Failed, decode_ask, decode_result, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.js import JetStreamContext

    from protocol.messages import Result
    from protocol.subjects import SessionKey, Subjects

    from .outbox import Outbox
    from .sessions import Sessions

log = structlog.get_logger()

#: Workers share the asks and the control requests of their prefix.
_QUEUE = "worker"
_PUBLISH_TIMEOUT_S = 5.0


class Desk:
    """Answers on `ctl` and `ask`; event loop only. An ask goes through the log like any other generate."""

    def __init__(
        self,
        nc: Client,
        js: JetStreamContext,
        subjects: Subjects,
        sessions: Sessions,
        outbox: Outbox,
        *,
        ask_timeout_s: float,
    ) -> None:
        """After `ask_timeout_s` an ask's result is no longer waited for; it still comes on `out`."""
        self._nc = nc
        self._js = js
        self._subjects = subjects
        self._sessions = sessions
        self._outbox = outbox
        self._ask_timeout_s = ask_timeout_s
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start to answer."""
        for kind, handle in (("ctl", self._control), ("ask", self._ask)):
            subject = self._subjects.every("ctl" if kind == "ctl" else "ask")
            self._subscriptions.append(await self._nc.subscribe(subject, _QUEUE, cb=self._aside(handle)))

    async def close(self) -> None:
        """Stop to answer; who still waits runs into a time-out, and finds the result on `out`."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _aside(self, handle: Callable[[Msg], Awaitable[None]]) -> Callable[[Msg], Awaitable[None]]:
        """Handle each message in a task of its own: one long answer must not hold up the next question."""

        async def guarded(message: Msg) -> None:
            try:
                await handle(message)
            except Exception:
                log.exception("answering failed", subject=message.subject)

        async def spawn(message: Msg) -> None:
            task = asyncio.create_task(guarded(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return spawn

    async def _control(self, message: Msg) -> None:
        reply = await self._sessions.control(message.subject, message.data)
        if message.reply:
            await self._outbox.reply(message.reply, reply)

    async def _ask(self, message: Msg) -> None:
        result = await self._asked(message)
        if message.reply:
            await self._outbox.reply(message.reply, result)

    async def _asked(self, message: Msg) -> Result:
        try:
            key, _, _ = self._subjects.parse(message.subject)
            body = encode(decode_ask(message.data, uuid4().hex))
        except InvalidMessageError as error:
            return Failed(id=None, code="invalid_request", message=str(error), retryable=False)
        try:
            return await asyncio.wait_for(self._through_the_log(key, body), self._ask_timeout_s)
        except TimeoutError:
            text = f"no result within {self._ask_timeout_s:g} s; if the log has the request, it comes on out"
        except nats.errors.MaxPayloadError:
            text = "the request is larger than a message may be; append it in pieces first"
        except (nats.errors.Error, OSError) as error:
            text = f"the request could not be stored: {str(error) or type(error).__name__}"
        return Failed(id=None, code="internal", message=text, retryable=True)

    async def _through_the_log(self, key: SessionKey, body: bytes) -> Result:
        results = await self._nc.subscribe(self._subjects.of(key, "out"))
        try:
            ack = await self._js.publish(self._subjects.of(key, "in"), body, timeout=_PUBLISH_TIMEOUT_S)
            while True:
                body = (await results.next_msg(timeout=None)).data
                with contextlib.suppress(InvalidMessageError):  # somebody else's
                    if (result := decode_result(body)).seq == ack.seq:
                        return result
        finally:
            await results.unsubscribe()
