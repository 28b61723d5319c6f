"""A start: lock the directory, clear what a process that died has left, bring index and files together."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from .catalog import Catalog, reconcile
from .folder import Folder

if TYPE_CHECKING:
    from pathlib import Path

    from .index import Row
    from .pins import Pin

_log = structlog.get_logger("turnkeep.cache")


@dataclass(slots=True)
class Opened:
    """What a start has found; folder and catalog are open, and the writer's from here on."""

    folder: Folder
    catalog: Catalog
    rows: list[Row]
    pins: list[Pin]
    rejected: int
    quarantined_bytes: int
    free_bytes: int


def open_directory(directory: Path, identity: bytes, model: str) -> Opened:
    """Lock a directory and read what is in it. Blocking. Raises `DirectoryLockedError`, `OSError`."""
    folder = Folder(directory)
    catalog = None
    try:
        leftovers = folder.clear_tmp()
        if leftovers:
            _log.info("unfinished_snapshots_removed", files=leftovers)
        catalog = Catalog(folder)
        rows, rejected = reconcile(folder, catalog)
        if model:
            with suppress(sqlite3.Error):  # a name for lists only
                catalog.name_model(identity, model)
        return Opened(
            folder,
            catalog,
            rows,
            catalog.pins(),
            rejected,
            folder.quarantined_bytes(),
            folder.free_bytes(),
        )
    except BaseException:
        if catalog is not None:
            catalog.close()
        folder.close()
        raise
