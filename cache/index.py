"""What is stored, and in which order it was last used.

`Index` lives in memory and belongs to the event loop. `Catalog` is its SQLite file, used while opening and
then by the writer thread alone. The files are the truth: a catalog that is lost or wrong is made anew.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from .blocks import TOKEN_BYTES, num_common
from .format import DoubtfulSnapshotError, Name, read_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .folder import Folder

_log = structlog.get_logger("turnkeep.cache")

_SCHEMA_VERSION: Final = 1
_SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS snapshot (
        digest BLOB PRIMARY KEY, parent BLOB NOT NULL, start INTEGER NOT NULL, tokens BLOB NOT NULL,
        size_bytes INTEGER NOT NULL, used INTEGER NOT NULL
    ) WITHOUT ROWID
"""


class Row(NamedTuple):
    """A snapshot as the catalog keeps it. `used` is microseconds since 1970, and never repeats."""

    digest: bytes
    parent: bytes
    start: int
    tokens: bytes
    size_bytes: int
    used: int

    @property
    def name(self) -> Name:
        """Which KV it holds."""
        return Name(self.parent, self.start, self.tokens)


@dataclass(slots=True, eq=False)
class Entry:
    """A snapshot that is stored, or on its way there. Belongs to the event loop."""

    digest: bytes
    name: Name
    size_bytes: int
    used: int
    durable: bool = False
    #: Loads that need the file. It is not evicted meanwhile, and `doomed` waits for the last of them.
    pins: int = 0
    doomed: bool = False

    @property
    def parent(self) -> bytes:
        """The name of the prefix that it continues."""
        return self.name.parent

    @property
    def usable(self) -> bool:
        """Whether a match may count on it."""
        return self.durable and not self.doomed

    @property
    def held(self) -> bool:
        """Whether eviction must leave it alone for now."""
        return self.pins > 0 or not self.durable

    @property
    def row(self) -> Row:
        """What the catalog keeps of it."""
        return Row(self.digest, self.parent, self.name.start, self.name.tokens, self.size_bytes, self.used)


class Index:
    """The tree of snapshots of all tenants and models in the directory.

    Entries are in order of use, and every child stands before its parent: using a snapshot uses its
    whole chain. So eviction can take them as they come, and meets every leaf before its parent.
    """

    def __init__(self, clock: Callable[[], float], rows: Iterable[Row] = ()) -> None:
        self._clock = clock
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._children: dict[bytes, list[tuple[bytes, bytes]]] = {}
        self._now = 0
        self.stored = 0
        self.stored_bytes = 0
        for row in _in_order(list(rows)):
            self.add(Entry(row.digest, row.name, row.size_bytes, row.used), use=False)
            self.settle(self._entries[row.digest])
            self._now = max(self._now, row.used)

    def __iter__(self) -> Iterator[Entry]:
        """Go through the entries, least recently used first, children before their parents."""
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: bytes) -> Entry | None:
        """Find an entry, on its way or stored."""
        return self._entries.get(digest)

    def num_children(self, digest: bytes) -> int:
        """Count the entries that continue `digest`."""
        return len(self._children.get(digest, ()))

    def children(self, digest: bytes) -> list[Entry]:
        """List the entries that continue `digest`."""
        return [self._entries[child] for _, child in self._children.get(digest, ())]

    def next_use(self) -> int:
        """Give the next point on the clock of uses: the time of day, but never twice and never backwards."""
        self._now = max(self._now + 1, int(self._clock() * 1e6))
        return self._now

    def add(self, entry: Entry, *, use: bool = True) -> None:
        """Take in a new entry, as the most recently used one unless told otherwise."""
        self._entries[entry.digest] = entry
        insort(self._children.setdefault(entry.parent, []), (entry.name.tokens, entry.digest))
        if use:
            self.use(entry)

    def settle(self, entry: Entry) -> None:
        """Note that an entry's file is in place."""
        entry.durable = True
        self.stored += 1
        self.stored_bytes += entry.size_bytes

    def remove(self, entry: Entry) -> None:
        """Forget an entry."""
        del self._entries[entry.digest]
        siblings = self._children[entry.parent]
        del siblings[bisect_left(siblings, (entry.name.tokens, entry.digest))]
        if not siblings:
            del self._children[entry.parent]
        if entry.durable:
            self.stored -= 1
            self.stored_bytes -= entry.size_bytes

    def use(self, entry: Entry) -> None:
        """Note that an entry, and with it its chain, was used now."""
        used = self.next_use()
        link: Entry | None = entry
        while link is not None:
            link.used = used
            self._entries.move_to_end(link.digest)
            link = self._entries.get(link.parent)

    def longest(self, parent: bytes, packed: bytes) -> tuple[Entry, int] | None:
        """Find the stored child of `parent` that shares the most leading tokens with `packed`, and how many.

        Siblings are sorted by their tokens, so it is one of the two next to where `packed` would stand.
        """
        siblings = self._children.get(parent, [])
        at = bisect_left(siblings, (packed,))
        best: tuple[Entry, int] | None = None
        for side in (range(at, len(siblings)), range(at - 1, -1, -1)):
            entries = (self._entries[siblings[i][1]] for i in side)
            entry = next((entry for entry in entries if entry.usable), None)
            num_tokens = 0 if entry is None else num_common(entry.name.tokens, packed)
            if entry is not None and num_tokens > (best[1] if best else 0):
                best = entry, num_tokens
        return best

    def shadowed(self, entry: Entry) -> list[Entry]:
        """List the siblings whose tokens are a beginning of this entry's: it holds all they hold.

        A step finds the last sibling up to `bound`; the part of it that fits bounds the next one.
        """
        siblings = self._children[entry.parent]
        found = []
        bound = entry.name.tokens[:-TOKEN_BYTES]
        while bound and (at := bisect_left(siblings, (bound + b"\0",))):
            tokens, digest = siblings[at - 1]
            fits = num_common(tokens, bound) * TOKEN_BYTES
            if fits == len(tokens):
                found.append(self._entries[digest])
                fits -= TOKEN_BYTES
            bound = bound[:fits]
        return found

    def covered(self, parent: bytes, packed: bytes) -> bool:
        """Tell whether an entry, on its way or stored, holds all of `packed` after `parent`."""
        siblings = self._children.get(parent, [])
        at = bisect_left(siblings, (packed,))
        return at < len(siblings) and siblings[at][0].startswith(packed)

    def below(self, entry: Entry) -> list[Entry]:
        """List all entries that need this one, children before their parents."""
        found = [entry]
        for parent in found:
            found += self.children(parent.digest)
        return found[:0:-1]


def _in_order(rows: list[Row]) -> list[Row]:
    """Sort rows by use, a parent as its most recently used descendant, children before their parents."""
    used = {row.digest: row.used for row in rows}
    for row in sorted(rows, key=lambda row: -row.start):
        if row.parent in used:
            used[row.parent] = max(used[row.parent], used[row.digest])
    return sorted(
        (row._replace(used=used[row.digest]) for row in rows), key=lambda row: (row.used, -row.start)
    )


class Catalog:
    """The SQLite file. Its errors cost recency, never a snapshot: the caller logs them and goes on."""

    def __init__(self, folder: Folder) -> None:
        self._path = folder.catalog
        self._db = self._open()

    def _open(self) -> sqlite3.Connection:
        """Open the file; one that is damaged or of another version is removed and made anew."""
        existed = self._path.exists()
        db = self._connect()
        try:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            sound = db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"
            if sound and version == (_SCHEMA_VERSION if existed else 0):
                return self._prepare(db)
            reason = f"version {version}" if sound else "damaged"
        except sqlite3.DatabaseError as error:
            reason = str(error)
        db.close()
        _log.warning("index_discarded", path=str(self._path), reason=reason)
        for suffix in ("", "-wal", "-shm", "-journal"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        return self._prepare(self._connect())

    def _connect(self) -> sqlite3.Connection:
        # Opened on one thread, then used by the writer alone.
        return sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)

    def _prepare(self, db: sqlite3.Connection) -> sqlite3.Connection:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        # SQLite's own 1000 pages would let the log grow to 4 MiB beside every limit.
        db.execute("PRAGMA wal_autocheckpoint=100")
        db.execute(_SCHEMA)
        db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
        return db

    def rows(self) -> list[Row]:
        """Read everything."""
        return [Row(*row) for row in self._db.execute("SELECT * FROM snapshot")]

    def put(self, rows: Iterable[Row]) -> None:
        """Add or replace rows."""
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, ?, ?, ?)", rows)

    def remove(self, rows: Iterable[Row]) -> None:
        """Delete rows; a parent inherits the use of its child, so that recency outlives the leaf."""
        with self._transaction() as db:
            for row in rows:
                db.execute("DELETE FROM snapshot WHERE digest = ?", (row.digest,))
                db.execute("UPDATE snapshot SET used = max(used, ?) WHERE digest = ?", (row.used, row.parent))

    def use(self, uses: Iterable[tuple[int, bytes]]) -> None:
        """Note the times of use of leaves, as (used, digest); their chains follow when the rows are read."""
        with self._transaction() as db:
            db.executemany("UPDATE snapshot SET used = max(used, ?) WHERE digest = ?", uses)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


class _Transaction:
    """BEGIN, then COMMIT, or ROLLBACK on an exception."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> sqlite3.Connection:
        self._db.execute("BEGIN")
        return self._db

    def __exit__(self, kind: object, *_: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")


def reconcile(folder: Folder, catalog: Catalog) -> tuple[list[Row], int]:
    """Bring catalog and files together at a start; announce what was adopted, lost or given up.

    Returns the snapshots, and how many files were doubtful.

    A file without a row is adopted by its header, with its mtime as its last use. A row without a file
    is dropped. A file that is no snapshot goes to quarantine, and one whose parent is gone is removed,
    since nothing could ever match it.
    """
    rows = {row.digest: row for row in catalog.rows()}
    files = folder.scan()
    known = {
        digest: row
        for digest, row in rows.items()
        # SQLite has no checksums of its own: a row must prove its name as a file does.
        if row.name.digest == digest and files.get(digest, (-1,))[0] == row.size_bytes
    }
    adopted: dict[bytes, Row] = {}
    doubtful = 0
    for digest in files.keys() - known.keys():
        size_bytes, mtime_ns = files[digest]
        try:
            name = read_name(folder.path(digest))
        except (DoubtfulSnapshotError, OSError) as error:
            folder.quarantine(digest)
            doubtful += 1
            _log.warning("snapshot_quarantined", digest=digest.hex(), reason=str(error))
            continue
        adopted[digest] = Row(digest, name.parent, name.start, name.tokens, size_bytes, mtime_ns // 1000)
    kept: dict[bytes, Row] = {}
    orphans = []
    for row in sorted((known | adopted).values(), key=lambda row: row.start):
        if row.start == 0 or row.parent in kept:
            kept[row.digest] = row
        else:
            orphans.append(row)
            folder.remove(row.digest)
    catalog.remove([*(rows[digest] for digest in rows.keys() - known.keys()), *orphans])
    catalog.put(row for row in adopted.values() if row.digest in kept)
    lost = len(rows.keys() - files.keys())
    if adopted or doubtful or orphans or lost:
        _log.warning(
            "index_reconciled", adopted=len(adopted), lost=lost, doubtful=doubtful, orphans=len(orphans)
        )
    return list(kept.values()), doubtful
