"""Publishes requests and waits for their results.

Starts no tasks: a call makes progress only while its caller awaits it, so an abandoned call leaves nothing
running.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from math import inf, isinf
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import Struct

from .errors import (
    ClientClosedError,
    InvalidMessageError,
    RequestFailedError,
    ResultRemovedError,
    ResultTimeoutError,
    TurnkeepError,
)
from .images import files_of
from .messages import Close, ControlReply, Failed, Request, Result, UnknownResult, decode_result, encode
from .options import check_options
from .stream import LogStream
from .writes import LIKELY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Mapping

    from .subjects import SessionKey
    from .wire import NatsWire

#: Time without an event after which a waiting call reads the log; doubles up to the second value.
FIRST_POLL_S: Final = 2.0
LAST_POLL_S: Final = 30.0
#: Pause between the two checks whether a request was removed from the log.
DOUBT_S: Final = 1.0
#: No replica of the log lags behind longer than this.
MOST_LAG_S: Final = 30.0
#: How long to wait for a worker that stores and answers a close, which another may do after a crash: longer
#: than it tries to store the close.
_ASK_S: Final = 120.0


class _Named(Struct):
    seq: int | None = None
    id: str | None = None


class _ResultFeed:
    """Receives one session's results, by subscription or from the log, for all calls that wait for them."""

    def __init__(self, wire: NatsWire, key: SessionKey) -> None:
        self.users = 0
        self.opening = asyncio.Lock()
        self.stop: Callable[[], Awaitable[None]] | None = None
        self.waiting: dict[int, set[Call]] = {}
        self.publishing = 0
        #: Results that came before the acknowledgement of their request, by the request's sequence.
        self.early: dict[int, bytes] = {}
        self._denied: set[Call] = set()  # calls whose requests seem removed from the log
        self._wire = wire
        self._key = key
        self._reading = asyncio.Lock()
        self._num_begun = self._last_complete = 0

    def arrived(self, body: bytes) -> None:
        seq = self._resolve(body)
        if self.publishing and seq > 0:
            self.early[seq] = body

    def _resolve(self, body: bytes) -> int:
        """Give a result to the calls that wait for it; return the sequence of its request."""
        seq = _named(body).seq or 0
        for call in self.waiting.get(seq, ()):
            call.resolve(body)
        return seq

    async def read_log(self) -> None:
        """Search the log for the results of all waiting calls.

        Calls that arrive while one read of the log runs share the next read. Otherwise, if a worker
        became silent under many requests, each waiting call would read the results of all of them.
        """
        num_begun = self._num_begun
        async with self._reading:
            if self._last_complete > num_begun or not self.waiting:
                return
            self._num_begun = number = self._num_begun + 1
            subjects = self._wire.subjects
            results = subjects.of(self._key, "out")
            for stored in await self._wire.read(subjects.log_stream, results, min(self.waiting) + 1):
                self._resolve(stored.body)
            unanswered = [call for calls in self.waiting.values() for call in calls if not call.is_resolved()]
            self._denied = await self._lacking(unanswered) if unanswered else set()
            self._last_complete = number

    async def is_removed(self, call: Call) -> bool:
        """Whether a call's request was removed from the log without a result. Call it after `read_log`.

        Asks the server twice: under load, a server was once observed to miss a request that it had stored.
        """
        if call not in self._denied:
            return False
        await asyncio.sleep(DOUBT_S)
        if not await self._lacking([call]):
            return False
        # Answered requests leave the queue too, and it may have been answered since `read_log`.
        with suppress(TurnkeepError):
            stream = LogStream(self._wire)
            async for _, stored in stream.every(self._key, "out", (call.seq or 0) + 1):
                self._resolve(stored.body)
            return not call.is_resolved()
        return False

    async def _lacking(self, calls: Collection[Call]) -> set[Call]:
        """Return those of `calls` whose requests the log lacks; none if the log cannot be read.

        A server that has lost a request may have another one at its sequence.
        """
        asked = {call: call.seq or 0 for call in calls}
        subjects, now = self._wire.subjects, asyncio.get_running_loop().time()
        stream, queue = subjects.log_stream, subjects.of(self._key, "in")
        with suppress(TurnkeepError):
            there = await self._wire.bodies_at(stream, queue, {*asked.values()})
            last = await self._wire.last(stream, f"{subjects.prefix}.>")
            newest = last.seq if last else 0
            # A replica that lags behind has neither a request nor a later entry.
            return {
                call
                for call, seq in asked.items()
                if not call.is_named(there.get(seq, b""))
                and (seq in there or newest > seq or now - call.begun_s > MOST_LAG_S)
            }
        return set()


class ResultFeeds:
    """Holds subscriptions to results (`out`): one for each session that some caller waits for."""

    def __init__(self, wire: NatsWire, timeout_s: float) -> None:
        """`timeout_s` is the default timeout of calls."""
        self.timeout_s = timeout_s
        self._wire = wire
        self._feeds: dict[SessionKey, _ResultFeed] = {}

    async def acquire(self, key: SessionKey) -> _ResultFeed:
        """Return the session's feed, subscribed to `out`. Each `acquire` needs a `release`."""
        feed = self._feeds.setdefault(key, _ResultFeed(self._wire, key))
        feed.users += 1
        try:
            async with feed.opening:
                if feed.stop is None:
                    subject = self._wire.subjects.of(key, "out")
                    feed.stop = await self._wire.listen(subject, feed.arrived)
        except BaseException:
            await self.release(key, feed)
            raise
        return feed

    async def release(self, key: SessionKey, feed: _ResultFeed) -> None:
        """Release a feed that `acquire` returned; after the last release, unsubscribe from `out`."""
        feed.users -= 1
        if feed.users == 0:
            del self._feeds[key]  # before the await: a later call must open a new feed
            if feed.stop is not None:
                await feed.stop()


class Call:
    """One request. Await the call to get the request's result; a `Failed` result is returned, not raised."""

    def __init__(
        self,
        wire: NatsWire,
        feeds: ResultFeeds,
        key: SessionKey,
        request: Request,
        *,
        timeout_s: float | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare a call. `before` is awaited before the request is published with `headers`.

        `timeout_s` limits each wait for the result; `restart_timeout` restarts it. Infinity is no limit.
        """
        self.key = key
        self.request = request
        #: Sequence of the request in the log, once the log has acknowledged it.
        self.seq: int | None = None
        #: Whether the log may have the request.
        self.is_published = False
        self.wake = asyncio.Event()
        #: The event loop's time by which the log had stored the request.
        self.begun_s = inf
        #: Whether the next wait keeps the deadline of the last one.
        self.keeps_deadline = False
        self._wire = wire
        self._feeds = feeds
        self._starting = asyncio.Lock()
        self._users = 0
        self._is_started = False
        self._feed: _ResultFeed | None = None
        self._body: bytes | None = None
        self._timeout_s = feeds.timeout_s if timeout_s is None else timeout_s
        check_options(timeout_s=self._timeout_s, headers=headers or {})
        self._before = before
        self._headers = dict(headers or {}) or None
        self.restart_timeout()
        self._epoch = wire.epoch
        self._poll_s = FIRST_POLL_S

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    def is_resolved(self) -> bool:
        """Say whether the result has arrived."""
        return self._body is not None

    @property
    def result(self) -> Result:
        """The result; an `UnknownResult` if this client does not know its type.

        Raises RuntimeError before the result has arrived.
        """
        if self._body is None:
            raise RuntimeError(f"request {self.id} has no result yet: await it first")
        return decode_result(self._body)

    def __await__(self) -> Generator[Any, None, Result]:
        return self.wait().__await__()

    async def wait(self) -> Result:
        """Return the request's result, after publishing the request if that was not done yet.

        Raises `ResultTimeoutError`, `ResultRemovedError`, `NoWorkerError`, and `RequestFailedError` if the
        log refuses the request.
        """
        if not self.is_resolved():
            async with self.listening():
                while not self.is_resolved():
                    await self.wait_for_change()
        return self.result

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Stay subscribed to the result during `async with`. The first such block publishes the request.

        If the publishing task is cancelled or fails, the next such block publishes the request again. Raises
        as `wait`.
        """
        if self.keeps_deadline:
            self.keeps_deadline = False
        elif self._users == 0 or asyncio.get_running_loop().time() >= self._deadline:
            self.restart_timeout()
        self._users += 1
        try:
            async with self._in_time(), self._starting:
                if not self._is_started:
                    await self._start()
                    self._is_started = True
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                await self._stop()

    async def wait_for_change(self, at_most_s: float = LAST_POLL_S) -> None:
        """Wait for the next event, such as the result, for `at_most_s` seconds at most.

        After a reconnection, or after seconds without an event, search the log for the result. Raises
        `ResultTimeoutError`, `ResultRemovedError`, `ClientClosedError`.
        """
        async with self._in_time():
            if self._epoch == self._wire.epoch and not self._wire.closed:
                patience_s = min(self._poll_s, at_most_s)
                # Not `timeout`: before Python 3.11.3 it ends as a cancellation in a task that is cancelled.
                waiting = asyncio.ensure_future(self.wake.wait())
                try:
                    done, _ = await asyncio.wait([waiting], timeout=patience_s)
                finally:
                    waiting.cancel()
                if done:
                    # Clear it after the wait, never before: an event between two waits must not be lost.
                    self.wake.clear()
                    return
                if patience_s < self._poll_s:
                    return
                self._poll_s = min(2 * self._poll_s, LAST_POLL_S)
            await self._read_log(self._feed)

    def restart_timeout(self) -> None:
        """Restart the timeout, after progress such as a chunk."""
        self._deadline = asyncio.get_running_loop().time() + self._timeout_s

    def resolve(self, body: bytes) -> None:
        """Store the result `body` and wake the waiters.

        Ignores a result with another request's id: if the server lost this request, another request may have
        got its sequence.
        """
        if self.is_named(body):
            self._body = body
            self.wake.set()

    def is_named(self, body: bytes) -> bool:
        """Whether `body`, a request or a result, has the id of this call's request."""
        return _named(body).id == self.id

    async def _start(self) -> None:
        self._epoch = self._wire.epoch
        self._wire.watchers.add(self.wake)
        if self._feed is None:
            self._feed = await self._feeds.acquire(self.key)
        feed = self._feed
        if self.seq is None:
            if self._before is not None:
                await self._before()
            await self._publish(feed)
        else:
            self._wait_at(self.seq, feed)
            await self._read_log(feed)

    async def _stop(self) -> None:
        self._wire.watchers.discard(self.wake)
        self._is_started = False
        feed, self._feed = self._feed, None
        if feed is None:
            return
        waiting = feed.waiting.get(self.seq or 0, set())
        waiting.discard(self)
        if not waiting:
            feed.waiting.pop(self.seq or 0, None)
        await self._feeds.release(self.key, feed)

    async def _publish(self, feed: _ResultFeed) -> None:
        await self._wire.store_images(self.key, files_of(self.request))
        feed.publishing += 1
        try:
            subjects, body = self._wire.subjects, encode(self.request)
            self.is_published = True
            while self.seq is None:
                try:
                    self.seq = await self._wire.publish(subjects.of(self.key, "in"), body, self._headers)
                except RequestFailedError:  # if the log is full, workers still have room in it
                    if not isinstance(self.request, Close):
                        raise
                    with suppress(TimeoutError):  # its worker may have crashed; a second entry does no harm
                        async with asyncio.timeout(_ASK_S):
                            reply = await self._wire.ask(subjects.of(self.key, "ask"), body, 2 * _ASK_S)
                        if (seq := _named(reply).seq) is None:
                            raise  # the log did not take it from the worker either
                        self.seq, self._body = seq, reply
                        return
            self._wait_at(self.seq, feed)
            if self.seq in feed.early:
                self.resolve(feed.early[self.seq])
        finally:
            feed.publishing -= 1
            if not feed.publishing:
                feed.early.clear()

    def _wait_at(self, seq: int, feed: _ResultFeed) -> None:
        self.begun_s = min(self.begun_s, asyncio.get_running_loop().time())
        feed.waiting.setdefault(seq, set()).add(self)

    async def _read_log(self, feed: _ResultFeed | None) -> None:
        """Search the log for the result. Raises `ResultRemovedError` if the request was removed."""
        if feed is None or self.seq is None or self._wire.closed:
            raise ClientClosedError(f"request {self.id} is not answered yet: {self._wire.why_closed}")
        self._epoch = self._wire.epoch
        await feed.read_log()
        if not self.is_resolved() and await feed.is_removed(self) and not self.is_resolved():
            raise ResultRemovedError(
                f"request {self.id} was removed from the log before its result was received: its session was"
                " closed with forget, or closed long ago, or its tenant's mirror of the log is full; whether"
                " the request was answered is unknown"
            )

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(None if isinf(self._deadline) else self._deadline):
                yield
        except TimeoutError:
            why = ""
            if not self._wire.connected:
                why = ", and the connection to the NATS server is lost"
            elif self.is_published and self.seq is None:
                why = f", and the NATS server has not confirmed that the request is stored: {LIKELY}"
            raise ResultTimeoutError(
                f"request {self.id}: no answer for {self._timeout_s} s{why};"
                " send it again under the same id to keep waiting"
            ) from None


_T = TypeVar("_T")


def expect(kind: type[_T], answer: Result | ControlReply) -> _T:
    """Return `answer` if it is an instance of `kind`.

    Raises `RequestFailedError` for a `Failed` answer, `InvalidMessageError` for an answer of unknown type.
    """
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, Failed):
        raise answer.as_error()
    if isinstance(answer, UnknownResult):
        raise InvalidMessageError(
            f"the worker is newer than this client, which does not know its result {answer.type!r};"
            " update the client"
        )
    raise InvalidMessageError(f"the answer is {type(answer).__name__}, not {kind.__name__}")


def _named(body: bytes) -> _Named:
    """Decode only the sequence and id of a result's request: most results belong to other callers."""
    try:
        return msgspec.json.decode(body, type=_Named)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Named()
