"""Requests on their way: publish one and wait for its result.

Knows the log by name only: a `Wire` reaches it, so that nothing here depends on a NATS library. Nothing
here starts a task: whoever waits does the work, so an abandoned call leaves nothing running.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct

from .errors import (
    InvalidMessageError,
    NoWorkerError,
    RequestFailedError,
    ResultRemovedError,
    ResultTimeoutError,
)
from .messages import ControlReply, Failed, Request, Result, decode_result, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping

    from .subjects import SessionKey, Subjects

#: Silence after which a waiting call looks into the log itself; doubles up to the second.
FIRST_LOOK_S: Final = 2.0
LAST_LOOK_S: Final = 30.0


class Stored(NamedTuple):
    """One message of a stream."""

    seq: int
    body: bytes
    headers: Mapping[str, str]


class Wire(Protocol):
    """What calls need of a NATS connection. Everything raises `NoWorkerError` once it is closed."""

    subjects: Subjects
    #: Counts reconnections: what was published in between did not reach our subscriptions.
    epoch: int
    closed: bool
    #: Set on every reconnection and on closing.
    watchers: set[asyncio.Event]

    async def publish(self, subject: str, body: bytes) -> int:
        """Store `body` in the log, at least once, and return its stream sequence."""

    async def ask(self, subject: str, body: bytes, timeout_s: float) -> bytes:
        """Return the reply to one core request; raises `NoWorkerError` where none comes."""

    async def read(self, stream: str, subject: str, seq: int) -> list[Stored]:
        """Return what `stream` holds of `subject` from `seq` on, in order; empty where it cannot tell."""

    async def lacks(self, stream: str, subject: str, seq: int) -> bool:
        """Say whether what `stream` held of `subject` at `seq` was removed; false where it cannot tell."""

    async def listen(self, subject: str, on_body: Callable[[bytes], None]) -> Callable[[], Awaitable[None]]:
        """Call `on_body` for every message until the returned function is awaited."""


class _Sequenced(Struct):
    seq: int | None = None


class _Outbox:
    """The subscription to one session's `out`, shared by the calls that wait on that session."""

    def __init__(self) -> None:
        self.users = 0
        self.opening = asyncio.Lock()
        self.stop: Callable[[], Awaitable[None]] | None = None
        self.waiting: dict[int, set[Pending]] = {}
        self.publishing = 0
        #: Results that overtook the acknowledgement that would tell whose they are.
        self.early: dict[int, bytes] = {}

    def arrived(self, body: bytes) -> None:
        seq = _result_seq(body)
        for pending in self.waiting.get(seq, ()):
            pending.settle(body)
        if self.publishing and seq > 0:
            self.early[seq] = body


class Outboxes:
    """The outboxes in use, by session."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._outboxes: dict[SessionKey, _Outbox] = {}

    async def acquire(self, key: SessionKey) -> _Outbox:
        """Listen on the session's `out` until `release`."""
        outbox = self._outboxes.setdefault(key, _Outbox())
        outbox.users += 1
        try:
            async with outbox.opening:
                if outbox.stop is None:
                    subject = self._wire.subjects.of(key, "out")
                    outbox.stop = await self._wire.listen(subject, outbox.arrived)
        except BaseException:
            await self.release(key, outbox)
            raise
        return outbox

    async def release(self, key: SessionKey, outbox: _Outbox) -> None:
        """Give up one use; the last one ends the subscription."""
        outbox.users -= 1
        if outbox.users == 0:
            del self._outboxes[key]  # before the await: a newcomer must open its own
            if outbox.stop is not None:
                await outbox.stop()


class Pending:
    """One request and the wait for its result. Await it: a `Failed` result is returned, not raised."""

    def __init__(
        self,
        wire: Wire,
        outboxes: Outboxes,
        key: SessionKey,
        request: Request,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self.key = key
        self.request = request
        #: Sequence of the request in the log, once that has acknowledged it.
        self.seq: int | None = None
        self.wake = asyncio.Event()
        self._wire = wire
        self._outboxes = outboxes
        self._starting = asyncio.Lock()
        self._users = 0
        self._outbox: _Outbox | None = None
        self._body: bytes | None = None
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._epoch = wire.epoch
        self._look_s = FIRST_LOOK_S

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    def is_settled(self) -> bool:
        """Say whether the result is here."""
        return self._body is not None

    @property
    def result(self) -> Result:
        """The result, once it is here. Raises `InvalidMessageError` if it is of no known kind."""
        if self._body is None:
            raise RuntimeError(f"request {self.id} has no result yet: await it first")
        return decode_result(self._body)

    def __await__(self) -> Generator[Any, None, Result]:
        return self.wait().__await__()

    async def wait(self) -> Result:
        """Return the request's result. Raises `ResultTimeoutError`, `ResultRemovedError`, `NoWorkerError`."""
        if not self.is_settled():
            async with self.listening():
                while not self.is_settled():
                    await self.turn()
        return self.result

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen for the result, and publish the request where that has not been done. Several may."""
        self._users += 1
        try:
            async with self._in_time(), self._starting:
                if self._outbox is None:
                    await self._start()
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                await self._stop()

    async def turn(self, at_most_s: float = LAST_LOOK_S) -> None:
        """Wait until something happens; after a reconnection or a long silence look into the log."""
        async with self._in_time():
            if self._epoch == self._wire.epoch and not self._wire.closed:
                patience_s = min(self._look_s, at_most_s)
                try:
                    async with asyncio.timeout(patience_s):
                        await self.wake.wait()
                except TimeoutError:
                    if patience_s < self._look_s:
                        return
                    self._look_s = min(2 * self._look_s, LAST_LOOK_S)
                else:
                    # After the wait, never before: what came between two turns must not be slept over.
                    self.wake.clear()
                    return
            await self._look()

    def settle(self, body: bytes) -> None:
        """Take the result."""
        self._body = body
        self.wake.set()

    async def _start(self) -> None:
        self._epoch = self._wire.epoch
        self._wire.watchers.add(self.wake)
        self._outbox = outbox = await self._outboxes.acquire(self.key)
        if self.seq is None:
            await self._publish(outbox)
        else:
            outbox.waiting.setdefault(self.seq, set()).add(self)
            await self._look()

    async def _stop(self) -> None:
        self._wire.watchers.discard(self.wake)
        outbox, self._outbox = self._outbox, None
        if outbox is None:
            return
        waiting = outbox.waiting.get(self.seq or 0, set())
        waiting.discard(self)
        if not waiting:
            outbox.waiting.pop(self.seq or 0, None)
        await self._outboxes.release(self.key, outbox)

    async def _publish(self, outbox: _Outbox) -> None:
        outbox.publishing += 1
        try:
            self.seq = await self._wire.publish(self._wire.subjects.of(self.key, "in"), encode(self.request))
            outbox.waiting.setdefault(self.seq, set()).add(self)
            if self.seq in outbox.early:
                self.settle(outbox.early[self.seq])
        finally:
            outbox.publishing -= 1
            if not outbox.publishing:
                outbox.early.clear()

    async def _look(self) -> None:
        """Look for the result in the log, behind the request."""
        if self.seq is None or self._wire.closed:
            raise NoWorkerError(f"the connection was closed before request {self.id} was answered")
        self._epoch = self._wire.epoch
        subjects = self._wire.subjects
        for stored in await self._wire.read(subjects.log_stream, subjects.of(self.key, "out"), self.seq + 1):
            if _result_seq(stored.body) == self.seq:
                self.settle(stored.body)
        if not self.is_settled() and await self._wire.lacks(
            subjects.log_stream, subjects.of(self.key, "in"), self.seq
        ):
            raise ResultRemovedError(
                f"request {self.id} was removed from the log before its result was heard: its session was"
                " closed to be forgotten, or closed long ago; whether it was answered cannot be told any more"
            )

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(self._deadline):
                yield
        except TimeoutError:
            raise ResultTimeoutError(
                f"request {self.id} was not answered within {self._timeout_s} s;"
                " ask again under the same id to go on waiting"
            ) from None


_T = TypeVar("_T")


def expect(kind: type[_T], answer: Result | ControlReply) -> _T:
    """Return `answer` if it is a `kind`. Raises `RequestFailedError` for a failed one."""
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, Failed):
        raise RequestFailedError(answer.code, answer.message, retryable=answer.retryable)
    raise InvalidMessageError(f"the answer is {type(answer).__name__}, not {kind.__name__}")


def _result_seq(body: bytes) -> int:
    """Read the `seq` of a result, 0 if it has none. Only what somebody waits for is read in full."""
    try:
        return msgspec.json.decode(body, type=_Sequenced).seq or 0
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
