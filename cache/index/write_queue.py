"""The write queue: snapshots that wait for the writer thread, limited in bytes, and the count of snapshots.

A snapshot is QUEUED, then WRITING, and ends DURABLE, FAILED or ABANDONED. The thread runs jobs from the
queue. Everything else runs on the event loop: it gets a callback after each job, and only it changes the
counts. So

    accepted = durable + sum(dropped) + failed + cancelled + in_flight

always holds on the event loop.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import structlog

from cache.disk.disk_work import DiskWork, FreedSpace, Write, WriteState
from cache.disk.io_threads import IoThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cache.disk.disk_work import DropReason
    from cache.disk.format import EncodedSnapshot
    from cache.disk.rows import SnapshotRow
    from cache.names.marks import ErasureProgress
    from cache.names.snapshot import Name

    from .directory import OpenDirectory
    from .nodes import Node

_log = structlog.get_logger("turnkeep.cache")

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0


def _nothing(_: object = None) -> None:
    pass


@dataclass(slots=True)
class Counts:
    """Counts snapshots by outcome. Belongs to the event loop."""

    accepted: int = 0
    durable: int = 0
    dropped: dict[str, int] = field(default_factory=Counter)
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    in_flight_bytes: int = 0
    written_bytes: int = 0


class WriteQueue:
    """The event loop's interface to the writer thread."""

    def __init__(self, opened: OpenDirectory, *, queue_bytes: int, monotonic: Callable[[], float]) -> None:
        self.counts = Counts()
        self.queue_bytes = queue_bytes
        #: Whether the store closes: then no further snapshot is accepted.
        self.is_closing = False
        #: Bytes of snapshots that the caller has in memory and will save later; they take room in the queue.
        self.announced_bytes = 0
        #: Bytes of files that are no longer in the index, but still on disk.
        self.unlinking_bytes = 0
        #: Free bytes of the file system and bytes in quarantine, measured after each job, so that the event
        #: loop need not query the disk.
        self.free_bytes = opened.free_bytes
        self.quarantined_bytes = opened.quarantined_bytes
        #: Called on the event loop once per write, after its end.
        self.on_end: Callable[[Node, Write], None] = lambda *_: None
        #: Called on the event loop after each removal of files.
        self.on_removed: Callable[[FreedSpace], None] = lambda _: None
        self._disk = DiskWork(opened.folder, opened.catalog, opened.noted)
        self.monotonic = monotonic
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._in_flight: dict[Node, Write] = {}
        self._loop = asyncio.get_running_loop()
        self._thread = IoThreads("writer", 1)

    @property
    def paused(self) -> bool:
        """Whether writing is paused after a failure, or has ended. Safe on any thread."""
        return self._disk.has_failed or self.monotonic() < self._paused_until

    @property
    def is_idle(self) -> bool:
        """Whether no write is queued or running."""
        return not self.counts.in_flight_bytes

    def vacant_bytes(self) -> int:
        """Return how many bytes the queue accepts now; 0 while writing is paused. Safe on any thread."""
        taken_bytes = self.counts.in_flight_bytes + self.announced_bytes
        return 0 if self.paused else max(0, self.queue_bytes - taken_bytes)

    def spare_bytes(self) -> int:
        """Return how many bytes of lost snapshots may be saved again now: see `StoredKv.save`.

        They must leave half of the queue to new snapshots, unless the queue is empty.
        """
        return max(0, self.vacant_bytes() - (0 if self.is_idle else self.queue_bytes // 2))

    def skip(self, num_snapshots: int) -> None:
        """Count snapshots as dropped: the caller did not copy their KV, because the queue was too full."""
        self.drop("disk_error" if self.paused else "queue_full", num_snapshots)

    def drop(self, reason: DropReason, num_snapshots: int = 1) -> None:
        """Count snapshots that were dropped before they were queued."""
        self.counts.accepted += num_snapshots
        self.counts.dropped[reason] += num_snapshots

    def write(
        self, node: Node, tokens: bytes, encoded: EncodedSnapshot | None, fetched: Path | None = None
    ) -> None:
        """Queue the write of a snapshot or of a fetched file; the caller must have checked `vacant_bytes`.

        `tokens` are the snapshot's own, packed.
        """
        write = Write(node.row, tokens, encoded, fetched)
        self.counts.accepted += 1
        self.counts.in_flight += 1
        self.counts.in_flight_bytes += write.row.size_bytes
        self._in_flight[node] = write
        self._queue(partial(self._disk.write, write), lambda _: self._ended(node, write))

    def abandon(self, node: Node, reason: DropReason | Literal["cancelled"]) -> None:
        """Abandon a node's write, if any. The write counts as in flight until the thread takes it."""
        write = self._in_flight.get(node)
        if write is not None:
            write.abandon(reason)

    def free_memory(self) -> None:
        """Drop the queued snapshots, to free their memory on the device.

        Their nodes stay in the index until the thread takes them from the queue. The snapshot that is being
        written keeps its memory until the write ends.
        """
        for write in self._in_flight.values():
            if write.state is WriteState.QUEUED:
                write.abandon("memory")

    def unlink(self, rows: list[SnapshotRow], *, quarantined: bool = False) -> None:
        """Queue the removal of files and rows; with `quarantined` also of their copies in quarantine.

        Never waits, and does not count against the queue's limit in bytes.
        """
        freed = FreedSpace(sum(row.size_bytes for row in rows))
        self.unlinking_bytes += freed.removed_bytes
        work = partial(self._disk.unlink, rows, quarantined=quarantined)
        self._queue(partial(self._disk.measured, freed, work), lambda _: self._unlinked(freed))

    def measure(self) -> None:
        """Measure the disk soon; every job does, so this queues an empty one if none is waiting."""
        if not self._thread.num_waiting:
            self._queue(_nothing)

    def use(self, used: int, digests: Sequence[bytes]) -> None:
        """Queue a change of the catalog that stores the time at which snapshots were used together."""
        if digests:
            uses = [(used, digest) for digest in digests]
            self._queue(partial(self._disk.use, uses))

    def note_identity(self, identity: bytes, block: int, model: str) -> None:
        """Queue adding a new model identity to the catalog's list of identities that have snapshots."""
        if identity not in self._disk.noted:
            self._queue(partial(self._disk.note_identity, identity, block, model))

    def note_erased(self, erased: ErasureProgress) -> None:
        """Queue a change of the catalog that stores how far a log's erasures are carried out."""
        self._queue(partial(self._disk.note_erased, erased))

    def erase(self, is_of: Callable[[Name], bool]) -> asyncio.Future[bool | None]:
        """Queue `DiskWork.erase`, which erases what is left of snapshots after their `unlink`.

        The future's result is whether certainly none is left, even after a crash; None after a fault of the
        program.
        """
        return self._result(partial(self._disk.erase, is_of))

    def clear(self) -> asyncio.Future[bool | None]:
        """Abandon every write, and queue the erasure of all files and rows; the result is that of `erase`."""
        for write in self._in_flight.values():
            write.abandon("cancelled")
        return self._result(partial(self._disk.erase, None))

    def _queue(self, work: Callable[[], Any], done: Callable[[Any], None] = _nothing) -> None:
        """Queue `work` for the thread; then `done` gets its result, None after a fault of the program."""
        self._thread.submit(partial(self._run, work, done))

    def _result(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        result: asyncio.Future[Any] = self._loop.create_future()
        # The waiting task may have been cancelled.
        self._queue(work, lambda found: None if result.done() else result.set_result(found))
        return result

    async def barrier(self) -> None:
        """Wait until all jobs queued before this call are done and counted."""
        await self._result(_nothing)

    async def drained(self, timeout_s: float | None = None) -> bool:
        """Wait until all earlier writes and removals are done; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.barrier()
                # The end of a write may queue removals: of superseded pieces, and of files that were
                # forgotten while they were renamed. Removals queue nothing more.
                await self.barrier()
        except TimeoutError:
            return False
        return True

    async def stop(self, timeout_s: float) -> bool:
        """Abandon the queued writes, and end the thread; False if the thread did not end in time."""
        for write in self._in_flight.values():
            write.abandon("cancelled")
        # The thread's last completions run on the event loop before this coroutine resumes.
        return await self._thread.close(timeout_s)

    def _finish(self, done: Callable[[Any], None], result: object, measured: tuple[int, int] | None) -> None:
        if measured is not None:
            self.free_bytes, self.quarantined_bytes = measured
        done(result)

    def _unlinked(self, freed: FreedSpace) -> None:
        self.unlinking_bytes -= freed.removed_bytes
        self.on_removed(freed)

    def _ended(self, node: Node, write: Write) -> None:
        del self._in_flight[node]
        self.counts.in_flight -= 1
        self.counts.in_flight_bytes -= write.row.size_bytes
        if write.state is WriteState.DURABLE:
            self.counts.written_bytes += write.row.size_bytes
            self._resume()
        if write.state is WriteState.FAILED:
            self.counts.failed += 1
            self._pause(write)
        elif write.abandoned == "cancelled":
            self.counts.cancelled += 1
        elif write.abandoned is not None:
            self.counts.dropped[write.abandoned] += 1
        else:
            self.counts.durable += 1
        self.on_end(node, write)

    def _pause(self, write: Write) -> None:
        """Pause writing, twice as long each time, and abandon the queued writes."""
        if self.paused:
            return  # this write had begun before the pause, and failed for the same reason
        if not self._pause_s:
            code = errno.errorcode.get(getattr(write.error, "errno", None) or 0, "")
            _log.error("snapshot_writes_failing", error=str(write.error), code=code)
        self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
        self._paused_until = self.monotonic() + self._pause_s
        for queued in self._in_flight.values():
            queued.abandon("disk_error")

    def _resume(self) -> None:
        if self._pause_s:
            _log.info("snapshot_writes_recovered")
        self._pause_s = self._paused_until = 0.0

    def _run(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run one job on the thread."""
        result = measured = None
        try:
            result = work()
            measured = self._disk.measure()
        except Exception:  # noqa: BLE001  # barriers wait for the job's end, removals need it
            if not self._disk.has_failed:
                _log.exception("snapshot_writer_failed")
            self._disk.has_failed = True
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._finish, done, result, measured)
