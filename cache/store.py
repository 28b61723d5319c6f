"""A running cache: opens a directory, and has the parts through which the worker uses it.

Belongs to the event loop, which owns the index and all counts; blocking work runs on the writer thread and
on I/O threads. The store knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from .disk.codec import PLAIN, Codec
from .disk.disk_work import WriteState
from .disk.folder import may_hold
from .disk.stored_past import StoredPast
from .disk.tier import SharedDirectory, Tier
from .index.directory import open_directory
from .index.eraser import Eraser, ErasureResult
from .index.prefixes import KnownPrefix, PrefixMatch
from .index.quota import Quota
from .index.remote import RemoteCounts, TierAccess
from .index.remover import Remover
from .index.stats import SnapshotStats
from .index.stored_kv import StoredKv
from .index.write_queue import Counts, WriteQueue
from .names.errors import KeyFileError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .disk.disk_work import Write
    from .index.directory import OpenDirectory
    from .index.nodes import Node
    from .names.identity import Identity
    from .names.snapshot import ModelLayout

__all__ = [
    "Codec",
    "ErasureResult",
    "KnownPrefix",
    "PrefixMatch",
    "Store",
    "StoredPast",
    "Tier",
    "codec_by",
    "may_hold",
    "tier_at",
]

_log = structlog.get_logger("turnkeep.cache")

_DEFAULT_MIN_FREE_BYTES: Final = 1 << 30


def codec_by(key_file: Path | None) -> Codec:
    """Return a `Codec` that encrypts with the key in `key_file`, or without a key file does not encrypt.

    Raises `KeyFileError`.
    """
    if key_file is None:
        return PLAIN
    try:
        from .disk.encryption import EncryptedCodec, read_key
    except ImportError:
        raise KeyFileError("cryptography is missing; pip install 'turnkeep[encryption]' brings it") from None
    return EncryptedCodec(read_key(key_file))


def tier_at(place: str, codec: Codec, *, must_answer: bool, max_bytes: int, min_free_bytes: int) -> Tier:
    """Open a remote tier at `place`, the URL of an object store or a directory (made if missing). Blocking.

    `must_answer`: see `ObjectStore`. The limits apply to a directory only. Raises `OSError`, `SealedError` if
    the files in a directory need another key than that of `codec`, and `ModuleNotFoundError` if the library
    for object stores is missing.
    """
    if "://" in place:
        from .disk.objects import ObjectStore

        return ObjectStore(place, must_answer=must_answer)
    return SharedDirectory(Path(place), codec, max_bytes=max_bytes, min_free_bytes=min_free_bytes)


class Store:
    """An open cache directory, made by `open`. Event loop only."""

    def __init__(
        self,
        opened: OpenDirectory,
        queue: WriteQueue,
        remover: Remover,
        quota: Quota,
        remote: TierAccess | None,
        kv: StoredKv,
    ) -> None:
        #: Finds, reads and saves KV.
        self.kv: Final = kv
        #: Uploads snapshots to the remote tier and fetches them; None without a tier.
        self.remote: Final = remote
        #: Erases the KV of forgotten tokens, or all KV.
        self.eraser: Final = Eraser(opened, queue, remover, remote)
        #: The snapshots that wait for the disk.
        self.queue: Final = queue
        #: The disk limits.
        self.quota: Final = quota
        self._folder = opened.folder
        self._opened = opened
        self._index = opened.index
        self._remover = remover
        queue.on_end = self._write_ended

    @classmethod
    async def open(
        cls,
        directory: Path,
        *,
        identity: Identity,
        layout: ModelLayout,
        max_bytes: int,
        queue_bytes: int,
        min_free_bytes: int = _DEFAULT_MIN_FREE_BYTES,
        model: str = "",
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        codec: Codec = PLAIN,
        tier: Tier | None = None,
    ) -> Store:
        """Lock the directory, reconcile the index with the files, and return the store.

        Snapshots of other models stay, count against `max_bytes`, and are evicted when least recently used.
        `layout` describes the model's own caches: a file that differs is moved to quarantine. If the layout
        has states, KV can be restored only up to the end of a snapshot with a state. `queue_bytes` limits the
        snapshots that wait in memory for the disk; `min_free_bytes` of the file system stay free.
        `model` is the model's name in listings. `clock` (seconds since 1970) orders uses,
        `monotonic` times pauses after failed writes. `codec` has the directory's key. Snapshots are copied
        to the `tier`, and can be fetched from it. Raises `DirectoryLockedError`, `SealedError`, `OSError`.
        """
        opened = await asyncio.to_thread(open_directory, directory, identity, model, clock, codec)
        index = opened.index
        queue = WriteQueue(opened, queue_bytes=queue_bytes, monotonic=monotonic)
        remover = Remover(index, queue, identity.block_tokens)
        quota = Quota(index, queue, remover, max_bytes=max_bytes, min_free_bytes=min_free_bytes)
        remote = None if tier is None else TierAccess(tier, opened.folder, index, queue, quota, remover)
        kv = StoredKv(opened, queue, remover, quota, remote, identity, layout, model=model)
        quota.shrink_at_once()
        return cls(opened, queue, remover, quota, remote, kv)

    def listen(self, lost: Callable[[], None]) -> None:
        """Set the callback `lost`: it says that snapshots are gone, so sessions should save their KV again.

        The event loop calls it after snapshots were not written, failed verification, or were erased together
        with another session's. An eviction does not call it.
        """
        self._remover.lost = lost

    def stats(self) -> SnapshotStats:
        """Return the current counts: snapshots by outcome, and the use of the disk."""
        counts = {one.name: getattr(self.queue.counts, one.name) for one in fields(Counts)}
        usage = self.quota.usage()
        remote = RemoteCounts() if self.remote is None else self.remote.counts
        return SnapshotStats(
            **counts | {"dropped": dict(self.queue.counts.dropped)},
            restored_bytes=self.kv.restored_bytes,
            rejected=self.kv.rejected,
            timed_out=self.kv.timed_out,
            stored=self._index.stored,
            stored_bytes=self._index.stored_bytes,
            evicted=self.quota.evicted,
            capacity_bytes=usage.capacity,
            free_bytes=usage.free,
            held_bytes=usage.held,
            evictable_bytes=usage.evictable,
            remote_put_bytes=remote.put_bytes,
            remote_fetched_bytes=remote.fetched_bytes,
            remote_dropped=remote.dropped,
            remote_failed=remote.failed,
        )

    async def close(self, timeout_s: float = 5.0, *, discard: bool = False) -> bool:
        """Write the queue, end the threads and unlock the directory. False if that was not done in time.

        Snapshots that are not written in time are dropped. If the writer hangs, the directory stays locked; a
        hanging read ends with the process. Later saves are refused; closing again does nothing and returns
        True. With `discard`, all stored KV is removed instead of writing the queue; False if that fails.
        """
        if self.queue.is_closing:
            return True
        self.queue.is_closing = True
        self.quota.close()
        drained = await (self.eraser.clear if discard else self.queue.drained)(timeout_s / 2)
        _, stopped, left = await asyncio.gather(
            asyncio.sleep(0) if self.remote is None else self.remote.close(timeout_s / 2),
            self.queue.stop(timeout_s / 2),
            self.kv.close(timeout_s / 2),
        )
        if stopped:
            self._opened.close()
        if not (drained and stopped and left):
            _log.warning("cache_closed_in_haste", drained=drained, written=stopped, read=left)
        return drained and stopped and left

    def _write_ended(self, node: Node, write: Write) -> None:
        """Update the index after a write has ended. Called by the write queue, on the event loop."""
        self._remover.note_end(node, write)
        if self.remote is not None and node.durable and write.fetched is None:
            self.remote.offer(node)
        self.quota.check()
        if write.abandoned != "cancelled" and (write.abandoned or write.state is WriteState.FAILED):
            self._remover.lost()
