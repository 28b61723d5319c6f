"""The writer: one thread that writes to the disk, a queue limited in bytes, and the count of snapshots.

A snapshot is QUEUED, then WRITING, and ends DURABLE, FAILED, CANCELLED or DROPPED. The thread runs jobs from
the queue. Everything else runs on the event loop: it gets a callback after each job, and only it changes the
counts. So

    accepted = durable + sum(dropped) + failed + cancelled + in_flight

always holds on the event loop. The module knows files and catalog rows, but not what snapshots are used for.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import queue
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, Literal, Protocol, TypeVar

import structlog

from . import format as snapshot_format
from .rows import PARTIAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from cache.names.identity import Identity
    from cache.names.marks import ErasureProgress
    from cache.names.snapshot import ModelLayout

    from .catalog import Catalog
    from .folder import Folder
    from .format import EncodedSnapshot
    from .rows import Row

T = TypeVar("T")

_log = structlog.get_logger("turnkeep.cache")

#: Why a snapshot was dropped.
#: queue_full: the disk is slower than the device. too_large: the snapshot exceeds a limit by itself.
#: disk_limit: no room, and nothing to evict. disk_error: writing is paused after a failure, or has ended.
#: no_parent: the prefix before it was lost. memory: the device needs the memory. closing: the store closes.
DropReason = Literal["queue_full", "too_large", "disk_limit", "disk_error", "no_parent", "memory", "closing"]

#: Errors of a write when a folder was removed, or when something blocks a file's path.
_IN_THE_WAY: Final = frozenset({errno.ENOENT, errno.EISDIR, errno.ELOOP})

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0


class WriteState(enum.Enum):
    """The state of a write. The last four are final."""

    QUEUED = "queued"
    WRITING = "writing"
    DURABLE = "durable"
    DROPPED = "dropped"
    FAILED = "failed"
    CANCELLED = "cancelled"


class _Node(Protocol):
    """The part of an index node's interface that the writer uses."""

    @property
    def row(self) -> Row:
        """The snapshot's row in the catalog."""

    @property
    def size_bytes(self) -> int:
        """The size of the snapshot's file."""


NodeT = TypeVar("NodeT", bound=_Node)


@dataclass(slots=True, eq=False)
class Write(Generic[NodeT]):
    """One snapshot to be written.

    The event loop sets `abandoned`; the writer checks it before it starts to write and before it renames the
    file to its final name. A write that is abandoned after the rename still ends DURABLE; the event loop then
    removes the file, so that no abandoned snapshot comes back.
    """

    node: NodeT  # used on the event loop only
    row: Row
    encoded: EncodedSnapshot | None  # None once abandoned, and for a fetched file
    size_bytes: int
    fetched: Path | None = None  # a whole file from the remote tier
    state: WriteState = WriteState.QUEUED
    abandoned: DropReason | Literal["cancelled"] | None = None
    error: Exception | None = None

    def abandon(self, reason: DropReason | Literal["cancelled"]) -> None:
        """Abandon the write. Its tensors are freed at once, unless the writer is using them."""
        self.abandoned = self.abandoned or reason
        self.encoded = None  # set after `abandoned`: the writer reads the two in the other order


@dataclass(slots=True, eq=False)
class Erasure:
    """A job that erases all traces of the `packed` tokens from the disk; with None, everything.

    After the job, `clean` says whether no file in the directory contains any of these tokens, even after a
    crash.
    """

    packed: bytes | None
    clean: bool = False


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Job:
    """One job: `work` runs on the writer thread, then `done` on the event loop."""

    work: Callable[[], object]
    done: Callable[[], None] = _nothing


@dataclass(slots=True)
class FreedSpace:
    """What the removal of files did to the file system's free bytes, measured just before and after it."""

    removed_bytes: int
    before_bytes: int = 0
    after_bytes: int = 0

    @property
    def is_missing(self) -> bool:
        """Whether less than half came back: a snapshot of the file system or another link keeps the files."""
        return self.after_bytes < self.enough_bytes

    @property
    def enough_bytes(self) -> int:
        """Free bytes from which on the removal has had its effect, perhaps later."""
        return self.before_bytes + self.removed_bytes // 2


@dataclass(slots=True)
class Counts:
    """Counts snapshots by outcome. Belongs to the event loop."""

    accepted: int = 0
    durable: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    in_flight_bytes: int = 0
    written_bytes: int = 0


class WriteQueue(Generic[NodeT]):
    """The event loop's interface to the writer thread. Calls `on_end` on the event loop once per write."""

    def __init__(
        self,
        folder: Folder,
        catalog: Catalog,
        *,
        queue_bytes: int,
        free_bytes: int,
        quarantined_bytes: int,
        noted: Iterable[bytes],
        on_end: Callable[[Write[NodeT]], None],
        monotonic: Callable[[], float],
    ) -> None:
        self.counts = Counts()
        self.queue_bytes = queue_bytes
        #: Bytes of files that are no longer in the index, but still on disk.
        self.unlinking_bytes = 0
        #: Free bytes of the file system and bytes in quarantine, measured after each job, so that the event
        #: loop need not query the disk.
        self.free_bytes = free_bytes
        self.quarantined_bytes = quarantined_bytes
        #: Called on the event loop after each removal of files.
        self.on_removed: Callable[[FreedSpace], None] = lambda _: None
        self._folder = folder
        self._catalog = catalog
        self._on_end = on_end
        self._monotonic = monotonic
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._in_flight: dict[NodeT, Write[NodeT]] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._catalog_failed = False
        #: Whether a job ended with a fault of the program: then the thread writes no further snapshots.
        self._failed = False
        #: Snapshots that could not be removed from the disk or the catalog. Belongs to the thread.
        self._left: dict[bytes, Row] = {}
        #: Identities in the catalog. Only the thread adds to them.
        self._noted = set(noted)
        #: False if the last erasure of everything failed in part. Belongs to the thread.
        self._cleared = True
        self._thread = threading.Thread(target=self._run, name="turnkeep-writer", daemon=True)
        self._thread.start()

    @property
    def paused(self) -> bool:
        """Whether writing is paused after a failure, or has ended. Safe on any thread."""
        return self._failed or self._monotonic() < self._paused_until

    @property
    def room_bytes(self) -> int:
        """How many bytes the queue accepts now. Safe on any thread: reads plain integers."""
        return 0 if self.paused else max(0, self.queue_bytes - self.counts.in_flight_bytes)

    def drop(self, reason: DropReason, num_snapshots: int = 1) -> None:
        """Count snapshots that were dropped before they were queued."""
        self.counts.accepted += num_snapshots
        self.counts.dropped[reason] += num_snapshots

    def write(self, node: NodeT, encoded: EncodedSnapshot | None, fetched: Path | None = None) -> None:
        """Queue the write of a snapshot or of a fetched file; the caller must have checked `room_bytes`."""
        write = Write(node, node.row, encoded, node.size_bytes, fetched)
        self.counts.accepted += 1
        self.counts.in_flight += 1
        self.counts.in_flight_bytes += write.size_bytes
        self._in_flight[node] = write
        self._jobs.put(_Job(partial(self._write, write), partial(self._ended, write)))

    def abandon(self, node: NodeT, reason: DropReason | Literal["cancelled"]) -> None:
        """Abandon a node's write, if any. The write counts as in flight until the thread takes it."""
        write = self._in_flight.get(node)
        if write is not None:
            write.abandon(reason)

    def abandon_queued(self, reason: DropReason) -> None:
        """Abandon all queued writes.

        Their nodes stay in the index until the thread takes them from the queue.
        """
        for write in self._in_flight.values():
            if write.state is WriteState.QUEUED:
                write.abandon(reason)

    def unlink(self, rows: list[Row], *, quarantined: bool = False) -> None:
        """Queue the removal of files and rows; with `quarantined` also of their copies in quarantine.

        Never waits, and does not count against the queue's limit in bytes.
        """
        self._put_removal(rows, partial(self._unlink, rows, quarantined=quarantined))

    def make_gaps(self, rows: list[Row], *, needed: bool = False) -> None:
        """Queue the removal of these rows' files; the rows stay, with a size of 0. Never waits.

        If the rows cannot be written, the files stay until the next start, unless their space is `needed`.
        """
        self._put_removal(rows, partial(self._make_gaps, rows, needed=needed))

    def measure(self) -> None:
        """Measure the disk soon; every job does, so this queues an empty one if none is waiting."""
        if self._jobs.empty():
            self._jobs.put(_Job(_nothing))

    def _put_removal(self, rows: list[Row], work: Callable[[], None]) -> None:
        freed = FreedSpace(sum(row.size_bytes for row in rows))
        self.unlinking_bytes += freed.removed_bytes
        self._jobs.put(_Job(partial(self._removing, work, freed), partial(self._unlinked, freed)))

    def shorten(
        self, row: Row, layout: ModelLayout, identity: Identity, done: Callable[[int | None], None]
    ) -> None:
        """Queue a job that rewrites a file without the KV of layers with windows. Never waits.

        `done` is called with the file's new size, or None after a failure. If the process dies before
        the row is written, the row wrongly says that the file is whole; shortening the file again corrects
        the row.
        """
        sizes: list[int] = []

        def ended() -> None:
            self.counts.written_bytes += sum(sizes)
            done(sizes[0] if sizes else None)

        self._jobs.put(_Job(partial(self._shorten, row, layout, identity, sizes), ended))

    def use(self, used: int, digest: bytes) -> None:
        """Queue a change of the catalog that stores a snapshot's time of last use."""
        self._jobs.put(_Job(partial(self._in_catalog, self._catalog.use, [(used, digest)])))

    def note_identity(self, identity: bytes, model: str) -> None:
        """Queue adding a new model identity to the catalog's list of identities that have snapshots."""
        if identity not in self._noted:
            self._jobs.put(_Job(partial(self._note_identity, identity, model)))

    def note_erased(self, erased: ErasureProgress) -> None:
        """Queue a change of the catalog that stores how far a log's erasures are carried out."""
        self._jobs.put(_Job(partial(self._in_catalog, self._catalog.note_erased, [erased])))

    def erase(self, packed: bytes) -> Erasure:
        """Queue the erasure of all traces of these tokens. Call `unlink` for their files first."""
        erasure = Erasure(packed)
        self._jobs.put(_Job(partial(self._erase, erasure)))
        return erasure

    def clear(self) -> Erasure:
        """Abandon every write, and queue the erasure of all files and rows."""
        for write in self._in_flight.values():
            write.abandon("cancelled")
        erasure = Erasure(None)
        self._jobs.put(_Job(partial(self._erase, erasure)))
        return erasure

    async def barrier(self) -> None:
        """Wait until all jobs queued before this call are done and counted."""
        passed: asyncio.Future[None] = self._loop.create_future()
        # The waiting task may have been cancelled.
        self._jobs.put(_Job(_nothing, lambda: None if passed.done() else passed.set_result(None)))
        await passed

    async def stop(self, timeout_s: float) -> bool:
        """Abandon the queued writes, and end the thread; False if the thread did not end in time.

        The thread is a daemon: a hanging system call does not delay the end of the process.
        """
        for write in self._in_flight.values():
            write.abandon("cancelled")
        self._jobs.put(None)
        # The thread's last completions run on the event loop before this coroutine resumes.
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _finish(self, job: _Job, measured: tuple[int, int] | None) -> None:
        if measured is not None:
            self.free_bytes, self.quarantined_bytes = measured
        job.done()

    def _ended(self, write: Write[NodeT]) -> None:
        self._count(write)
        self._on_end(write)

    def _unlinked(self, freed: FreedSpace) -> None:
        self.unlinking_bytes -= freed.removed_bytes
        self.on_removed(freed)

    def _count(self, write: Write[NodeT]) -> None:
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

    def _pause(self, write: Write[NodeT]) -> None:
        """Pause writing, twice as long each time, and abandon the queued writes."""
        if self.paused:
            return  # this write had begun before the pause, and failed for the same reason
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

    # The methods below run on the thread.

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one job; False at the end. A separate function, since its return frees the job's tensors."""
        job = self._jobs.get()
        if job is None:
            return False
        measured = None
        try:
            job.work()
            measured = self._measured()
        except Exception:  # noqa: BLE001  # the thread must go on: barriers wait for it, removals need it
            if not self._failed:
                _log.exception("snapshot_writer_failed")
            self._failed = True
        try:
            self._loop.call_soon_threadsafe(self._finish, job, measured)
        except RuntimeError:  # the event loop is closed
            return False
        return True

    def _write(self, write: Write[NodeT]) -> None:
        encoded = write.encoded
        if self._end_if_abandoned(write):
            if write.fetched is not None:
                write.fetched.unlink(missing_ok=True)
            return
        if self._failed:
            write.state = WriteState.FAILED
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
        except Exception as error:  # noqa: BLE001  # the thread must go on
            write.state, write.error = WriteState.FAILED, error
            if write.fetched is not None:  # an erasure removed the fetched file: no fault of the disk
                write.state, write.abandoned = WriteState.CANCELLED, "cancelled"
            return
        if write.state is WriteState.DURABLE:
            self._left.pop(digest, None)
            self._in_catalog(self._catalog.put, [write.row])

    def _place(self, write: Write[NodeT], encoded: EncodedSnapshot | None) -> None:
        with self._folder.placing(write.row.digest) as path:
            if write.fetched is not None:  # not synced: a load detects damage by a power failure
                write.fetched.rename(path)
            elif encoded is not None:
                snapshot_format.write(encoded, path, self._folder.codec)
            if not self._end_if_abandoned(write):
                self._folder.place(path, write.row.digest)
                write.state = WriteState.DURABLE

    def _end_if_abandoned(self, write: Write[NodeT]) -> bool:
        if write.abandoned is None:
            return False
        write.state = WriteState.CANCELLED if write.abandoned == "cancelled" else WriteState.DROPPED
        return True

    def _note_identity(self, identity: bytes, model: str) -> None:
        if identity not in self._noted and self._in_catalog(
            partial(self._catalog.note_identities, name=model), [identity]
        ):
            self._noted.add(identity)

    def _removing(self, work: Callable[[], None], freed: FreedSpace) -> None:
        with suppress(OSError):
            freed.before_bytes = self._folder.free_bytes()
        work()
        with suppress(OSError):
            freed.after_bytes = self._folder.free_bytes()

    def _unlink(self, rows: list[Row], *, quarantined: bool) -> None:
        self._remove(rows)
        try:
            for row in rows if quarantined else ():
                self._folder.remove_quarantined(row.digest)
        except OSError as error:
            _log.error("snapshot_not_removed", digest=row.digest.hex(), error=str(error))

    def _make_gaps(self, rows: list[Row], *, needed: bool) -> None:
        # A start adopts a file whose row has the size 0; a row whose file is missing would break the chain.
        put = partial(self._catalog.put, durable=True)
        if self._in_catalog(put, [row._replace(size_bytes=0) for row in rows]) or needed:
            self._remove_files(rows)

    def _shorten(self, row: Row, layout: ModelLayout, identity: Identity, sizes: list[int]) -> None:
        path = self._folder.path(row.digest)
        try:
            encoded = snapshot_format.shortened(path, row, layout, identity, self._folder.codec)
            if encoded is not None:
                with self._folder.placing(row.digest) as fresh:
                    snapshot_format.write(encoded, fresh, self._folder.codec)
                    self._folder.place(fresh, row.digest)
            sizes.append(path.stat().st_size)
        except Exception as error:  # noqa: BLE001  # the thread must go on; the file stays valid
            _log.warning("snapshot_not_shortened", digest=row.digest.hex(), error=str(error) or repr(error))
            return
        changed = row._replace(size_bytes=sizes[0], resumable=row.resumable | PARTIAL)
        self._in_catalog(self._catalog.put, [changed])

    def _remove(self, rows: list[Row]) -> None:
        """Remove files and rows. If that fails, the next erasure or the next start tries again."""
        self._remove_files(rows)
        if not self._in_catalog(self._catalog.remove, rows):
            self._left.update((row.digest, row) for row in rows)

    def _remove_files(self, rows: list[Row]) -> None:
        for row in rows:
            try:
                self._folder.remove(row.digest)
                self._left.pop(row.digest, None)
            except OSError as error:
                if row.digest not in self._left:
                    _log.error("snapshot_not_removed", digest=row.digest.hex(), error=str(error))
                self._left[row.digest] = row

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
            job.clean = clean and not self._failed and self._catalog.purge_log()
        except Exception as error:  # noqa: BLE001  # the thread must go on
            _log.error("erasure_failed", error=str(error) or repr(error))

    def _measured(self) -> tuple[int, int] | None:
        try:
            return self._folder.free_bytes(), self._folder.quarantined_bytes()
        except OSError:  # the directory is gone: the next write reports it
            return None

    def _in_catalog(self, change: Callable[[list[T]], None], rows: list[T]) -> bool:
        """Change the catalog; False if that fails. Logs the first of several failures in a row."""
        try:
            change(rows)
        except Exception as error:  # noqa: BLE001  # the thread must go on, whatever SQLite raises
            if not self._catalog_failed:
                _log.error("index_not_written", error=str(error) or repr(error))
            self._catalog_failed = True
        else:
            self._catalog_failed = False
        return not self._catalog_failed
