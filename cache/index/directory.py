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
from cache.disk.write_queue import WriteQueue

from .catalog_repair import reconcile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cache.disk.codec import Codec
    from cache.disk.write_queue import Write
    from cache.names.marks import ErasureProgress

    from .index import Index
    from .nodes import Node

_log = structlog.get_logger("turnkeep.cache")

#: An index with more snapshots than this is excluded from garbage collection (`gc.freeze`).
_MANY_ROWS: Final = 10_000


@dataclass(slots=True)
class OpenDirectory:
    """The result of opening a directory. Folder and catalog are open, and belong to the writer from now on.

    `identities` are the model identities that have snapshots. `noted` are those that the catalog lists; if
    it could not be written, some are missing.
    """

    folder: Folder
    catalog: Catalog
    index: Index
    identities: set[bytes]
    noted: set[bytes]
    erased: list[ErasureProgress]
    rejected: int
    quarantined_bytes: int
    free_bytes: int

    def writer(
        self, on_end: Callable[[Write[Node]], None], *, queue_bytes: int, monotonic: Callable[[], float]
    ) -> WriteQueue[Node]:
        """Start the writer thread for this directory, and return its interface."""
        return WriteQueue(
            self.folder,
            self.catalog,
            queue_bytes=queue_bytes,
            free_bytes=self.free_bytes,
            quarantined_bytes=self.quarantined_bytes,
            noted=self.noted,
            on_end=on_end,
            monotonic=monotonic,
        )


def open_directory(
    directory: Path, identity: bytes, model: str, clock: Callable[[], float], codec: Codec = PLAIN
) -> OpenDirectory:
    """Lock a directory, build its index, and repair the catalog if it differs from the files. Blocking.

    Raises `DirectoryLockedError`, `SealedError`, `OSError`.
    """
    folder = Folder(directory, codec)
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
            index, rejected, adopted = reconcile(folder, catalog, names.result(), clock)
            if index.stored > _MANY_ROWS:
                gc.freeze()  # a collection of the index would stop every thread for 0.2 s
        with suppress(sqlite3.Error):  # a full disk
            catalog.note_identities([identity])
            if model:
                catalog.name_model(identity, model)
        noted = set(catalog.identities())
        opened = OpenDirectory(
            folder,
            catalog,
            index,
            noted | adopted | {identity},
            noted,
            catalog.erased(),
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
