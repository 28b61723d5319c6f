"""Opens a cache directory: locks it, removes a dead process's leftovers, reconciles index and files."""

from __future__ import annotations

import gc
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from cache.disk.catalog import Catalog
from cache.disk.codec import PLAIN
from cache.disk.folder import Folder

from .catalog_repair import reconcile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cache.disk.codec import Codec
    from cache.names.identity import Identity
    from cache.names.marks import ErasureProgress

    from .index import SnapshotIndex

_log = structlog.get_logger("turnkeep.cache")

#: An index with more snapshots than this is excluded from garbage collection (`gc.freeze`).
_MANY_ROWS: Final = 10_000


@dataclass(slots=True)
class OpenDirectory:
    """An open directory, made by `open_directory`. Folder and catalog then belong to the write queue."""

    folder: Folder
    catalog: Catalog
    index: SnapshotIndex
    #: The tokens per block of every model that has snapshots, by its identity's digest.
    identities: dict[bytes, int]
    #: Those of the identities that the catalog lists: all, unless it could not be written.
    noted: set[bytes]
    #: How far erasures are carried out here, by log of requests.
    erased: list[ErasureProgress]
    #: Marks of snapshots for which `erased` may be wrong: they may have come from a copy or a backup.
    put_back: frozenset[bytes]
    #: How many files went to quarantine during the opening.
    rejected: int
    quarantined_bytes: int
    free_bytes: int

    def close(self) -> None:
        """Close the catalog, and unlock the directory."""
        self.catalog.close()
        self.folder.close()


def open_directory(
    directory: Path, identity: Identity | None, model: str, clock: Callable[[], float], codec: Codec = PLAIN
) -> OpenDirectory:
    """Lock a directory, build its index, and repair the catalog if it differs from the files. Blocking.

    A store gives its model's identity and name, which the catalog lists; a command gives None.

    Raises `DirectoryLockedError`, `SealedError`, `OSError`.
    """
    folder = Folder(directory, codec)
    own = {} if identity is None else {identity.digest(): identity.block_tokens}
    with ExitStack() as stack:
        stack.callback(folder.close)
        folder.claim()
        if leftovers := folder.clear_tmp():
            _log.info("unfinished_snapshots_removed", files=leftovers)
        with _rarely_collecting():
            with ThreadPoolExecutor(1) as beside:  # SQLite checks its file without the GIL
                names = beside.submit(folder.names)
                catalog = Catalog(folder)
                stack.callback(catalog.close)
            is_certain = False
            with suppress(sqlite3.Error):  # a full disk
                is_certain = catalog.take_certainty()
            index, rejected, adopted, marks = reconcile(folder, catalog, names.result(), clock)
            if not is_certain:
                folder.clear_quarantine()
                marks = index.marks()
            if index.stored > _MANY_ROWS:
                gc.freeze()  # a collection of the index would stop every thread for 0.2 s
        if index.stored and not own.keys() <= (catalog.identities() | adopted).keys():
            # Logged once, as the catalog lists the identity from now on.
            _log.warning(
                "kv_of_other_settings_is_not_used",
                snapshots=index.stored,
                size_bytes=index.stored_bytes,
                why="it has another model, kv_bits, dtype or code: sessions are prefilled again; these"
                " snapshots stay until they are the least recently used, or turnkeep cache prune",
            )
        with suppress(sqlite3.Error):  # a full disk
            if not marks:
                catalog.note_erased(())
            if identity is not None:
                catalog.note_identities(own.items(), model)
        noted = catalog.identities()
        opened = OpenDirectory(
            folder,
            catalog,
            index,
            noted | adopted | own,
            set(noted),
            catalog.erased(),
            marks,
            rejected,
            folder.quarantined_bytes(),
            folder.free_bytes(),
        )
        stack.pop_all()  # both stay open
        return opened


@contextmanager
def _rarely_collecting() -> Iterator[None]:
    """Disable the garbage collector in the block: it would scan the growing index again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
