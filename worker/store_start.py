"""Opens the worker's store of snapshots, or says in the log why it serves without one.

`App` calls it once the model is loaded.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import structlog

from cache.names.errors import CacheError
from cache.store import Store

from .process.concurrency import shielded

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from cache.store import Codec, Tier

    from .device.device import Device
    from .model_start import ModelStart
    from .process.constants import Constants
    from .process.datadir import DataDir
    from .process.settings import Settings

log = structlog.get_logger()


def _has_snapshots(settings: Settings, device: Device) -> bool:
    if settings.snapshots == "off":
        log.info("snapshots are off")
        return False
    if device.served.unsupported_cache is not None:
        log.warning(
            "serving without snapshots: this model has a kind of cache that cannot be kept on SSD",
            cache_class=device.served.unsupported_cache,
        )
        return False
    return True


async def open_store(
    settings: Settings,
    constants: Constants,
    model: ModelStart,
    directory: DataDir,
    codec: Codec,
    tier: Tier | None,
    stack: AsyncExitStack,
) -> Store | None:
    """Open the store of snapshots on disk; return None if it is off, or cannot be opened.

    The exit of `stack` closes the store, and removes its snapshots if they are temporary.
    """
    device = model.device
    if not _has_snapshots(settings, device):
        return None
    identity = await model.identity()
    try:
        store = await Store.open(
            directory.snapshots,
            identity=identity,
            layout=device.served.layout,
            max_bytes=settings.max_disk,
            queue_bytes=constants.writer_queue,
            min_free_bytes=settings.min_free_disk,
            model=model.loaded.name,
            codec=codec,
            tier=tier,
        )
    except (OSError, CacheError, sqlite3.Error) as error:
        log.error("serving without snapshots: they cannot be opened", reason=str(error))  # noqa: TRY400
        return None
    discard = settings.snapshots == "temporary"
    if discard and not await store.eraser.clear():
        log.warning("snapshots of an earlier run are still being removed")
    stack.push_async_callback(shielded, store.close, discard=discard)
    device.cut_snapshots(store.queue.vacant_bytes, store.queue.queue_bytes)
    return store
