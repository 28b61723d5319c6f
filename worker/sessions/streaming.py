"""Publishes one answer's chunks, and publishes old ones again before they expire in the token stream."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from anyio import Lock, sleep
from msgspec.structs import replace

from turnkeep_client.messages import Chunk, Generated, encode, joined
from worker.process.clock import time
from worker.process.concurrency import task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from turnkeep_client.messages import Result
    from turnkeep_client.subjects import SessionKey
    from worker.wire.chunks import PublishedChunks

    from .pending import PendingRequest
    from .services import Services

#: Chunks are published again after this fraction of the time for which the token stream keeps them.
_COPY_AT: Final = 0.5
#: How often to look whether the first chunk is still there: the token stream is limited in size too.
_LOOK_S: Final = 10.0
#: Chunks that are published again are joined up to this size; a single chunk is rarely larger.
_COPY_BYTES: Final = 2**16


class AnswerStream:
    """Publishes the chunks of one answer. Event loop only.

    Chunks are published again before they expire, and if others took the place of the first one: clients skip
    those that they know, and a worker that resumes the answer finds all chunks that clients have seen.
    """

    def __init__(
        self,
        services: Services,
        key: SessionKey,
        pending: PendingRequest,
        published: PublishedChunks,
        base: str,
        warnings: tuple[str, ...],
    ) -> None:
        """`published` has the chunks that are in the token stream already.

        The first chunk names `base`, the digest of the session before the answer, and has the `warnings`.
        """
        self._chunks = services.journal.chunks
        self._ttl_s = services.token_ttl_s
        self._key = key
        self._pending = pending
        self._base = base
        self._warnings = warnings
        self._said = list(published.chunks)
        # By the wall clock, as the server's: the monotonic one stands still while a machine sleeps.
        # No chunk is older than the request.
        self._said_s = min(pending.stored.timestamp(), time())
        self._first_seq, self._last_seq = published.first_seq, published.last_seq
        self._resumes = bool(published.chunks)
        self._is_heard = True
        self._lock = Lock(fast_acquire=True)

    async def publish(self, chunk: Chunk) -> bool:
        """Publish the next chunk; return whether the token stream takes the answer's chunks.

        Publishes nothing once the stream has refused one. Raises `FencedError` if another worker has
        published a chunk of this answer or ended it.
        """
        async with self._lock:
            await self._copy_old()
            if not self._said:
                self._said_s = time()
            chunk = replace(chunk, seq=self._pending.seq, warnings=() if chunk.i else self._warnings)
            await self._publish(chunk)
            self._said.append(chunk)
            return self._is_heard

    @asynccontextmanager
    async def keep_available(self) -> AsyncIterator[None]:
        """Publish old chunks again while the block runs, also if an answer that pauses has no new ones.

        Raises `FencedError`.
        """
        async with task_group() as tasks:
            tasks.start_soon(self._keep)
            yield
            async with self._lock:  # a chunk whose publication is cancelled would seem another worker's
                tasks.cancel_scope.cancel()

    async def _keep(self) -> None:
        while True:
            await sleep(min(_COPY_AT * self._ttl_s / 2, _LOOK_S))
            async with self._lock:
                if self._first_seq and not await self._chunks.is_there(self._first_seq):
                    self._said_s = -math.inf
                await self._copy_old()

    async def _copy_old(self) -> None:
        if self._said and time() - self._said_s > _COPY_AT * self._ttl_s:
            self._said = list(_batches(self._said))
            self._said_s = time()
            for copy in self._said:
                await self._publish(copy)

    async def seal(self) -> None:
        """Prevent all workers from publishing a later chunk. Raises `FencedError`."""
        pending = self._pending
        await self._chunks.seal(
            self._key, pending.id or "", pending.seq, self._last_seq, server=pending.server
        )

    async def _publish(self, chunk: Chunk) -> None:
        if self._is_heard:
            pending = self._pending
            seq = await self._chunks.publish(
                *(self._key, pending.id or "", chunk, self._last_seq),
                server=pending.server,
                base=self._base,
                resumes=self._resumes,
            )
            self._resumes = False
            self._is_heard, self._last_seq = seq > 0, seq or self._last_seq
            self._first_seq = self._first_seq if chunk.i else seq


def unpublished_text(result: Result, published: PublishedChunks) -> Chunk | None:
    """Return the end of an answer's text that was not published, although all of its tokens were.

    The chunk may be empty. Returns None if tokens are missing in `published`, or for another kind of result.
    """
    chunks, tokens = published.chunks, result.tokens if isinstance(result, Generated) else ()
    # Only if all chunks before it are there: a client that misses chunks reads the result instead.
    if not isinstance(result, Generated) or published.num_tokens != len(tokens):
        return None
    text = result.text[sum(len(chunk.text) for chunk in chunks) :]
    reasoning = result.reasoning[sum(len(chunk.reasoning) for chunk in chunks) :]
    return Chunk(len(tokens), (), text, reasoning=reasoning)


def _batches(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    """Join consecutive chunks up to `_COPY_BYTES`."""
    run: list[Chunk] = []
    size_bytes = 0
    for chunk in chunks:
        chunk_bytes = len(encode(chunk))
        if run and size_bytes + chunk_bytes > _COPY_BYTES:
            yield joined(run)
            run, size_bytes = [], 0
        run.append(chunk)
        size_bytes += chunk_bytes
    yield joined(run)
