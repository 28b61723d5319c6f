"""Erases KV that must not stay: the snapshots of forgotten tokens, or everything, with all copies.

Belongs to the event loop; the write queue removes files. Remembers erasures that are not certain yet, and how
far those of a log of requests are carried out.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.disk.header import NO_NAME
from cache.names import blocks
from cache.names.marks import ErasureProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cache.names.marks import Marks
    from cache.names.snapshot import Name

    from .directory import OpenDirectory
    from .nodes import Node
    from .remote import TierAccess
    from .remover import Remover
    from .write_queue import WriteQueue


@dataclass(frozen=True, slots=True)
class ErasureResult:
    """The result of an erasure."""

    #: How many snapshots the index had to remove.
    num_snapshots: int
    #: Whether certainly no copy is left on disk or in the remote tier, even after a crash.
    settled: bool


class Eraser:
    """Erases snapshots of all models and policies in an open directory, and their copies in the tier."""

    def __init__(
        self, opened: OpenDirectory, queue: WriteQueue, remover: Remover, remote: TierAccess | None
    ) -> None:
        self._index = opened.index
        self._identities = opened.identities
        self._queue = queue
        self._remover = remover
        self._remote = remote
        self._progress = {one.log: one for one in opened.erased}
        #: Marks of snapshots that may have come back after their erasure, from a copy or a backup. Erasures
        #: of them must be repeated, even those before `erased_up_to`; `note_erased` empties the set.
        self.put_back = opened.put_back
        #: When the snapshots that were here at the start were last used, in seconds since 1970.
        self._used_s = opened.index.last_used / 1e6 if opened.index.stored else None
        #: Erasures that are not certain yet (tenant, packed tokens, `shared`): `erase_marked` repeats them,
        #: since the index no longer has their tokens.
        self._unsettled: set[tuple[str, bytes, int]] = set()

    def forget(self, tenant: str, packed: bytes, shared: int = 0) -> int:
        """Remove the snapshots of these packed tokens, except those that other sequences of tokens share.

        Shared snapshots are those that a remaining snapshot continues, and those of the first `shared`
        tokens. Covers all identities: other models, policies, `kv_bits`. Returns how many snapshots were
        removed. A snapshot that a load or a turn uses is removed at its release. No removed snapshot comes
        back, not even by a write in flight.
        """
        return self._discard(self._within(tenant, packed, shared))

    async def erase(
        self, tenant: str, packed: bytes, timeout_s: float = 2.0, *, shared: int = 0
    ) -> ErasureResult:
        """Do at once what `forget` does, then wait at most `timeout_s` until the removal is durable.

        Removes copies in quarantine and in the remote tier too. The result is not settled if time ran out, if
        a turn still uses one of the snapshots, if a removal failed, or if there are files of another format
        version, whose tokens are unknown.
        """
        self._unsettled.add((tenant, packed, shared))
        nodes = self._within(tenant, packed, shared)
        num_snapshots = self._discard(nodes)
        erasing = None if self._remote is None else self._remote.erase(tenant, packed, shared)
        is_clean = await self._certain(lambda name: name.is_of(packed), nodes, erasing, timeout_s)
        if is_clean:
            self._unsettled.discard((tenant, packed, shared))
        # These files are not tried again: only another version of the program can read them.
        is_unknown = bool(self._index.children(NO_NAME.parent))
        return ErasureResult(num_snapshots, is_clean and not is_unknown)

    async def erase_marked(self, tenant: str, marks: Marks, timeout_s: float = 2.0) -> bool:
        """Erase, like `erase`, the snapshots of a forgotten session, given the marks of its tokens.

        Each snapshot is found by its own mark, whatever is missing before it. Repeats calls of `erase` for
        these tokens that were not settled. Returns whether the erasure and these repetitions are settled; if
        not, call again later. Snapshots that differ from the tokens only after the last mark are erased too.
        """
        nodes = sorted(self._index.marked(marks), key=_last_first)
        self._discard(nodes)
        gone = [node for node in nodes if not self._index.has(node)]
        erasing = None if self._remote is None else self._remote.erase_nodes(gone)
        settled = await self._certain(
            lambda name: marks.has(name.mark, name.span.end), nodes, erasing, timeout_s
        )
        chains = {one for one in self._unsettled if one[0] == tenant and marks.agrees(tenant, one[1])}
        for _, packed, shared in chains:
            await self.erase(tenant, packed, timeout_s, shared=shared)
        return settled and self._unsettled.isdisjoint(chains)

    async def _certain(
        self,
        is_of: Callable[[Name], bool],
        nodes: Sequence[Node],
        erasing: asyncio.Future[bool] | None,
        timeout_s: float,
    ) -> bool:
        """Wait at most `timeout_s` until the removal of discarded nodes is durable; false if it may not be.

        `is_of` recognises their names, `erasing` removes their copies from the remote tier.
        """
        is_remote_clean = True
        erasure = None
        try:
            async with asyncio.timeout(timeout_s):
                await self._queue.drained()
                erasure = self._queue.erase(is_of)
                is_disk_clean = bool(await erasure)
                if erasing is not None:
                    is_remote_clean = await asyncio.shield(erasing)
        except TimeoutError:
            return False
        finally:
            if erasure is None:
                self._queue.erase(is_of)  # although nobody waits for its end
        is_held = any(node.doomed and self._index.has(node) for node in nodes)
        return is_disk_clean and is_remote_clean and not is_held

    async def erased_up_to(self, log: str) -> ErasureProgress | None:
        """Return how far this cache has carried out a log's erasures: the last argument of `note_erased`.

        If there is none, return entry 0 at the last use of the snapshots that were here at the start: the
        cache may lack all erasures since then. None if there were no snapshots.
        """
        known = self._progress.get(log)
        if known is None and self._used_s is not None:
            return ErasureProgress(log, 0, self._used_s)
        return known

    async def note_erased(self, erased: ErasureProgress) -> None:
        """Store how far this cache has carried out a log's erasures.

        Writes it to the disk after all erasures that are queued already. Does not wait for that; a failure is
        only logged, and makes the next start repeat erasures.
        """
        self._progress[erased.log] = erased
        self.put_back = frozenset()
        self._queue.note_erased(erased)

    async def clear(self, timeout_s: float = 5.0) -> bool:
        """Remove everything from this directory: the snapshots of all tenants and models, and quarantine.

        False if time ran out or a removal failed. Snapshots that are saved after the call stay. No earlier
        snapshot comes back, not even by a write in flight.
        """
        if self._remote is not None:
            self._remote.forget()
        self._index.clear()
        erasure = self._queue.clear()
        return await self._queue.drained(timeout_s) and bool(erasure.result())

    def _discard(self, nodes: Sequence[Node]) -> int:
        """Remove nodes, and call `lost`: a session that stays may have relied on one of them.

        Files that are being fetched from the remote tier are discarded, as they may have the same KV.
        """
        if self._remote is not None:
            self._remote.forget()
        num_discarded = self._remover.discard(nodes)
        self._remover.lost()
        return num_discarded

    def _within(self, tenant: str, packed: bytes, shared: int) -> list[Node]:
        """Return a tenant's snapshots, of all models, that hold only tokens of `packed`; last ones first.

        Leaves out those of the first `shared` tokens.
        """
        found = []
        for identity, block in self._identities.items():
            found += self._index.within(blocks.root(identity, tenant), packed, block)
        return sorted((node for node in found if node.end > shared), key=_last_first)


def _last_first(node: Node) -> int:
    return -node.start
