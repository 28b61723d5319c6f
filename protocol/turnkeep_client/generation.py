"""The client's side of one generate request: yields chunks while the answer runs, then the recorded result.

Reads missed chunks from the token stream. The module `chunks` joins chunks, `calls` waits for the result.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final

from .calls import LAST_POLL_S, Call, expect
from .cancelling import to_its_end
from .chunks import Assembly
from .errors import RequestFailedError, TurnkeepError
from .messages import Cancelled, Chunk, Generated, decode_chunk
from .session_log import decoded, find_request
from .stream import LogStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Generator
    from typing import Self

    from .wire import NatsWire

#: Pause between two reads of the token stream for missing chunks; doubles up to the second value.
FIRST_CHUNK_POLL_S: Final = 0.05
LAST_CHUNK_POLL_S: Final = 2.0
#: Chunks kept for a slow caller. Older ones are read back from the token stream.
MAX_WAITING_CHUNKS: Final = 65_536
#: Time limit for cancelling the answer after an `async with` block was left.
STOP_S: Final = 1.0


class Generation:
    """One generate request. Iterate over it for its chunks, await it for its result, or do both.

    The first iteration or await publishes the request. Leaving the iteration early does not stop the answer:
    to stop it, call `cancel` or leave an `async with` block around it early. The joined texts and tokens of
    the chunks are exactly those of the result.
    """

    def __init__(
        self,
        call: Call,
        wire: NatsWire,
        cancel: Callable[[str], Awaitable[Cancelled]],
        *,
        is_late: bool = False,
    ) -> None:
        """With `is_late` the answer may have begun: first read its earlier chunks from the token stream."""
        self._is_late = is_late
        self._call = call
        self._wire = wire
        self._cancel = cancel

    @property
    def id(self) -> str:
        """The request's id."""
        return self._call.id

    @property
    def seq(self) -> int | None:
        """Sequence of the request in the log, once the log has acknowledged it."""
        return self._call.seq

    @property
    def result(self) -> Generated:
        """The recorded answer. Raises `RequestFailedError`, or RuntimeError if no result has arrived yet."""
        return expect(Generated, self._call.result)

    def __await__(self) -> Generator[Any, None, Generated]:
        return self.wait().__await__()

    async def wait(self) -> Generated:
        """Return the recorded answer. Raises `RequestFailedError`, `ResultTimeoutError`, `NoWorkerError`."""
        return expect(Generated, await self._call.wait())

    async def send(self) -> None:
        """Publish the request now, and return once the log has stored it. Raises what `wait` raises."""
        self._is_late = True
        async with self._call.listening():
            pass

    async def cancel(self) -> Cancelled:
        """Ask the worker to stop this request; return its reply, with the state that the request was in.

        A running answer ends, and its result has the finish_reason `cancelled` and the tokens so far. The
        result arrives as usual: await the generation for it. Raises `TurnkeepError`, such as a
        `RequestFailedError` if the request was answered before.
        """
        return await self._cancel(self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the answer if it is incomplete. Takes about a second at most, even if cancelled."""
        if self._call.is_resolved() or not self._call.is_published:
            return
        await to_its_end(self._stop())

    async def _stop(self) -> None:
        call = self._call
        call.restart_timeout()  # the block may have been left because of the timeout
        with suppress(TimeoutError, TurnkeepError):
            # Before the acknowledgement, `listening` would publish the request again.
            async with asyncio.timeout(STOP_S), nullcontext() if call.seq is None else call.listening():
                while not call.is_resolved():
                    try:
                        await self.cancel()
                    except RequestFailedError:  # the worker has not read the request, or has answered it
                        await call.wait_for_change(FIRST_CHUNK_POLL_S)
                    else:
                        return

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield the answer's chunks as they arrive, from the answer's first token on.

        Raises what `wait` raises, and `StreamBrokenError` if the worker contradicts its earlier chunks.
        """
        call, assembly = self._call, Assembly()
        if not call.is_resolved():
            chunks = _Chunks(self._wire, call, is_late=self._is_late)
            async with chunks.listening(), call.listening():
                while not call.is_resolved() or chunks.waiting:
                    for chunk in await chunks.next_chunks(has_gap=assembly.has_gap):
                        if new := assembly.add(chunk):
                            call.restart_timeout()
                            yield new
                            call.restart_timeout()  # the reader's own time is no wait
                    if not call.is_resolved() and not chunks.waiting:
                        await call.wait_for_change(chunks.patience_s if assembly.has_gap else LAST_POLL_S)
        if rest := assembly.finish(self.result):
            yield rest


class _Chunks:
    """Receives the chunks of one generate, and reads missed chunks from the token stream.

    Earlier and later requests under the same id have their chunks on the same subject.
    """

    def __init__(self, wire: NatsWire, call: Call, *, is_late: bool) -> None:
        self.waiting: deque[bytes] = deque(maxlen=MAX_WAITING_CHUNKS)
        self._wire = wire
        self._call = call
        self._subject = wire.subjects.tokens(call.key, call.id)
        self._repeated: dict[int, bool] = {}  # by the sequence of an earlier request
        self._epoch = -1 if is_late else wire.epoch
        self._next_seq = 1
        self._pause_s = FIRST_CHUNK_POLL_S
        self._poll_at = 0.0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        stop = await self._wire.listen(self._subject, self._arrived)
        try:
            yield
        finally:
            await stop()

    @property
    def patience_s(self) -> float:
        """Seconds until the next read of the token stream is allowed."""
        return max(0.0, self._poll_at - asyncio.get_running_loop().time())

    async def next_chunks(self, *, has_gap: bool) -> list[Chunk]:
        """Take the chunks that came since the last call: first those that it reads from the stream."""
        found: list[bytes] = []
        if self._epoch != self._wire.epoch or (has_gap and not self.patience_s):
            # The stream may store a chunk a little later than subscribers get it, or may have lost the
            # chunk: read again, at growing intervals.
            self._epoch = self._wire.epoch
            self._poll_at = asyncio.get_running_loop().time() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LAST_CHUNK_POLL_S)
            stream = self._wire.subjects.token_stream
            for stored in await self._wire.read(stream, self._subject, self._next_seq):
                self._next_seq = stored.seq + 1
                found.append(stored.body)
        found += self.waiting
        self.waiting.clear()
        # An empty body ends the stream, and the result says why; it also has what an invalid one lacks.
        chunks = [decoded(decode_chunk, body) for body in found]
        return [chunk for chunk in chunks if chunk and await self._is_of_answer(chunk.seq)]

    async def _is_of_answer(self, seq: int | None) -> bool:
        """Say whether chunks with this `seq` belong to this answer."""
        own = self._call.seq
        if seq is None or own is None or seq >= own:
            return seq == own
        if seq not in self._repeated:
            self._repeated[seq] = await self._repeats(seq)
        return self._repeated[seq]

    async def _repeats(self, seq: int) -> bool:
        """Say whether the log has an equal request at the earlier `seq`, which this request repeats.

        False if the log cannot be read; then the answer's tokens arrive only with the result.
        """
        with suppress(TurnkeepError):
            found = await find_request(LogStream(self._wire), self._call.key, seq)
            return found is not None and found.request == self._call.request
        return False

    def _arrived(self, body: bytes) -> None:
        self.waiting.append(body)
        self._call.wake.set()
