"""The only face of the cache: match, load, save, forget, pin, limits, barrier, stats.

Belongs to the event loop, which owns the index and all counts; blocking work runs on the writer thread and
on I/O threads. Names KV by tenant and tokens. Knows nothing of sessions: those are names that share a
beginning.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

import structlog

from . import blocks
from . import format as snapshot_format
from .blocks import Span
from .format import Name
from .opening import Opened, open_directory
from .pins import Pin, Pinned
from .restore import Piece, Restored, leave, restore
from .room import Room
from .stats import SnapshotStats
from .writer import DropReason, State, Write, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from .entries import Entry
    from .format import Tensor
    from .identity import Identity

_log = structlog.get_logger("turnkeep.cache")

#: A part of a snapshot is used if it is at least this share of it: reading a block for a few of its tokens
#: takes longer than computing them.
_LEAST_SHARE: Final = 0.25

_DEFAULT_MIN_FREE_BYTES: Final = 1 << 30
_IO_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of some tokens: `num_tokens` of them, over these entries in order.

    The last entry may hold more than is used of it, but not where a model's layers have states: then it ends
    the prefix, and its state is that of all before it. All are pinned until `load` or `release`.
    """

    num_tokens: int
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """What is there of some tokens' KV; it stays until it is released.

    `edges` are where the pieces of the last, partial block start and end; the first lies on the grid.
    """

    edges: tuple[int, ...]
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Forgotten:
    """How many snapshots went, and whether they are known to be off the disk."""

    num_snapshots: int
    settled: bool


class Store:
    """An open cache directory. Make it with `open`; every method but `room` belongs to the event loop."""

    def __init__(
        self,
        opened: Opened,
        *,
        identity: Identity,
        stateful: bool,
        max_bytes: int,
        queue_bytes: int,
        min_free_bytes: int,
        monotonic: Callable[[], float],
    ) -> None:
        self._folder = opened.folder
        self._catalog = opened.catalog
        self._identity = identity
        self._identity_digest = identity.digest()
        self._stateful = stateful
        self._index = opened.index
        self._writer = Writer(
            opened.folder,
            opened.catalog,
            queue_bytes=queue_bytes,
            free_bytes=opened.free_bytes,
            settled=self._settled,
            monotonic=monotonic,
        )
        self._room = Room(
            self._index,
            self._writer,
            opened.pins,
            self._discard,
            max_bytes=max_bytes,
            min_free_bytes=min_free_bytes,
            quarantined_bytes=opened.quarantined_bytes,
        )
        self._io = ThreadPoolExecutor(_IO_THREADS, "turnkeep-restore")
        self._closing = False
        self._restored_bytes = 0
        self._rejected = opened.rejected
        self._room.shrink_at_once()

    @classmethod
    async def open(
        cls,
        directory: Path,
        *,
        identity: Identity,
        stateful: bool = False,
        max_bytes: int,
        queue_bytes: int,
        min_free_bytes: int = _DEFAULT_MIN_FREE_BYTES,
        model: str = "",
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Store:
        """Lock the directory, and bring index and files together.

        Snapshots of other identities stay, count against `max_bytes`, and age until they are evicted.
        `stateful` says that the model has layers whose state is saved whole: a match then ends where a
        snapshot with a state does. `queue_bytes` bounds what waits in memory for the disk; `min_free_bytes`
        is left free on the file system, at the cost of snapshots. `model` is what people call the model, for
        listings. `clock` orders uses, `monotonic` times pauses. Raises `DirectoryLockedError`, `OSError`.
        """
        opened = await asyncio.to_thread(open_directory, directory, identity.digest(), model, clock)
        return cls(
            opened,
            identity=identity,
            stateful=stateful,
            max_bytes=max_bytes,
            queue_bytes=queue_bytes,
            min_free_bytes=min_free_bytes,
            monotonic=monotonic,
        )

    def match(self, tenant: str, tokens: Sequence[int]) -> Match:
        """Find the longest stored prefix of `tokens`, and pin it until it is loaded or released."""
        packed = blocks.pack(tokens)
        entries: list[Entry] = []
        parent, at, width = self._root(tenant), 0, self._block * blocks.TOKEN_BYTES
        while at + width <= len(packed):
            digest = blocks.link(parent, packed[at : at + width])
            entry = self._index.get(digest)
            if entry is None or not entry.usable:
                break
            entries.append(entry)
            parent, at = digest, at + width
        if self._stateful:
            self._end_resumable(tenant, packed, entries)
            num_tokens = entries[-1].end if entries else 0
        else:
            path, num_shared = self._index.reach(
                parent, packed[at : at + width], usable=True, least_share=_LEAST_SHARE
            )
            entries += path
            num_tokens = at // blocks.TOKEN_BYTES + num_shared
        for entry in entries:
            self._index.hold(entry)
        if entries:
            self._use(entries[-1])
        return Match(num_tokens, tuple(entries))

    def hold(self, tenant: str, tokens: Sequence[int]) -> Held:
        """Pin what is stored or on its way of these tokens, until it is released.

        What continues it can then be saved, whatever others save or forget meanwhile.
        """
        packed = blocks.pack(tokens)
        entries: list[Entry] = []
        for digest in blocks.chain(self._root(tenant), packed, self._block):
            entry = self._index.get(digest)
            if entry is None:
                break
            entries.append(entry)
        start = len(entries) * self._block
        parent = entries[-1].digest if entries else self._root(tenant)
        path = self._pieces(parent, packed[start * blocks.TOKEN_BYTES :])
        entries += path
        for entry in entries:
            self._index.hold(entry)
        return Held((start, *(entry.end for entry in path)), tuple(entries))

    def release(self, match: Match | Held) -> None:
        """Unpin what was held, or a match that is not going to be loaded. `load` does it by itself."""
        for entry in reversed(match.entries):
            self._index.hold(entry, -1)
            if entry.doomed and not entry.pins:
                # What was saved on top of it meanwhile needs it again.
                self._index.doom(entry, doomed=False)
                if not self._index.num_children(entry.digest):
                    self._discard([entry])
        self._room.check()

    async def load(self, match: Match) -> Restored | None:
        """Read a match into evaluated arrays, on an I/O thread.

        A doubtful file goes to quarantine together with what continues it, and the prefix before it is
        returned; None where nothing is left, or where no state was read: match again then. Releases the
        match, however it ends.
        """
        if not match.entries:
            return None
        pieces = [
            Piece(
                entry.digest,
                entry.start,
                min(entry.num_tokens, match.num_tokens - entry.start),
                state=self._stateful and entry is match.entries[-1],
            )
            for entry in match.entries
        ]
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(
                self._io, restore, self._folder, pieces, self._identity_digest, self._io.submit
            )
        except RuntimeError as error:  # MLX's, which has no memory, say: a miss, and no fault of the files
            _log.error("restore_failed", error=str(error))
            return None
        finally:
            self.release(match)
        if outcome.doubt is not None:
            self._room.quarantined_bytes = outcome.quarantined_bytes
            self._reject(match.entries[outcome.num_read], outcome.doubt)
        if outcome.restored is not None:
            self._restored_bytes += outcome.restored.size_bytes
        return outcome.restored

    def wanted(self, tenant: str, tokens: Sequence[int], start: int, end: int) -> list[Span]:
        """List the spans of `[start, end)` that are neither stored nor on their way: what is worth cutting.

        Full blocks, of which the first may begin before `start`, then the tail up to `end`: of that what
        `blocks.tail_start` says, beside the pieces that are there. Empty where the prefix before it is
        missing, since nothing could find such a span again: `start` 0 mends a gap.
        """
        spans = blocks.spans(start, end, self._block)
        if not spans or self._writer.paused:
            return []
        packed = blocks.pack(tokens[:end])
        parent, _ = self._last_block(tenant, packed, spans[0].start)
        if spans[0].start and self._index.get(parent) is None:
            return []
        wanted = []
        for span in spans:
            piece = _slice(packed, span)
            if not self._covered(parent, piece):
                if span.num_tokens < self._block:
                    path = self._pieces(parent, piece)
                    edges = [span.start, *(entry.end for entry in path)]
                    span = Span(blocks.tail_start(edges, span.end), span.end)  # noqa: PLW2901
                wanted.append(span)
            parent = blocks.link(parent, piece)
        return wanted

    def _covered(self, parent: bytes, packed: bytes) -> bool:
        """Tell whether entries, on their way or stored, hold all of `packed` after the block `parent`.

        Where layers have states they also have to end with it: a state is no part of another one.
        """
        least_share = 1.0 if self._stateful else 0.0
        return self._index.reach(parent, packed, least_share=least_share)[1] * blocks.TOKEN_BYTES == len(
            packed
        )

    def _pieces(self, parent: bytes, packed: bytes) -> tuple[Entry, ...]:
        """Follow `packed` from the end of a block as far as pieces hold it that hold nothing else."""
        width = self._block * blocks.TOKEN_BYTES
        return self._index.reach(parent, packed[:width], least_share=1.0)[0]

    def save(self, tenant: str, tokens: Sequence[int], span: Span, tensors: tuple[Tensor, ...]) -> bool:
        """Queue the KV of `span`; `tokens` must reach at least to its end. False where it was dropped.

        True also where the same KV is stored or on its way. Once it is durable, stored pieces of a tail that
        it contains are removed. Raises `ValueError` where the tensors do not fit the span.
        """
        packed = blocks.pack(tokens[: span.end])
        before, grid = self._last_block(tenant, packed, span.start)
        if self._covered(before, packed[grid * blocks.TOKEN_BYTES :]):
            return True
        parent = before
        if span.start > grid:
            path = self._pieces(before, packed[grid * blocks.TOKEN_BYTES : span.start * blocks.TOKEN_BYTES])
            # Where they end elsewhere the pieces that it continues are gone: no parent has this name.
            parent = path[-1].digest if path and path[-1].end == span.start else b""
        resumable = not self._stateful or any(tensor.of_state for tensor in tensors)
        name = Name(parent, span.start, _slice(packed, span), resumable)
        draft = snapshot_format.draft(name, self._identity, tensors)
        reason = self._refusal(name, draft.size_bytes)
        if reason is not None:
            self._writer.drop(reason)
            return False
        # In the index first: as a child on its way it keeps its own chain from being evicted for it.
        entry = self._index.add(name, draft.size_bytes)
        if not self._room.make(draft.size_bytes):
            self._index.remove(entry)
            self._writer.drop("disk_limit")
            return False
        self._writer.write(entry, draft)
        return True

    def room(self) -> int:
        """Tell how many bytes `save` would queue now. Safe on any thread: ask it before cutting."""
        return self._writer.room_bytes

    def skip(self, num_snapshots: int) -> None:
        """Count snapshots that were not even cut, because `room` was too small."""
        self._writer.drop("disk_error" if self._writer.paused else "queue_full", num_snapshots)

    def forget(self, tenant: str, tokens: Sequence[int]) -> int:
        """Remove what is stored or on its way of these tokens, from the end to where others share it.

        Returns how many snapshots went. What is being loaded goes when that is done; what is pinned stays.
        Settled after a `barrier`: nothing of it comes back, not even by a write that was under way.
        """
        packed = blocks.pack(tokens)
        width = self._block * blocks.TOKEN_BYTES
        chain = [self._root(tenant), *blocks.chain(self._root(tenant), packed, self._block)]
        gone = 0
        for i in reversed(range(len(chain))):
            within = self._index.within(chain[i], packed[i * width : (i + 1) * width])
            gone += self._discard_unneeded(entry for entry in reversed(within) if not entry.kept)
        return gone

    async def erase(self, tenant: str, tokens: Sequence[int], timeout_s: float = 2.0) -> Forgotten:
        """`forget`, and wait until that is settled; the answer comes in time whatever the disk does."""
        num_snapshots = self.forget(tenant, tokens)
        return Forgotten(num_snapshots, await self.barrier(timeout_s))

    async def clear(self, timeout_s: float = 5.0) -> bool:
        """Remove everything, of all tenants and models, pins and quarantine too; False where that takes long.

        What is written meanwhile or later stays. Nothing from before comes back, not even by a write that
        the disk holds up now.
        """
        self._index.clear()
        self._room.clear()
        self._writer.clear()
        return await self.barrier(timeout_s)

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

        Returns their lengths in tokens. They leave when others need the room.
        """
        gone = self._room.unpin(self._root(tenant), blocks.pack(tokens), exactly=exactly)
        self._writer.pin(gone, on=False)
        return sorted(len(pin.tokens) // blocks.TOKEN_BYTES for pin in gone)

    def set_limits(self, *, max_bytes: int | None = None, min_free_bytes: int | None = None) -> None:
        """Change limits from now on. What is over them leaves in the background, some snapshots at a time."""
        self._room.set_limits(
            self._room.max_bytes if max_bytes is None else max_bytes,
            self._room.min_free_bytes if min_free_bytes is None else min_free_bytes,
        )

    async def barrier(self, timeout_s: float) -> bool:
        """Wait until all earlier writes and removals are settled; False where that takes too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._writer.barrier()
                # What has just been settled may have queued removals, of tails that it replaced and of
                # files that were forgotten while they were renamed. Those queue nothing more.
                await self._writer.barrier()
        except TimeoutError:
            return False
        return True

    def stats(self) -> SnapshotStats:
        """Take the counts."""
        return SnapshotStats.take(
            self._writer.counts,
            self._index,
            self._room,
            restored_bytes=self._restored_bytes,
            rejected=self._rejected,
        )

    async def close(self, timeout_s: float = 5.0, *, discard: bool = False) -> bool:
        """Write what is queued, then end the threads and unlock. False where time ran out.

        What is not written by then is given up. A directory whose writer hangs stays locked. Saves are
        refused from now on; closing again does nothing. `discard` removes everything instead of writing it.
        """
        if self._closing:
            return True
        self._closing = True
        self._room.close()
        drained = await (self.clear(timeout_s / 2) if discard else self.barrier(timeout_s / 2))
        stopped = await self._writer.stop(timeout_s / 2)
        self._end_io()
        if stopped:
            self._catalog.close()
            self._folder.close()
        if not (drained and stopped):
            _log.warning("cache_closed_in_haste", drained=drained, stopped=stopped)
        return drained and stopped

    def _end_io(self) -> None:
        """End the I/O threads. Each of those that have started gives up what it holds of MLX first."""
        together = threading.Barrier(_IO_THREADS)
        for _ in range(_IO_THREADS):
            self._io.submit(leave, together)
        self._io.shutdown(wait=False)

    @property
    def _block(self) -> int:
        return self._identity.block_tokens

    def _root(self, tenant: str) -> bytes:
        return blocks.root(self._identity_digest, tenant)

    def _last_block(self, tenant: str, packed: bytes, position: int) -> tuple[bytes, int]:
        """Name the prefix up to the last boundary of the grid before `position`, and say where that is."""
        root, start = self._root(tenant), position - position % self._block
        chain = blocks.chain(root, packed[: start * blocks.TOKEN_BYTES], self._block)
        return (chain[-1] if chain else root), start

    def _end_resumable(self, tenant: str, packed: bytes, entries: list[Entry]) -> None:
        """Cut a chain of blocks back, or add a tail to it, so that it ends where it can be resumed."""
        while True:
            parent = entries[-1].digest if entries else self._root(tenant)
            at = entries[-1].end if entries else 0
            path = self._index.ending(parent, _slice(packed, Span(at, at + self._block)))
            if path:
                entries += path
                return
            if not entries or entries[-1].resumable:
                return
            entries.pop()

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

    def _use(self, entry: Entry) -> None:
        self._index.use(entry)
        self._writer.use(entry.used, entry.digest)

    def _discard_unneeded(self, entries: Iterable[Entry]) -> int:
        """Discard those of these entries, children first, that nothing else continues; count them."""
        gone = 0
        for entry in entries:
            if all(child.doomed for child in self._index.children(entry.digest)):
                self._discard([entry])
                gone += 1
        return gone

    def _discard(self, entries: list[Entry]) -> None:
        """Take entries without children out of the index, and their files off the disk.

        One that is being loaded stays until that is done.
        """
        for entry in entries:
            self._index.doom(entry, doomed=entry.pins > 0)
        self._take_out([entry for entry in entries if not entry.doomed], "cancelled")

    def _take_out(self, entries: list[Entry], reason: DropReason | Literal["cancelled"]) -> None:
        """Take entries out, children before their parents; those on their way are abandoned for `reason`."""
        rows = []
        for entry in entries:
            if entry.durable:
                rows.append(entry.row)
            else:
                self._writer.abandon(entry, reason)
            self._index.remove(entry)
        if rows:
            self._writer.unlink(rows)

    def _reject(self, entry: Entry, doubt: str) -> None:
        """Give up a doubtful snapshot and all that continues it, pinned or not: nothing could match it."""
        if self._index.get(entry.digest) != entry:
            return  # another load was first, or it was forgotten meanwhile
        _log.warning("snapshot_quarantined", digest=entry.digest.hex(), reason=doubt)
        self._rejected += 1
        self._take_out([*self._index.below(entry), entry], "no_parent")

    def _settled(self, write: Write) -> None:
        """Take note of the end of a write. Called by the writer, on the event loop."""
        self._enter(write)
        self._room.check()

    def _enter(self, write: Write) -> None:
        entry = write.entry
        if write.state is State.DURABLE and write.abandoned is None:
            self._index.settle(entry)
            if entry.resumable:
                self._discard_unneeded(self._index.swallowed(entry))
            return
        if self._index.get(entry.digest) == entry:
            self._take_out([*self._index.below(entry), entry], "no_parent")
        # The file may be in place: it was abandoned after the writer last looked, or the sync of the
        # directory failed. If it has been saved anew, that write is queued already, and replaces it.
        if write.state in {State.DURABLE, State.FAILED} and self._index.get(entry.digest) is None:
            self._writer.unlink([write.row])


def _slice(packed: bytes, span: Span) -> bytes:
    return packed[span.start * blocks.TOKEN_BYTES : span.end * blocks.TOKEN_BYTES]
