"""The only face of the cache: match, load, save, forget, pin, limits, barrier, stats.

Belongs to the event loop, which owns the index and all counts; blocking work runs on the writer thread and
on I/O threads. Names KV by tenant and tokens. Knows nothing of sessions: those are names that share a
beginning.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from .disk import format as snapshot_format
from .disk.folder import may_hold
from .disk.header import NO_NAME
from .disk.readers import Readers
from .disk.restore import ChainFile, ReadOutcome, Restored, release_thread, restore
from .disk.rows import Pin
from .disk.writer import DropReason, Write, Writer
from .index.opening import Opened, open_directory
from .index.pins import Pinned
from .index.prefixes import Prefixes
from .index.removal import Removal
from .index.room import Room
from .index.stats import SnapshotStats
from .names import blocks
from .names.blocks import Chain
from .names.snapshot import Name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from .index.nodes import Node
    from .names.blocks import Span
    from .names.identity import Identity
    from .names.snapshot import ModelLayout, Tensor

__all__ = ["Forgotten", "HeldPrefix", "Match", "Store", "file_bytes", "may_hold"]

_log = structlog.get_logger("turnkeep.cache")

_DEFAULT_MIN_FREE_BYTES: Final = 1 << 30
_IO_THREADS: Final = 2
#: How long a load may take, and how much longer for each byte: a disk that is slower is of no use.
LOAD_S: Final = 5.0
_LOAD_BYTES_PER_S: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of some tokens: `num_tokens` of them, over these nodes in order.

    The last node may hold more than is used of it, but not where a model's layers have states: then it ends
    the prefix, and its state is that of all before it. All are pinned until `load` or `release`.
    """

    num_tokens: int
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """What is there of some tokens' KV; it stays until it is released.

    `edges` are where the pieces of the last, partial block start and end; the first lies on the grid.
    """

    edges: tuple[int, ...]
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Forgotten:
    """How many snapshots went, and whether it is known that nothing of them, no copy, is on the disk."""

    num_snapshots: int
    settled: bool


def file_bytes(name: Name, identity: Identity, tensors: tuple[Tensor, ...]) -> int:
    """Measure the file of a snapshot that is not saved."""
    return snapshot_format.encode(name, identity, tensors).size_bytes


class Store:
    """An open cache directory. Make it with `open`; every method but `room` belongs to the event loop."""

    def __init__(
        self,
        opened: Opened,
        *,
        identity: Identity,
        layout: ModelLayout,
        max_bytes: int,
        queue_bytes: int,
        min_free_bytes: int,
        monotonic: Callable[[], float],
    ) -> None:
        self._folder = opened.folder
        self._catalog = opened.catalog
        self._identity = identity
        self._identity_digest = identity.digest()
        #: Of all that there are snapshots of.
        self._identities = opened.identities
        self._layout = layout
        self._stateful = bool(layout.states)
        self._index = opened.index
        self._prefixes = Prefixes(opened.index, identity.block_tokens, stateful=self._stateful)
        self._writer = Writer(
            opened.folder,
            opened.catalog,
            queue_bytes=queue_bytes,
            free_bytes=opened.free_bytes,
            quarantined_bytes=opened.quarantined_bytes,
            on_end=self._write_ended,
            monotonic=monotonic,
        )
        self._removal = Removal(self._index, self._writer)
        self._room = Room(
            self._index,
            self._writer,
            opened.pins,
            self._removal,
            max_bytes=max_bytes,
            min_free_bytes=min_free_bytes,
        )
        self._readers = Readers(_IO_THREADS, release_thread)
        self._closing = False
        self._restored_bytes = 0
        self._timed_out = 0
        #: Whether the last load was given up for want of an answer: it is said once an episode.
        self._hangs = False
        self._rejected = opened.rejected
        self._room.shrink_at_once()

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
    ) -> Store:
        """Lock the directory, reconcile the index with the files, and return the store.

        Snapshots of other models stay, count against `max_bytes`, and age until they are evicted. `layout` is
        what the model's own caches hold: a file that differs goes to quarantine; with states, which are saved
        whole, KV can be restored only up to the end of a snapshot that has one. `queue_bytes` bounds what
        waits in memory for the disk; `min_free_bytes` stays free, at the cost of snapshots.
        `model` is what people call the model, for listings. `clock` orders uses, `monotonic` times the pauses
        after failed writes. Raises `DirectoryLockedError`, `OSError`.
        """
        opened = await asyncio.to_thread(open_directory, directory, identity.digest(), model, clock)
        return cls(
            opened,
            identity=identity,
            layout=layout,
            max_bytes=max_bytes,
            queue_bytes=queue_bytes,
            min_free_bytes=min_free_bytes,
            monotonic=monotonic,
        )

    def chain(self, tenant: str) -> Chain:
        """Make what to name a tenant by in the calls of one turn: it hashes each block of the turn once."""
        return Chain(self._root(tenant), self._identity.block_tokens)

    def match(self, tenant: str | Chain, tokens: Sequence[int]) -> Match:
        """Find the longest stored prefix of `tokens`, and pin it until it is loaded or released."""
        num_tokens, nodes = self._prefixes.longest(self._chain(tenant), blocks.pack(tokens))
        if nodes:
            self._index.hold(nodes[-1])
            self._use(nodes[-1])
        return Match(num_tokens, tuple(nodes))

    def hold(self, tenant: str | Chain, tokens: Sequence[int]) -> HeldPrefix:
        """Pin what is stored or on its way of these tokens, until it is released.

        What continues it can then be saved, whatever others save or forget meanwhile.
        """
        edges, nodes = self._prefixes.known(self._chain(tenant), blocks.pack(tokens))
        if nodes:
            self._index.hold(nodes[-1])
        used = next((node for node in reversed(nodes) if node.usable), None)
        if used is not None:
            self._use(used)
        return HeldPrefix(edges, tuple(nodes))

    def release(self, match: Match | HeldPrefix) -> None:
        """Unpin what was held, or a match that is not going to be loaded. `load` does it by itself."""
        held = self._index.release(match.nodes[-1]) if match.nodes else None
        if held is not None:
            self._removal.discard_released(held)
        self._room.check()

    async def load(self, match: Match, *, room_tokens: int = 0) -> Restored | None:
        """Read a match into evaluated arrays with room for `room_tokens` tokens in all, on an I/O thread.

        A doubtful file goes to quarantine together with what continues it, and the prefix before it is
        returned; None where nothing is left, or where no state was read: match again then. None in time, too,
        where the disk hangs. Releases the match, however it ends.
        """
        if not match.nodes:
            return None
        if self._closing:
            self.release(match)
            return None
        files, at = [], 0
        for node in match.nodes:
            num_tokens = min(node.num_tokens, match.num_tokens - at)
            state = self._stateful and node is match.nodes[-1]
            # From where the one before ends, whatever a file says: nothing else would be left unwritten.
            files.append(ChainFile(node.digest, at, num_tokens, state=state))
            at += num_tokens
        limit_s = LOAD_S + sum(node.size_bytes for node in match.nodes) / _LOAD_BYTES_PER_S

        def read() -> ReadOutcome:
            help_out = partial(self._readers.submit, limit_s=limit_s)
            return restore(
                self._folder, files, self._identity_digest, self._layout, room_tokens, limit_s, help_out
            )

        try:
            outcome = await self._readers.run(read, limit_s)
            if outcome.doubt is not None and (doubtful := match.nodes[outcome.num_read]).doomed:
                self._writer.unlink([doubtful.row], quarantined=True)  # nobody is to look at it any more
        except TimeoutError:
            self._timed_out += 1
            if not self._hangs:
                _log.error("restores_hang", limit_s=round(limit_s, 1))
            self._hangs = True
            return None
        except (RuntimeError, MemoryError, OSError) as error:  # or no file may be opened: the files are good
            _log.error("restore_failed", error=str(error))
            return None
        finally:
            self.release(match)
        self._hangs = False
        if outcome.doubt is not None:
            self._rejected += self._removal.reject(match.nodes[outcome.num_read], outcome.doubt)
        if outcome.restored is not None:
            self._restored_bytes += outcome.restored.size_bytes
        return outcome.restored

    def wanted(self, tenant: str | Chain, tokens: Sequence[int], start: int, end: int) -> list[Span]:
        """List the spans of `[start, end)` that are neither stored nor on their way: what is worth cutting.

        Full blocks, of which the first may begin before `start`, then the tail up to `end`: of that what
        `blocks.tail_start` says, beside the pieces that are there. Empty where the prefix before it is
        missing, since nothing could find such a span again: `start` 0 mends a gap.
        """
        if self._writer.paused:
            return []
        return self._prefixes.wanted(self._chain(tenant), blocks.pack(tokens[:end]), start)

    def save(
        self, tenant: str | Chain, tokens: Sequence[int], span: Span, tensors: tuple[Tensor, ...]
    ) -> bool:
        """Queue the KV of `span`; `tokens` must reach at least to its end. False where it was dropped.

        True also where the same KV is stored or on its way. Once it is durable, stored pieces of a tail that
        it contains are removed. Raises `ValueError` where the tensors do not fit the span.
        """
        packed = blocks.pack(tokens[: span.end])
        parent = self._prefixes.parent(self._chain(tenant), packed, span.start)
        if parent is None:
            return True
        resumable = not self._stateful or any(tensor.of_state for tensor in tensors)
        name = Name(parent, span.start, packed[span.start * blocks.TOKEN_BYTES :], resumable)
        encoded = snapshot_format.encode(name, self._identity, tensors)
        reason = self._refusal(name, encoded.size_bytes)
        if reason is not None:
            self._writer.drop(reason)
            return False
        # In the index first: as a child on its way it keeps its own chain from being evicted for it.
        node = self._index.add(name, encoded.size_bytes)
        if not self._room.make(encoded.size_bytes):
            self._index.remove(node)
            self._writer.drop("disk_limit")
            return False
        self._writer.write(node, encoded)
        return True

    def room(self) -> int:
        """Tell how many bytes `save` would queue now. Safe on any thread: ask it before cutting."""
        return self._writer.room_bytes

    def skip(self, num_snapshots: int) -> None:
        """Count snapshots that were not even cut, because `room` was too small."""
        self._writer.drop("disk_error" if self._writer.paused else "queue_full", num_snapshots)

    def free_memory(self) -> None:
        """Give up what waits for the disk, so that its tensors are free: whoever made them needs the room.

        All but the one that is being written, however long that takes.
        """
        self._writer.abandon_queued("memory")

    def forget(self, tenant: str, tokens: Sequence[int]) -> int:
        """Remove what is stored or on its way of these tokens, from the end to where others share it.

        That is under any identity: another model, or other `kv_bits`. Returns how many snapshots went. What
        is being loaded goes when that is done; what is pinned stays. Settled after a `barrier`: nothing of it
        comes back, not even by a write that was under way.
        """
        within = self._within(tenant, blocks.pack(tokens))
        return self._removal.discard(node for node in within if not node.kept)

    async def erase(self, tenant: str, tokens: Sequence[int], timeout_s: float = 2.0) -> Forgotten:
        """`forget`, and wait until that is settled; the answer comes in time whatever the disk does.

        Removes copies in quarantine too. Not settled where a turn still holds some of it, where something
        could not be removed, or where there are files of another format version: whose they are is unknown.
        """
        packed = blocks.pack(tokens)
        num_snapshots = self.forget(tenant, tokens)
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained()
                erasure = self._writer.erase(packed)
                await self._writer.barrier()
        except TimeoutError:
            return Forgotten(num_snapshots, settled=False)
        is_held = any(node.doomed for node in self._within(tenant, packed))
        is_unknown = bool(self._index.children(NO_NAME.parent))
        return Forgotten(num_snapshots, erasure.clean and not is_held and not is_unknown)

    async def clear(self, timeout_s: float = 5.0) -> bool:
        """Remove everything, of all tenants and models, pins and quarantine too.

        False where that takes long, or something could not be removed.

        What is written meanwhile or later stays. Nothing from before comes back, not even by a write that
        the disk holds up now.
        """
        self._index.clear()
        self._room.clear()
        erasure = self._writer.clear()
        return await self.barrier(timeout_s) and erasure.clean

    async def pin(self, tenant: str, tokens: Sequence[int], timeout_s: float = 2.0) -> Pinned:
        """Keep a prefix until it is unpinned, over restarts: what is stored of it, and what comes.

        Raises `PinRefusedError` where it is too large, `ValueError` where it is empty.
        """
        if not tokens:
            raise ValueError("a pinned prefix has at least one token")
        pin = Pin(self._root(tenant), blocks.pack(tokens))
        held = self._room.pin(pin)
        note = self._writer.pin([pin], on=True)
        pinned = Pinned(len(tokens), held.num_tokens, held.size_bytes, self._index.kept_bytes, noted=False)
        await self.barrier(timeout_s)
        return replace(pinned, noted=note.made)

    def unpin(self, tenant: str, tokens: Sequence[int], *, exactly: bool = False) -> list[int]:
        """Let go of all pinned prefixes of these tokens, or only of the one that is all of them.

        Returns their lengths in tokens. They are evicted when others need the room.
        """
        gone = self._room.unpin(self._root(tenant), blocks.pack(tokens), exactly=exactly)
        self._writer.pin(gone, on=False)
        return sorted(len(pin.tokens) // blocks.TOKEN_BYTES for pin in gone)

    def set_limits(self, *, max_bytes: int | None = None, min_free_bytes: int | None = None) -> None:
        """Change the limits. What exceeds them is evicted in the background, in small batches."""
        self._room.set_limits(
            self._room.max_bytes if max_bytes is None else max_bytes,
            self._room.min_free_bytes if min_free_bytes is None else min_free_bytes,
        )

    async def barrier(self, timeout_s: float) -> bool:
        """Wait until all earlier writes and removals are settled; False where that takes too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained()
        except TimeoutError:
            return False
        return True

    def stats(self) -> SnapshotStats:
        """Take the counts."""
        return SnapshotStats.collect(
            self._writer.counts,
            self._index,
            self._room,
            restored_bytes=self._restored_bytes,
            rejected=self._rejected,
            timed_out=self._timed_out,
        )

    async def close(self, timeout_s: float = 5.0, *, discard: bool = False) -> bool:
        """Write what is queued, then end the threads and unlock. False where time ran out.

        What is not written by then is given up. A directory whose writer hangs stays locked; a read that
        hangs ends with the process. Saves are refused from now on; closing again does nothing. `discard`
        removes everything instead of writing it.
        """
        if self._closing:
            return True
        self._closing = True
        self._room.close()
        drained = await (self.clear(timeout_s / 2) if discard else self.barrier(timeout_s / 2))
        stopped, left = await asyncio.gather(
            self._writer.stop(timeout_s / 2), self._readers.close(timeout_s / 2)
        )
        if stopped:
            self._catalog.close()
            self._folder.close()
        if not (drained and stopped and left):
            _log.warning("cache_closed_in_haste", drained=drained, written=stopped, read=left)
        return drained and stopped and left

    async def _drained(self) -> None:
        await self._writer.barrier()
        # What has just been settled may have queued removals, of tails that it replaced and of files that
        # were forgotten while they were renamed. Those queue nothing more.
        await self._writer.barrier()

    def _root(self, tenant: str) -> bytes:
        return blocks.root(self._identity_digest, tenant)

    def _within(self, tenant: str, packed: bytes) -> Iterator[Node]:
        """Go through the nodes that hold nothing but a part of these tokens, children first."""
        for identity in self._identities:
            yield from reversed(self._index.within(blocks.root(identity, tenant), packed))

    def _chain(self, tenant: str | Chain) -> Chain:
        return tenant if isinstance(tenant, Chain) else self.chain(tenant)

    def _refusal(self, name: Name, size_bytes: int) -> DropReason | None:
        if self._closing:
            return "closing"
        if self._writer.paused:
            return "disk_error"
        if size_bytes > min(self._room.max_bytes, self._writer.queue_bytes):
            return "too_large"
        if name.start and self._index.get(name.parent) is None:
            return "no_parent"
        if size_bytes > self._writer.room_bytes:
            return "queue_full"
        return None

    def _use(self, node: Node) -> None:
        self._index.use(node)
        self._writer.use(node.used, node.digest)

    def _write_ended(self, write: Write) -> None:
        """Take note of the end of a write. Called by the writer, on the event loop."""
        self._removal.note_end(write)
        self._room.check()
