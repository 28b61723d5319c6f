"""Bring a directory's files and its index together at a start, and announce what did not agree.

The files are the truth. Of a run that ended in order the index knows all of them, and that it does is seen
fast, without a look at any file; else it is mended, a row at a time.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import structlog

from cache.disk.folder import digest_of, file_name
from cache.disk.format import is_lack
from cache.disk.header import read_header
from cache.disk.rows import Columns, Row
from cache.names.blocks import DIGEST_BYTES, TOKEN_BYTES, link
from cache.names.errors import DoubtfulSnapshotError

from .index import Index

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cache.disk.catalog import Catalog
    from cache.disk.folder import Folder

_log = structlog.get_logger("turnkeep.cache")


def reconcile(
    folder: Folder, catalog: Catalog, files: set[str], clock: Callable[[], float]
) -> tuple[Index, int]:
    """Make the index of what is stored. `files` are the folder's names; returns how many were doubtful, too.

    A file without a row is adopted by its header, with its mtime as its last use; one of another format
    version stays too, unused, until it is evicted. A row without a file is dropped. A file that is no
    snapshot goes to quarantine, and one whose parent is gone is removed, since nothing could ever match it.
    """
    stored, proofs = catalog.read()
    if _is_in_order(stored, proofs, files):
        index = Index(clock, stored)
        if index.is_whole:
            return index, 0
    stored, doubtful = _mended(folder, catalog, stored, proofs, files)
    return Index(clock, stored), doubtful


def _is_in_order(stored: Columns, proofs: Sequence[bytes | None], files: set[str]) -> bool:
    """Say whether every row is as it was put down, and there is a file for each, and no snapshot besides.

    SQLite has no checksums of its own. All rows are looked at: most of it is done by what goes through a
    column without Python's code.
    """
    try:
        if list(stored.proofs()) != list(proofs) or not set(map(type, stored.used)) <= {int}:
            return False
        if not _fits(stored):
            return False
    except (TypeError, ValueError):  # not even of the right types
        return False
    there = set(map(file_name, stored.digests))
    return there <= files and not any(map(digest_of, files - there))


def _mended(
    folder: Folder, catalog: Catalog, stored: Columns, proofs: Sequence[bytes | None], files: set[str]
) -> tuple[Columns, int]:
    rows = stored.rows()
    known = {
        row.digest: row
        for row, proof in zip(rows, proofs, strict=True)
        if _is_right(row, proof) and file_name(row.digest) in files
    }
    wrong = [row for row in rows if row.digest not in known]
    strays = {digest for file in files if (digest := digest_of(file)) is not None} - known.keys()
    adopted: dict[bytes, Row] = {}
    identities = set()
    doubtful = 0
    for digest in strays:
        try:
            path = folder.path(digest)
            header, stat = read_header(path), path.stat()
        except (DoubtfulSnapshotError, OSError) as error:
            if is_lack(error):
                raise
            folder.quarantine(digest)
            doubtful += 1
            _log.warning("snapshot_quarantined", digest=digest.hex(), reason=str(error))
            continue
        name, used = header.name, stat.st_mtime_ns // 1000
        identities.add(bytes.fromhex(header.identity))
        adopted[digest] = Row(
            digest, name.parent, name.start, name.tokens, stat.st_size, used, name.resumable
        )
    kept: dict[bytes, Row] = {}
    orphans = []
    for row in sorted((known | adopted).values(), key=attrgetter("start")):
        if row.start == 0 or row.parent in kept:
            kept[row.digest] = row
        else:
            orphans.append(row)
            folder.remove(row.digest)
    catalog.remove([*wrong, *orphans])
    unproved = {row.digest for row, proof in zip(rows, proofs, strict=True) if proof is None}
    catalog.put(row for row in kept.values() if row.digest in adopted or row.digest in unproved)
    if identities:
        catalog.note_identities(identities)
    lost = sum(row.digest not in strays for row in wrong)
    if adopted or doubtful or orphans or lost:
        # A kill between a file and its row leaves one adopted or lost: nothing to worry anybody with.
        say = _log.warning if doubtful or orphans else _log.info
        say("index_reconciled", adopted=len(adopted), lost=lost, doubtful=doubtful, orphans=len(orphans))
    return Columns.of(list(kept.values())), doubtful


def _is_right(row: Row, proof: bytes | None) -> bool:
    """Say whether a row is as it was put down; of an older version, whether it is named by its tokens.

    A file's length is looked at when it is read. One of another format version has no tokens to be told.
    """
    try:
        numbers = (row.start, row.size_bytes, row.used)
        if not all(isinstance(number, int) for number in numbers) or not _fits(Columns.of([row])):
            return False
        if proof is not None:
            return next(Columns.of([row]).proofs()) == proof
        return not row.tokens or link(row.parent, row.tokens) == row.digest
    except (AttributeError, TypeError, ValueError):  # not even of the right types
        return False


def _fits(stored: Columns) -> bool:
    """Say whether names are of their length, tokens are whole, and no position or size is below 0."""
    if {*map(len, stored.digests), *map(len, stored.parents)} - {DIGEST_BYTES}:
        return False
    if any(size % TOKEN_BYTES for size in set(map(len, stored.tokens))):
        return False
    return min(min(stored.starts, default=0), min(stored.sizes, default=0)) >= 0
