"""Corrects a directory's catalog at a start, so that it agrees with the files, and logs the differences.

The files are right. After an orderly stop catalog and files agree, which is verified fast, without opening a
file; otherwise the catalog is repaired row by row.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from operator import attrgetter, ne
from typing import TYPE_CHECKING

import structlog

from cache.disk.format import is_lack
from cache.disk.header import read_header
from cache.disk.rows import SnapshotRow, columns, fit, is_right, proofs
from cache.names.errors import DoubtfulSnapshotError

from .index import SnapshotIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cache.disk.catalog import Catalog
    from cache.disk.codec import Codec
    from cache.disk.folder import Folder
    from cache.disk.rows import Columns

_log = structlog.get_logger("turnkeep.cache")


def reconcile(
    folder: Folder, catalog: Catalog, files: set[str], clock: Callable[[], float]
) -> tuple[SnapshotIndex, int, dict[bytes, int], frozenset[bytes]]:
    """Compare the catalog with the folder's `files`, repair the catalog, and build the index.

    Returns the index, the number of doubtful files, the models of adopted files (identities, with their
    tokens per block), and the marks of adopted files. If the catalog cannot be written, the index is right
    nevertheless, and the next start repairs the catalog.

    A file without a row gets one from its header, with its mtime as last use; files of another format
    version stay, unused, until they are evicted. A row without a file is dropped. A file that is not a
    snapshot goes to quarantine. A piece of a tail whose earlier pieces are missing is removed, since no
    search can find it.
    """
    with suppress(_CatalogDiffersError):
        return SnapshotIndex(clock, _verified(catalog, files, folder.codec)), 0, {}, frozenset()
    stored = [row for rows in catalog.read() for row in rows]
    stored, doubtful, identities, marks = _mended(folder, catalog, stored, files)
    return SnapshotIndex(clock, [columns(stored)]), doubtful, identities, marks


class _CatalogDiffersError(Exception):
    """A row is damaged or has no file, or a snapshot file has no row."""


def _verified(catalog: Catalog, files: set[str], codec: Codec) -> Iterator[Columns]:
    """Yield all rows, many at a time; raise `_CatalogDiffersError` unless all are intact, and fit the files.

    SQLite has no checksums of its own, so all rows are verified, by column, without Python code for each.
    """
    num_rows = 0
    for rows in catalog.read():
        try:
            fields = columns(rows)
            is_sound = not any(map(ne, proofs(fields), fields[-1])) and fit(fields)
        except (TypeError, ValueError):  # fields of wrong types
            is_sound = False
        if not is_sound or not codec.file_names(fields[0]) <= files:
            raise _CatalogDiffersError
        num_rows += len(rows)
        yield fields
    if num_rows != len(files) and num_rows != sum(codec.digest_of(name) is not None for name in files):
        raise _CatalogDiffersError


def _mended(
    folder: Folder, catalog: Catalog, rows: list[SnapshotRow], files: set[str]
) -> tuple[list[SnapshotRow], int, dict[bytes, int], frozenset[bytes]]:
    codec = folder.codec
    known = {row.digest: row for row in rows if is_right(row) and codec.file_name(row.digest) in files}
    wrong = [row for row in rows if row.digest not in known]
    strays = {digest for file in files if (digest := codec.digest_of(file)) is not None} - known.keys()
    adopted, identities = _adopted(folder, strays)
    doubtful = len(strays) - len(adopted)
    kept: dict[bytes, SnapshotRow] = {}
    orphans = []
    for row in sorted((known | adopted).values(), key=attrgetter("start")):
        if row.start == 0 or row.parent in kept or not _is_piece(folder, row):
            kept[row.digest] = row
        else:
            orphans.append(row)
            folder.remove(row.digest)
    _repair(catalog, [*wrong, *orphans], identities, [row for row in kept.values() if not row.proof])
    lost = sum(row.digest not in strays for row in wrong)
    if adopted or doubtful or orphans or lost:
        # A kill between the writes of a file and its row leads to adopted files and lost rows: no warning.
        say = _log.warning if doubtful or orphans else _log.info
        say("index_reconciled", adopted=len(adopted), lost=lost, doubtful=doubtful, orphans=len(orphans))
    return list(kept.values()), doubtful, identities, frozenset(row.mark for row in adopted.values())


def _is_piece(folder: Folder, row: SnapshotRow) -> bool:
    """Whether a snapshot is a piece of a tail, and not the first; also if its file is damaged."""
    try:
        return row.start % read_header(folder.path(row.digest), folder.codec).block_tokens != 0
    except (DoubtfulSnapshotError, OSError) as error:
        if is_lack(error):
            raise
        return True


def _adopted(folder: Folder, strays: set[bytes]) -> tuple[dict[bytes, SnapshotRow], dict[bytes, int]]:
    """Make rows for files without one; quarantine damaged files. Return the rows and the models."""
    adopted: dict[bytes, SnapshotRow] = {}
    identities: dict[bytes, int] = {}
    for digest in strays:
        try:
            path = folder.path(digest)
            header, stat = read_header(path, folder.codec), path.stat()
        except (DoubtfulSnapshotError, OSError) as error:
            if is_lack(error):
                raise
            folder.quarantine(digest)
            _log.warning("snapshot_quarantined", digest=digest.hex(), reason=str(error))
            continue
        if not header.is_foreign:
            identities[bytes.fromhex(header.identity)] = header.block_tokens
        adopted[digest] = SnapshotRow.of(digest, header.name, stat.st_size, stat.st_mtime_ns // 1000)
    return adopted, identities


def _repair(
    catalog: Catalog, wrong: list[SnapshotRow], identities: dict[bytes, int], lacking: list[SnapshotRow]
) -> None:
    try:
        catalog.remove(wrong)
        if identities:
            catalog.note_identities(
                identities.items()
            )  # before the rows, since a file with a row is not read again
        catalog.put(lacking)
    except sqlite3.Error as error:  # a full disk
        _log.error("index_not_written", error=str(error))
