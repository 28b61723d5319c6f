"""Answers requests on core NATS: control requests (`ctl`) and asks (`ask`, a generate with a reply).

An ask without an id gets one that depends only on the message. So if two workers store it (see `overheard`),
the second request is a repeat of the first, and runs nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING
from uuid import uuid4

import nats.errors
import structlog
from anyio import current_time, fail_after, get_cancelled_exc_class, move_on_after
from msgspec import Raw, structs
from nats.js.errors import APIError

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.messages import Failed, decode_ask, decode_result, encode, failure
from worker.observe.traces import trace_headers
from worker.process.concurrency import shielded
from worker.wire.connection import confirm_subscriptions
from worker.wire.discovery import QUEUE
from worker.wire.journal import MESSAGE_TOO_LARGE

from .overheard import digest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup
    from msgspec import Struct
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.js import JetStreamContext

    from turnkeep_client.messages import ControlReply, Generate, Result
    from turnkeep_client.subjects import SessionKey, Subjects
    from worker.observe.counters import Calls, Telemetry
    from worker.wire.journal import Journal
    from worker.wire.outbox import Outbox

    from .overheard import Overheard
    from .owners import Owners

log = structlog.get_logger()

_PUBLISH_TIMEOUT_S = 5.0
#: How often an ask looks for its result in the log: while its connection was lost, it received nothing.
_LOOK_S = 10.0
#: Limit of open requests; above it, a tenant with at least an equal share of them gets `overloaded`.
_MAX_OPEN = 4096
_TOO_MANY = f"the worker has {_MAX_OPEN} questions to answer already; ask again later"
#: The time for a last reply when the worker stops.
_LAST_S = 1.0
_STOPS = "the worker stops: ask again"
_ASK_STOPS = "the worker stops; if the log has the request, its result comes on the session's out"
_TOO_LARGE = "the request is larger than a message may be: send it as several appends"


class Endpoints:
    """Answers requests on `ctl` and `ask`. An ask is stored in the log like any generate. Event loop only."""

    def __init__(
        self,
        nc: Client,
        js: JetStreamContext,
        journal: Journal,
        subjects: Subjects,
        control: Callable[[str, bytes], Awaitable[ControlReply]],
        owners: Owners,
        overheard: Overheard,
        outbox: Outbox,
        telemetry: Telemetry,
        tasks: TaskGroup,
        *,
        ask_timeout_s: float,
    ) -> None:
        """`control(subject, body)` answers a request on `ctl`. Each request runs as a task in `tasks`.

        An ask waits `ask_timeout_s` for its result on `out`.
        """
        self._nc = nc
        self._js = js
        self._journal = journal
        self._subjects = subjects
        self._control = control
        self._owners = owners
        self._overheard = overheard
        self._outbox = outbox
        self._telemetry = telemetry
        self._ask_timeout_s = ask_timeout_s
        self._subscriptions: list[Subscription] = []
        self._tasks = tasks
        self._num_open = 0
        self._tenants: Counter[str] = Counter()  # open requests by tenant

    async def open(self) -> None:
        """Subscribe; return when the server has confirmed the subscriptions."""
        calls = self._telemetry.calls
        await self._overheard.open()
        for subject, spawn in (
            (self._subjects.every("ctl"), self._spawning(calls["ctl"], self._control_reply, _STOPS)),
            (self._subjects.every("ask"), self._spawning(calls["ask"], self._ask, _ASK_STOPS)),
        ):
            await self._overheard.hear(subject, spawn)
            self._subscriptions.append(await self._nc.subscribe(subject, QUEUE, cb=self._unless_late(spawn)))
        await confirm_subscriptions(self._nc)

    async def close(self) -> None:
        """Accept no more requests. Those that have arrived are begun, and get a reply when cancelled."""
        with move_on_after(_PUBLISH_TIMEOUT_S):
            for subscription in self._subscriptions if self._nc.is_connected else []:
                with contextlib.suppress(nats.errors.Error):
                    await subscription.drain()  # type: ignore[no-untyped-call]

    def _unless_late(self, spawn: Callable[[Msg], Awaitable[None]]) -> Callable[[Msg], Awaitable[None]]:
        async def arrived(message: Msg) -> None:
            if not self._overheard.is_late():
                await spawn(message)

        return arrived

    def _spawning(
        self, calls: Calls, answer: Callable[[Msg], Awaitable[Struct | Raw]], stops: str
    ) -> Callable[[Msg], Awaitable[None]]:
        """Return a callback that answers each message in its own task, so that none delays the next.

        If the worker stops first, another worker gets the request; if there is none, the answer is
        `overloaded` with the text `stops`.
        """

        async def handle(message: Msg, tenant: str) -> None:
            began_s, error = current_time(), "internal"
            try:
                await self._overheard.tell(message, has_replied=False)
                error = await self._try(message, answer)
                await self._overheard.tell(message, has_replied=True)
            except get_cancelled_exc_class():
                error = "overloaded"
                with move_on_after(_LAST_S, shield=True):
                    if not await self._overheard.pass_on(message):
                        await self._reply(message, failure(None, "overloaded", stops))
                raise
            finally:
                calls.count(current_time() - began_s, error)
                self._num_open -= 1
                self._tenants[tenant] -= 1
                if not self._tenants[tenant]:
                    del self._tenants[tenant]

        async def spawn(message: Msg) -> None:
            tenant = message.subject.rsplit(".", 3)[1]
            share = _MAX_OPEN // (len(self._tenants) or 1)
            is_over = self._tasks.cancel_scope.cancel_called  # a new task would spin until the others end
            if is_over and await self._overheard.pass_on(message):
                return
            if is_over or (self._num_open >= _MAX_OPEN and self._tenants[tenant] >= share):
                calls.count(0, "overloaded")
                await self._reply(message, failure(None, "overloaded", _STOPS if is_over else _TOO_MANY))
                await self._overheard.tell(message, has_replied=True)
                return
            self._num_open += 1
            self._tenants[tenant] += 1
            self._tasks.start_soon(handle, message, tenant)

        return spawn

    async def _try(self, message: Msg, answer: Callable[[Msg], Awaitable[Struct | Raw]]) -> str:
        """Answer a request; return the code of the error, empty if there was none."""
        try:
            reply = await answer(message)
            await self._reply(message, reply)
        except Exception:
            log.exception("answering failed", subject=message.subject)
            return "internal"
        return reply.code if isinstance(reply, Failed) else ""

    async def _reply(self, message: Msg, reply: Struct | Raw) -> None:
        if message.reply:
            await self._outbox.reply(message.reply, reply)

    async def _control_reply(self, message: Msg) -> ControlReply | Raw:
        with contextlib.suppress(InvalidMessageError):
            key, _, _ = self._subjects.parse(message.subject)
            reply = await self._owners.control(key, message.subject, message.data)
            if reply is not None:
                return Raw(reply)
        return await self._control(message.subject, message.data)

    async def control(self, subject: str, body: bytes) -> bytes:
        """Answer a control request that another worker has passed on; return the encoded reply."""
        return encode(await self._control(subject, body))

    async def _ask(self, message: Msg) -> Result:
        try:
            key, _, _ = self._subjects.parse(message.subject)
            request = decode_ask(message.data, digest(message) if message.reply else uuid4().hex)
        except InvalidMessageError as error:
            return failure(error.request_id, "invalid_request", str(error))
        results = await self._nc.subscribe(self._subjects.of(key, "out"))
        try:
            seq = await self._store(key, request, trace_headers(message.headers or {}))
            if isinstance(seq, Failed):
                return seq
            with fail_after(self._ask_timeout_s):
                return await self._result(results, key, request.id, seq)
        except TimeoutError:
            text = f"no result within {self._ask_timeout_s:g} s; it comes on the session's out"
            late = failure(request.id, "overloaded", text)
            return structs.replace(late, retryable=False)  # it would be a second request
        finally:
            await shielded(results.unsubscribe)

    async def _store(self, key: SessionKey, request: Generate, headers: dict[str, str]) -> int | Failed:
        """Store the request in the log; return its sequence, or the failure."""
        try:
            ack = await self._js.publish(
                self._subjects.of(key, "in"), encode(request), timeout=_PUBLISH_TIMEOUT_S, headers=headers
            )
        except nats.errors.MaxPayloadError:
            return failure(request.id, "invalid_request", _TOO_LARGE)
        except APIError as error:
            if error.err_code == MESSAGE_TOO_LARGE:
                return failure(request.id, "invalid_request", _TOO_LARGE)
            return failure(request.id, "overloaded", f"the log refused the request: {error.description}")
        except (nats.errors.Error, OSError) as error:
            reason = str(error) or type(error).__name__
            return failure(request.id, "overloaded", f"the log did not confirm the request: {reason}")
        return ack.seq

    async def _result(self, results: Subscription, key: SessionKey, request_id: str, seq: int) -> Result:
        """Wait for the result of the request at `seq` on `out`; look for it in the log too, every 10 s."""
        while True:
            with move_on_after(_LOOK_S):
                while True:
                    body = (await results.next_msg(timeout=None)).data
                    if (result := _as_result(body, request_id, seq)) is not None:
                        return result
            after, more = seq, 1
            while more:
                entries, more = await self._journal.page(key, "out", after)
                for entry in entries:
                    after = entry.seq
                    if (result := _as_result(entry.body, request_id, seq)) is not None:
                        return result


def _as_result(body: bytes, request_id: str, seq: int) -> Result | None:
    """Decode a message on `out`; None if it is not the result of this request."""
    with contextlib.suppress(InvalidMessageError):  # not from a worker
        if (result := decode_result(body)).seq == seq and result.id == request_id:
            return result
    return None
