"""The writer: one thread that owns the disk, a queue bounded by bytes, and the count of every snapshot.

A snapshot is QUEUED, then WRITING, and ends DURABLE, FAILED, CANCELLED or DROPPED. All but the thread's
own loop belongs to the event loop: completions come back to it, and the counts change nowhere else. So

    accepted = durable + sum(dropped) + failed + cancelled + in_flight

holds whenever the event loop looks. Knows files and rows; not what a snapshot is good for.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import queue
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import structlog

from . import format as snapshot_format

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.index.nodes import Node

    from .catalog import Catalog
    from .folder import Folder
    from .format import EncodedSnapshot
    from .rows import Pin, Row

T = TypeVar("T")

_log = structlog.get_logger("turnkeep.cache")

#: Why a snapshot was given up.
#: queue_full: the disk is slower than the device. too_large: it could never fit a limit. disk_limit: no
#: room, and nothing that may be evicted. disk_error: writes failed a moment ago. no_parent: the prefix that
#: it continues was lost. memory: the device needs what it takes there. closing: it came too late.
DropReason = Literal["queue_full", "too_large", "disk_limit", "disk_error", "no_parent", "memory", "closing"]

#: What a write meets where somebody has removed a folder, or put something else in the place of a file.
_IN_THE_WAY: Final = frozenset({errno.ENOENT, errno.EISDIR, errno.ELOOP})

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0


class WriteState(enum.Enum):
    """Where a snapshot is on its way to the disk. The last four are final."""

    QUEUED = "queued"
    WRITING = "writing"
    DURABLE = "durable"
    DROPPED = "dropped"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Write:
    """One snapshot to be written.

    `abandoned` is set by the event loop, and looked at by the writer before it starts and before it
    renames. A write that is past that when it is abandoned still ends DURABLE, and the event loop, which
    knows better, removes the file: so nothing that was abandoned comes back.
    """

    node: Node  # the event loop's; the writer reads `row`
    row: Row
    encoded: EncodedSnapshot | None  # None once it is abandoned
    size_bytes: int
    state: WriteState = WriteState.QUEUED
    abandoned: DropReason | Literal["cancelled"] | None = None
    error: Exception | None = None

    def abandon(self, reason: DropReason | Literal["cancelled"]) -> None:
        """Give it up. Its tensors are free at once, unless the writer is at it: it may hang for long."""
        self.abandoned = self.abandoned or reason
        self.encoded = None  # after `abandoned`, which the writer reads behind this


@dataclass(slots=True, eq=False)
class PinNote:
    """A note that prefixes were pinned or unpinned; `made` says that it is on disk."""

    pins: list[Pin]
    on: bool
    made: bool = False


@dataclass(slots=True, eq=False)
class Erasure:
    """The removal of all that is left of a run of packed tokens, or of everything (None).

    `clean` says, once it is done, that no file of the directory has any of it, for good.
    """

    packed: bytes | None
    clean: bool = False


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Job:
    """What the thread is to do, and what the event loop does once that is done."""

    work: Callable[[], object]
    done: Callable[[], None] = _nothing


@dataclass(slots=True)
class Counts:
    """What became of the snapshots that were offered. Belongs to the event loop."""

    accepted: int = 0
    durable: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    in_flight_bytes: int = 0
    written_bytes: int = 0


class Writer:
    """The event loop's end of the thread. `on_end` is called there once for every write that ends."""

    def __init__(
        self,
        folder: Folder,
        catalog: Catalog,
        *,
        queue_bytes: int,
        free_bytes: int,
        quarantined_bytes: int,
        on_end: Callable[[Write], None],
        monotonic: Callable[[], float],
    ) -> None:
        self.counts = Counts()
        self.queue_bytes = queue_bytes
        #: Bytes of files that are removed from the index, but not yet from the disk.
        self.unlinking_bytes = 0
        #: What the file system had left after the last job that was settled, and what the quarantine took:
        #: so nobody else has to ask the disk.
        self.free_bytes = free_bytes
        self.quarantined_bytes = quarantined_bytes
        self._folder = folder
        self._catalog = catalog
        self._on_end = on_end
        self._monotonic = monotonic
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._in_flight: dict[Node, Write] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._catalog_failed = False
        #: What could not be removed, off the disk or out of the catalog. The thread's.
        self._left: dict[bytes, Row] = {}
        #: Whether the last removal of everything, if there was one, left nothing.
        self._cleared = True
        self._thread = threading.Thread(target=self._run, name="turnkeep-writer", daemon=True)
        self._thread.start()

    @property
    def paused(self) -> bool:
        """Whether writes failed a moment ago. Safe on any thread."""
        return self._monotonic() < self._paused_until

    @property
    def room_bytes(self) -> int:
        """How much the queue would take now. Safe on any thread: it reads plain integers."""
        return 0 if self.paused else max(0, self.queue_bytes - self.counts.in_flight_bytes)

    def drop(self, reason: DropReason, num_snapshots: int = 1) -> None:
        """Count snapshots that are given up before they reach the queue."""
        self.counts.accepted += num_snapshots
        self.counts.dropped[reason] += num_snapshots

    def write(self, node: Node, encoded: EncodedSnapshot) -> None:
        """Queue a snapshot; the caller has checked that there is room."""
        write = Write(node, node.row, encoded, encoded.size_bytes)
        self.counts.accepted += 1
        self.counts.in_flight += 1
        self.counts.in_flight_bytes += encoded.size_bytes
        self._in_flight[node] = write
        self._jobs.put(_Job(partial(self._write, write), partial(self._ended, write)))

    def abandon(self, node: Node, reason: DropReason | Literal["cancelled"]) -> None:
        """Give up a node's write, wherever it is. It stays in flight until the writer has let go of it."""
        write = self._in_flight.get(node)
        if write is not None:
            write.abandon(reason)

    def abandon_queued(self, reason: DropReason) -> None:
        """Give up what the thread has not begun with. It leaves the index when the thread comes to it."""
        for write in self._in_flight.values():
            if write.state is WriteState.QUEUED:
                write.abandon(reason)

    def unlink(self, rows: list[Row], *, quarantined: bool = False) -> None:
        """Queue the removal of files and their index rows, and of the files `quarantined`.

        Never waits, and does not count against the queue's bytes.
        """
        size_bytes = sum(row.size_bytes for row in rows)
        self.unlinking_bytes += size_bytes
        work = partial(self._unlink, rows, quarantined=quarantined)
        self._jobs.put(_Job(work, partial(self._unlinked, size_bytes)))

    def use(self, used: int, digest: bytes) -> None:
        """Queue a note of when a snapshot was used."""
        self._jobs.put(_Job(partial(self._in_catalog, self._catalog.use, [(used, digest)])))

    def pin(self, pins: list[Pin], *, on: bool) -> PinNote:
        """Queue a note that prefixes were pinned, or unpinned."""
        note = PinNote(pins, on)
        self._jobs.put(_Job(partial(self._note, note)))
        return note

    def erase(self, packed: bytes) -> Erasure:
        """Queue a search for what is left of tokens whose files were unlinked before, and its removal."""
        erasure = Erasure(packed)
        self._jobs.put(_Job(partial(self._erase, erasure)))
        return erasure

    def clear(self) -> Erasure:
        """Give up every write, wherever it is, and queue the removal of all files and rows."""
        for write in self._in_flight.values():
            write.abandon("cancelled")
        erasure = Erasure(None)
        self._jobs.put(_Job(partial(self._erase, erasure)))
        return erasure

    async def barrier(self) -> None:
        """Wait until everything that was queued before is settled, and has been counted."""
        passed: asyncio.Future[None] = self._loop.create_future()
        # Whoever waits may be cancelled before.
        self._jobs.put(_Job(_nothing, lambda: None if passed.done() else passed.set_result(None)))
        await passed

    async def stop(self, timeout_s: float) -> bool:
        """Give up what is still queued and end the thread; False where it did not end in time.

        The thread is a daemon: one that hangs in a system call cannot hold up the end of the process.
        """
        for write in self._in_flight.values():
            write.abandon("cancelled")
        self._jobs.put(None)
        # What the thread posts before it ends runs on the event loop before this resumes.
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _finish(self, job: _Job, measured: tuple[int, int] | None) -> None:
        if measured is not None:
            self.free_bytes, self.quarantined_bytes = measured
        job.done()

    def _ended(self, write: Write) -> None:
        self._count(write)
        self._on_end(write)

    def _unlinked(self, size_bytes: int) -> None:
        self.unlinking_bytes -= size_bytes

    def _count(self, write: Write) -> None:
        del self._in_flight[write.node]
        self.counts.in_flight -= 1
        self.counts.in_flight_bytes -= write.size_bytes
        if write.state is WriteState.DURABLE:
            self.counts.written_bytes += write.size_bytes
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

    def _pause(self, write: Write) -> None:
        """Stop taking snapshots for a while, longer each time, and give up what is queued."""
        if self.paused:
            return  # the writer had taken it before it saw that it was given up: the same burst
        if not self._pause_s:
            code = errno.errorcode.get(getattr(write.error, "errno", None) or 0, "")
            _log.error("snapshot_writes_failing", error=str(write.error), code=code)
        self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
        self._paused_until = self._monotonic() + self._pause_s
        for queued in self._in_flight.values():
            queued.abandon("disk_error")

    def _resume(self) -> None:
        if self._pause_s:
            _log.info("snapshot_writes_recovered")
        self._pause_s = self._paused_until = 0.0

    # From here on: the thread.

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Do one job; False for the end. Nothing here keeps its tensors: it may be long until the next."""
        job = self._jobs.get()
        if job is None:
            return False
        job.work()
        try:
            self._loop.call_soon_threadsafe(self._finish, job, self._measured())
        except RuntimeError:  # the event loop is closed: nobody is left to be told
            return False
        return True

    def _write(self, write: Write) -> None:
        encoded = write.encoded
        if self._end_if_abandoned(write) or encoded is None:
            return
        write.state = WriteState.WRITING
        digest = write.row.digest
        try:
            try:
                self._place(write, encoded)
            except OSError as error:
                if error.errno not in _IN_THE_WAY:
                    raise
                self._folder.repair(digest)
                self._place(write, encoded)
        except Exception as error:  # noqa: BLE001  # whatever it is, the thread must go on
            write.state, write.error = WriteState.FAILED, error
            return
        if write.state is WriteState.DURABLE:
            self._left.pop(digest, None)
            self._in_catalog(self._catalog.put, [write.row])

    def _place(self, write: Write, encoded: EncodedSnapshot) -> None:
        with self._folder.placing(write.row.digest) as path:
            snapshot_format.write(encoded, path)
            if not self._end_if_abandoned(write):
                self._folder.place(path, write.row.digest)
                write.state = WriteState.DURABLE

    def _end_if_abandoned(self, write: Write) -> bool:
        if write.abandoned is None:
            return False
        write.state = WriteState.CANCELLED if write.abandoned == "cancelled" else WriteState.DROPPED
        return True

    def _note(self, note: PinNote) -> None:
        change = self._catalog.pin if note.on else self._catalog.unpin
        note.made = self._in_catalog(change, note.pins) and self._catalog.is_lasting

    def _unlink(self, rows: list[Row], *, quarantined: bool) -> None:
        self._remove(rows)
        try:
            for row in rows if quarantined else ():
                self._folder.remove_quarantined(row.digest)
        except OSError as error:
            _log.error("snapshot_not_removed", digest=row.digest.hex(), error=str(error))

    def _remove(self, rows: list[Row]) -> None:
        """Remove files and rows. What stays is noted for an erasure; the next start finds it too."""
        for row in rows:
            try:
                self._folder.remove(row.digest)
                self._left.pop(row.digest, None)
            except OSError as error:
                if row.digest not in self._left:
                    _log.error("snapshot_not_removed", digest=row.digest.hex(), error=str(error))
                self._left[row.digest] = row
        if not self._in_catalog(self._catalog.remove, rows):
            self._left.update((row.digest, row) for row in rows)

    def _erase(self, job: Erasure) -> None:
        packed = job.packed
        try:
            if packed is None:
                self._cleared = False
                left = self._folder.clear()
                for name in left:
                    _log.error("snapshot_not_removed", digest=name)
                self._left.clear()
                clean = self._cleared = self._in_catalog(self._catalog.clear, []) and not left
            else:
                self._remove([row for row in self._left.values() if row.is_of(packed)])
                self._folder.remove_quarantined_of(packed)
                clean = self._cleared and not any(row.is_of(packed) for row in self._left.values())
            self._folder.clear_tmp()  # nothing is being written now
            self._folder.sync()
            job.clean = clean and self._catalog.purge_log()
        except Exception as error:  # noqa: BLE001  # the thread must go on
            _log.error("erasure_failed", error=str(error) or repr(error))

    def _measured(self) -> tuple[int, int] | None:
        try:
            return self._folder.free_bytes(), self._folder.quarantined_bytes()
        except OSError:  # the directory is gone: the next write says so
            return None

    def _in_catalog(self, change: Callable[[list[T]], None], rows: list[T]) -> bool:
        """Change the catalog. Its faults are announced once per episode; the next start makes it whole."""
        try:
            change(rows)
        except Exception as error:  # noqa: BLE001  # the thread must go on: SQLite lacks memory, say
            if not self._catalog_failed:
                _log.error("index_not_written", error=str(error) or repr(error))
            self._catalog_failed = True
        else:
            self._catalog_failed = False
        return not self._catalog_failed
