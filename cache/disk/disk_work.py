"""The work of the writer thread: writes and removes a directory's files, and changes its catalog.

All methods block, and belong to the thread. Nothing here knows the index, or the order of the jobs.
"""

from __future__ import annotations

import enum
import errno
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import structlog

from . import format as snapshot_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from cache.names.marks import ErasureProgress
    from cache.names.snapshot import Name

    from .catalog import Catalog
    from .folder import Folder
    from .format import EncodedSnapshot
    from .rows import SnapshotRow

T = TypeVar("T")

_log = structlog.get_logger("turnkeep.cache")

#: Why a snapshot was dropped.
#: queue_full: the disk is slower than the device. too_large: the snapshot exceeds a limit by itself.
#: disk_limit: the disk is full, and nothing can be evicted. disk_error: writing is paused after a failure, or
#: has ended.
#: no_parent: a piece of a tail whose earlier piece was lost. memory: the device needs the memory.
#: closing: the store closes.
DropReason = Literal["queue_full", "too_large", "disk_limit", "disk_error", "no_parent", "memory", "closing"]

#: Errors of a write when a folder was removed, or when something blocks a file's path.
_IN_THE_WAY: Final = frozenset({errno.ENOENT, errno.EISDIR, errno.ELOOP})


class WriteState(enum.Enum):
    """The state of a write. The last three are final."""

    QUEUED = "queued"
    WRITING = "writing"
    DURABLE = "durable"
    FAILED = "failed"
    ABANDONED = "abandoned"


@dataclass(slots=True, eq=False)
class Write:
    """One snapshot to be written.

    The event loop sets `abandoned`; the thread checks it before it starts to write and before it renames the
    file to its final name. A write that is abandoned after the rename still ends DURABLE; the event loop then
    removes the file, so that no abandoned snapshot comes back.
    """

    row: SnapshotRow
    tokens: bytes  # packed
    encoded: EncodedSnapshot | None  # None once abandoned, and for a fetched file
    fetched: Path | None = None  # a whole file from the remote tier
    state: WriteState = WriteState.QUEUED
    abandoned: DropReason | Literal["cancelled"] | None = None
    error: Exception | None = None

    def abandon(self, reason: DropReason | Literal["cancelled"]) -> None:
        """Abandon the write. Its tensors are freed at once, unless the thread is using them."""
        self.abandoned = self.abandoned or reason
        self.encoded = None  # set after `abandoned`: the thread reads the two in the other order


@dataclass(slots=True)
class FreedSpace:
    """What the removal of files did to the file system's free bytes, measured just before and after it."""

    removed_bytes: int
    before_bytes: int = 0
    after_bytes: int = 0

    @property
    def is_missing(self) -> bool:
        """Whether less than half of the removed bytes became free.

        Then a snapshot of the file system, or another link, keeps the files.
        """
        return self.after_bytes < self.enough_bytes

    @property
    def enough_bytes(self) -> int:
        """The free bytes if half of the removed bytes became free; a file system may free them later."""
        return self.before_bytes + self.removed_bytes // 2


class DiskWork:
    """Changes the files and the catalog of an open directory. Methods log errors and do not raise them."""

    def __init__(self, folder: Folder, catalog: Catalog, noted: Iterable[bytes]) -> None:
        #: Set after a fault of the program: then no further snapshots are written.
        self.has_failed = False
        self._folder = folder
        self._catalog = catalog
        self._catalog_failed = False
        #: Snapshots that could not be removed from the disk or the catalog.
        self._left: dict[bytes, SnapshotRow] = {}
        #: Identities in the catalog.
        self.noted = set(noted)
        #: False if the last erasure of everything failed in part.
        self._cleared = True

    def write(self, write: Write) -> None:
        """Write a snapshot, or move a fetched file into the directory, unless the write is abandoned.

        Ends with one of the final states in `write.state`: an exception only sets FAILED and `write.error`.
        """
        encoded = write.encoded
        if self._end_if_abandoned(write):
            if write.fetched is not None:
                write.fetched.unlink(missing_ok=True)
            return
        if self.has_failed:
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
                write.state, write.abandoned = WriteState.ABANDONED, "cancelled"
            return
        if write.state is WriteState.DURABLE:
            self._left.pop(digest, None)
            self._in_catalog(self._catalog.put, [write.row])

    def _place(self, write: Write, encoded: EncodedSnapshot | None) -> None:
        with self._folder.placing(write.row.digest) as path:
            if write.fetched is not None:  # not synced: a load detects damage by a power failure
                write.fetched.rename(path)
            elif encoded is not None:
                snapshot_format.write(encoded, path, self._folder.codec)
            if not self._end_if_abandoned(write):
                self._folder.place(path, write.row.digest)
                write.state = WriteState.DURABLE

    def _end_if_abandoned(self, write: Write) -> bool:
        if write.abandoned is None:
            return False
        write.state = WriteState.ABANDONED
        return True

    def use(self, uses: list[tuple[int, bytes]]) -> None:
        """Store times of last use: pairs of (microseconds since 1970, digest)."""
        self._in_catalog(self._catalog.use, uses)

    def note_erased(self, erased: ErasureProgress) -> None:
        """Store how far a log's erasures are carried out."""
        self._in_catalog(self._catalog.note_erased, [erased])

    def note_identity(self, identity: bytes, block: int, model: str) -> None:
        """Add a model identity to the catalog's list of identities that have snapshots."""
        if identity not in self.noted and self._in_catalog(
            partial(self._catalog.note_identities, name=model), [(identity, block)]
        ):
            self.noted.add(identity)

    def measured(self, freed: FreedSpace, work: Callable[[], None]) -> None:
        """Do `work`, which removes files; store the free bytes before and after it in `freed`."""
        with suppress(OSError):
            freed.before_bytes = self._folder.free_bytes()
        work()
        with suppress(OSError):
            freed.after_bytes = self._folder.free_bytes()

    def unlink(self, rows: list[SnapshotRow], *, quarantined: bool) -> None:
        """Remove files and rows; with `quarantined` also the copies in quarantine."""
        self._remove(rows)
        try:
            for row in rows if quarantined else ():
                self._folder.remove_quarantined(row.digest)
        except OSError as error:
            _log.error("snapshot_not_removed", digest=row.digest.hex(), error=str(error))

    def _remove(self, rows: list[SnapshotRow]) -> None:
        """Remove files and rows. If that fails, the next erasure or the next start tries again."""
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

    def erase(self, is_of: Callable[[Name], bool] | None) -> bool:
        """Erase what `unlink` may have left of the snapshots of which `is_of` is true; with None, everything.

        With `is_of` the caller must `unlink` the known snapshots before. Erases from quarantine, temporary
        files and SQLite's log too. Returns whether certainly none is left, even after a crash; never raises.
        """
        try:
            if is_of is None:
                self._cleared = False
                left = self._folder.clear()
                for name in left:
                    _log.error("snapshot_not_removed", digest=name)
                self._left.clear()
                clean = self._cleared = self._in_catalog(self._catalog.clear, []) and not left
            else:
                self._remove(self._left_of(is_of))
                self._folder.remove_quarantined_of(is_of)
                clean = self._cleared and not self._left_of(is_of)
            self._folder.clear_tmp()  # nothing is being written now
            self._folder.sync()
            return clean and not self.has_failed and self._catalog.purge_log()
        except Exception as error:  # noqa: BLE001  # the thread must go on
            _log.error("erasure_failed", error=str(error) or repr(error))
            return False

    def _left_of(self, is_of: Callable[[Name], bool]) -> list[SnapshotRow]:
        path, may_be = self._folder.path, self._folder.may_be
        return [row for row in self._left.values() if may_be(path(row.digest), is_of)]

    def measure(self) -> tuple[int, int] | None:
        """Return the free bytes of the file system and the bytes in quarantine; None if the disk fails."""
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
