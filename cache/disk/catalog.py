"""The catalog: the SQLite file that lists all snapshots, with their last use.

Used while a store opens, then by the writer thread alone. If the catalog and the snapshot files differ, the
files are right: a lost or damaged catalog is rebuilt from their headers, without the times of last use.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from cache.names.marks import ErasureProgress

from . import private
from .fsync import sync
from .rows import SnapshotRow, columns, proofs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .folder import Folder

_log = structlog.get_logger("turnkeep.cache")

#: Increase with each change of the tables: an index of another version is made again from the files.
_SCHEMA_VERSION: Final = 10
#: Errors of the disk, not of the file's contents: the file is kept.
_DISKS_FAULTS: Final = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)
_SCHEMA: Final = (
    """
    CREATE TABLE IF NOT EXISTS snapshot (
        digest BLOB PRIMARY KEY, parent BLOB NOT NULL, start INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL, used INTEGER NOT NULL, resumable INTEGER NOT NULL, mark BLOB NOT NULL,
        proof BLOB
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS model (
        identity BLOB PRIMARY KEY, name TEXT NOT NULL, block INTEGER NOT NULL
    )
    """,
    "CREATE TABLE IF NOT EXISTS erased (log TEXT PRIMARY KEY, seq INTEGER, time REAL, stored REAL)",
    "CREATE TABLE IF NOT EXISTS life (stamp TEXT NOT NULL)",
)
#: Suffixes of the files that SQLite makes beside the catalog.
_SIDE_FILES: Final = ("-wal", "-shm", "-journal")
#: Rows that are read at a time: all at once would need three times the memory of the index.
_TOGETHER: Final = 4096
_PUT: Final = "INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


class Catalog:
    """Stores the rows of snapshots in an SQLite file. Methods raise `sqlite3.Error`.

    Callers log errors and continue: an error can lose times of last use, but no snapshots.
    """

    def __init__(self, folder: Folder) -> None:
        self._path = folder.catalog
        self._last_stamp, self._stamp = folder.stamps
        self._codec = folder.codec
        #: Whether changes outlive the process.
        self._is_lasting = True
        self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        """Open the SQLite file; replace it if it is damaged or of an unknown version."""
        existed = self._path.exists()
        db = self._connect()
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            sound = db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"
            if sound and version == (_SCHEMA_VERSION if existed else 0):
                return self._prepare(db, version)
            reason = f"version {version}" if sound else "damaged"
        except sqlite3.DatabaseError as error:
            reason = str(error)
            if error.sqlite_errorcode & 0xFF in _DISKS_FAULTS:
                db.close()
                return self._in_memory(error)
        db.close()
        _log.warning("index_discarded", path=str(self._path), reason=reason)
        self._remove_file()
        db = self._connect()
        try:
            return self._prepare(db, 0)
        except sqlite3.DatabaseError as error:
            db.close()
            return self._in_memory(error)

    def _in_memory(self, error: sqlite3.Error) -> sqlite3.Connection:
        """Open a database in memory instead of the file, which cannot be written (on a full disk, say).

        Copies the readable part of the file to memory. Later changes are lost when the process ends.
        """
        _log.error("index_not_written", path=str(self._path), error=str(error))
        self._is_lasting = False
        db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        uri = self._path.absolute().as_uri()
        with suppress(sqlite3.Error), closing(sqlite3.connect(f"{uri}?immutable=1", uri=True)) as source:
            source.backup(db)
        for table in _SCHEMA:
            db.execute(table)
        db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
        return db

    def _remove_file(self) -> None:
        for suffix in ("", *_SIDE_FILES):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def _connect(self) -> sqlite3.Connection:
        with suppress(OSError):  # SQLite reports the error itself; its log gets the same mode
            os.close(private.opener(str(self._path), os.O_RDWR | os.O_CREAT))
        # OpenDirectory on one thread, then used by the writer alone.
        db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        # Otherwise SQLite maps its log's index into memory, and on a full copy-on-write disk (btrfs) a write
        # to that memory raises SIGBUS, which ends the process. Other processes read a copy: see `survey`.
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        return db

    def _prepare(self, db: sqlite3.Connection, version: int) -> sqlite3.Connection:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        # For macOS: there a plain fsync leaves the written bytes in the disk's own cache.
        db.execute("PRAGMA fullfsync=ON")
        # The default of 1000 pages would let the log grow to 4 MiB, which counts against no limit.
        db.execute("PRAGMA wal_autocheckpoint=100")
        # SQLite's default page cache of 2 MiB is not worth its memory: the system caches the file too.
        db.execute("PRAGMA cache_size=-256")
        # Rows contain digests of tokens, which `forget` must erase.
        db.execute("PRAGMA secure_delete=ON")
        if not version:  # a file that exists opens without a write, so on a full disk too
            for table in _SCHEMA:
                db.execute(table)
            db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
        return db

    def read(self) -> Iterator[list[SnapshotRow]]:
        """Read all rows, many at a time, without verifying them; `catalog_repair` verifies them."""
        made = partial(
            tuple.__new__, SnapshotRow
        )  # as `SnapshotRow._make`, without a Python call for each row
        found = self._db.execute("SELECT * FROM snapshot")
        while rows := found.fetchmany(_TOGETHER):
            yield list(self._codec.rows(list(map(made, rows))))

    def identities(self) -> dict[bytes, int]:
        """Return the tokens per block of models that may have snapshots here, by the identity's digest."""
        return dict(self._db.execute("SELECT identity, block FROM model"))

    def note_identities(self, identities: Iterable[tuple[bytes, int]], name: str = "") -> None:
        """Add models that have snapshots: identity, tokens per block. A `name` replaces an earlier one."""
        with self._transaction() as db:
            rows = [(identity, name, block) for identity, block in identities]
            db.executemany("INSERT OR IGNORE INTO model VALUES (?, ?, ?)", rows)
            if name:
                named = [(name, identity) for identity, _, _ in rows]
                db.executemany("UPDATE model SET name = ? WHERE identity = ?", named)

    def erased(self) -> list[ErasureProgress]:
        """Read how far this cache has carried out the erasures in each log of requests."""
        return [ErasureProgress(*row) for row in self._db.execute("SELECT * FROM erased")]

    def note_erased(self, erased: Iterable[ErasureProgress]) -> None:
        """Store how far this cache has carried out the erasures in each of these logs of requests.

        Also records that this holds for all snapshots in the directory: see `take_certainty`.
        """
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO erased VALUES (?, ?, ?, ?)", erased)
            db.execute("DELETE FROM life")
            db.execute("INSERT INTO life VALUES (?)", (self._stamp,))

    def take_certainty(self) -> bool:
        """Return whether `erased` holds for all snapshots in the directory, and delete the record of that.

        False if no `note_erased` has made the record since the last call, or if the directory is a copy or
        was restored from a backup: then it may have snapshots that were erased before.
        """
        found = self._db.execute("SELECT * FROM life").fetchall()
        with self._transaction() as db:
            db.execute("DELETE FROM life")
        return found == [(self._last_stamp,)]

    def purge_log(self) -> bool:
        """Remove deleted rows from SQLite's write-ahead log too; False if some may still be on the disk."""
        if not self._is_lasting:  # the file, which may have the rows, is of no use: the next start makes it
            try:
                self._remove_file()
                sync(self._path.parent, through=True)
            except OSError as error:
                _log.warning("index_still_not_written", path=str(self._path), error=str(error))
                return False
            return True
        # The log still has the pages from before the deletion.
        if self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            return False
        with suppress(FileNotFoundError):  # the directory was removed
            # SQLite syncs the bytes that it writes, but not the truncation of the log.
            sync(self._path.with_name(f"{self._path.name}-wal"), through=True)
        return True

    def clear(self, _: Iterable[object] = ()) -> None:
        """Delete all rows."""
        with self._transaction() as db:
            db.execute("DELETE FROM snapshot")

    def put(self, rows: Iterable[SnapshotRow]) -> None:
        """Add or replace the rows of snapshots."""
        rows = list(rows)
        with self._transaction() as db:
            db.executemany(_PUT, map(self._codec.hidden_row, rows, proofs(columns(rows))))

    def remove(self, rows: Iterable[SnapshotRow]) -> None:
        """Delete rows."""
        with self._transaction() as db:
            hidden = ((self._codec.hidden(row.digest),) for row in rows)
            db.executemany("DELETE FROM snapshot WHERE digest = ?", hidden)

    def use(self, uses: Iterable[tuple[int, bytes]]) -> None:
        """Store times of last use: pairs of (microseconds since 1970, digest)."""
        with self._transaction() as db:
            hidden = ((used, self._codec.hidden(digest)) for used, digest in uses)
            db.executemany("UPDATE snapshot SET used = ? WHERE digest = ?", hidden)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block in a transaction; roll it back after an exception.

        With SQLite's `synchronous` NORMAL a power failure may lose a commit.
        """
        db = self._db
        db.execute("BEGIN")
        try:
            yield db
            db.execute("COMMIT")
        finally:
            # SQLite may have rolled back already (disk full); an open transaction would fail all later ones.
            if db.in_transaction:
                db.execute("ROLLBACK")
