"""The stored KV: finds the longest stored prefix of a session's tokens, reads it, and saves more.

Belongs to the event loop, which owns the index; blocking work runs on I/O threads and in the write queue.
Callers name KV by a chain (tenant, model and policy) and tokens. Knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import structlog

from cache.disk import format as snapshot_format
from cache.disk.chain_reader import num_shared, read_chain, release_thread
from cache.disk.io_threads import IoThreads
from cache.disk.stored_past import StoredPast
from cache.names import blocks
from cache.names.blocks import DIGEST_BYTES, Span
from cache.names.marks import Marker
from cache.names.policy import FULL
from cache.names.snapshot import KvPart, Name
from cache.names.tokens import Chain, as_tokens

from .prefixes import KnownPrefix, Prefixes, PrefixMatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cache.disk.chain_reader import RestoredKv
    from cache.disk.disk_work import DropReason
    from cache.names.identity import Identity
    from cache.names.policy import Policy
    from cache.names.snapshot import ModelLayout, Tensor
    from cache.names.tokens import Tokens

    from .directory import OpenDirectory
    from .nodes import Node
    from .quota import Quota
    from .remote import RemotePrefix, TierAccess
    from .remover import Remover
    from .write_queue import WriteQueue

_log = structlog.get_logger("turnkeep.cache")

#: Reading threads. Two read faster than one even on two processors; on sixteen processors one, two and four
#: threads read 2.1, 5.6 and 8.3 GB/s from the page cache into fresh memory.
_IO_THREADS: Final = min(max((os.cpu_count() or 1) // 2, 2), 4)
#: The time limit of a load, plus the time for its bytes at this rate; a slower load is a miss.
LOAD_S: Final = 5.0
_LOAD_BYTES_PER_S: Final = 32 << 20
#: Of more snapshots that continue a match differently, `extend` reads only the headers of the last used.
_MOST_BRANCHES: Final = 8
#: `extend` uses at least this share of a snapshot: prefilling a few tokens is faster than reading a whole
#: block for them.
_MIN_SHARE: Final = 0.25
#: The interval at which `settle` checks again.
_SETTLE_S: Final = 0.005


class StoredKv:
    """Finds, reads and saves the KV of one model in an open cache directory. Event loop only."""

    def __init__(
        self,
        opened: OpenDirectory,
        queue: WriteQueue,
        remover: Remover,
        quota: Quota,
        remote: TierAccess | None,
        identity: Identity,
        layout: ModelLayout,
        *,
        model: str,
    ) -> None:
        self.restored_bytes = 0
        #: Files that failed verification, and loads that exceeded their time limit.
        self.rejected = opened.rejected
        self.timed_out = 0
        self._folder = opened.folder
        self._index = opened.index
        self._identities = opened.identities
        self._queue = queue
        self._remover = remover
        self._quota = quota
        self._remote = remote
        self._model = model
        #: What computes the marks of a chain's snapshots.
        self._markers: WeakKeyDictionary[Chain, Marker] = WeakKeyDictionary()
        #: The prefixes of each policy that was used.
        self._prefixes = {FULL: Prefixes(opened.index, identity, layout)}
        self._threads = IoThreads("restore", _IO_THREADS, release_thread)
        #: Whether the last load timed out: logged once per episode.
        self._hangs = False
        if remote is not None:
            remote.note(identity.digest(), identity.block_tokens)

    def chain(self, tenant: str, policy: Policy = FULL, of: Tokens | None = None) -> Chain:
        """Return the chain that names a tenant's blocks under a policy.

        A turn passes its chain to the other methods, so that each block is hashed once. With `of`, these
        tokens and all tokens that extend them share the chain.
        """
        prefixes = self._under(policy)
        block = prefixes.identity.block_tokens
        self._queue.note_identity(prefixes.digest, block, self._model)
        root = blocks.root(prefixes.digest, tenant)
        chain = Chain(root, block, policy, tenant)
        return chain if of is None else of.chains.setdefault(root, chain)

    def find(self, chain: Chain, tokens: Sequence[int]) -> PrefixMatch:
        """Find the longest prefix of `tokens` on disk, but do not protect it from eviction.

        Works even when the store is closed.
        """
        return self._under(chain.policy).longest(chain, as_tokens(tokens))

    def match(self, chain: Chain, tokens: Sequence[int]) -> PrefixMatch:
        """Find the longest stored prefix of `tokens`; protect it from eviction until `load` or `release`."""
        match = self.find(chain, tokens)
        self._hold(match.nodes)
        return match

    async def extend(self, match: PrefixMatch, chain: Chain, tokens: Sequence[int]) -> PrefixMatch:
        """Extend a match of `tokens` by the beginning of one more snapshot, whose later tokens differ.

        `match` must be protected (by the method `match`); so is the result, which is `match` if no snapshot
        has enough of the next tokens, or on an error. The index has no tokens, so this reads the headers of
        the `_MOST_BRANCHES` last used snapshots that continue it. If cancelled, `match` stays protected.
        """
        prefixes = self._under(chain.policy)
        branches = prefixes.branches(match, chain, as_tokens(tokens), _MOST_BRANCHES)
        if not branches or self._queue.is_closing:
            return match
        rest = as_tokens(tokens).packed(match.num_tokens, match.num_tokens + chain.block)
        self._index.hold(branches)
        try:
            digests = [node.digest for node in branches]
            shared = await self._threads.run(partial(num_shared, self._folder, digests, rest), LOAD_S)
            num_tokens, best = max(zip(shared, branches, strict=True), key=lambda one: one[0])
            if not best.usable or num_tokens < max(1, _MIN_SHARE * best.num_tokens):
                return match
            self._hold([best])
            placed = (*match.placed, (match.num_tokens, best))
            return PrefixMatch(match.num_tokens + num_tokens, placed, match.policy)
        except (TimeoutError, OSError):  # the load will tell
            return match
        finally:
            self._release(branches)

    def hold(self, chain: Chain, tokens: Sequence[int]) -> KnownPrefix:
        """Find the longest prefix of `tokens` that is stored or queued, and protect it from eviction.

        Protects the snapshots that a session needs to resume at its end, until `release` of the result. They
        count as used now.
        """
        known = self._under(chain.policy).known(chain, as_tokens(tokens))
        self._hold(known.nodes)
        return known

    def _hold(self, nodes: Sequence[Node]) -> None:
        self._index.hold(nodes)
        self._queue.use(self._index.use(nodes), [node.digest for node in nodes])

    def release(self, prefix: PrefixMatch | KnownPrefix) -> None:
        """Release a held prefix, or a match that will not be loaded. `load` releases its match itself."""
        self._release(prefix.nodes)

    def next_use(self) -> int:
        """Return the time of a use, for `save`: microseconds since 1970, always later than the last one."""
        return self._index.next_use()

    def _release(self, nodes: Sequence[Node]) -> None:
        self._index.release(nodes)
        self._remover.discard_released(nodes)
        self._quota.check()

    async def settle(
        self,
        chain: Chain,
        tokens: Sequence[int],
        least: int,
        timeout_s: float,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until the queued snapshots of these tokens are on disk, if they extend beyond `least` tokens.

        The wait ends early after `timeout_s`, or once `is_stopped` returns true.
        """
        known = self._under(chain.policy).known(chain, as_tokens(tokens))
        queued = [node for node in known.nodes if not node.durable]
        until = self._queue.monotonic() + timeout_s
        while known.edges[-1] > least and any(not one.durable and self._index.has(one) for one in queued):
            if self._queue.monotonic() > until or is_stopped():
                return
            await asyncio.sleep(_SETTLE_S)

    async def find_remote(self, chain: Chain, tokens: Sequence[int]) -> RemotePrefix | None:
        """Find snapshots in the remote tier that extend the stored prefix of `tokens`: `TierAccess.find`."""
        if self._remote is None:
            return None
        prefixes = self._under(chain.policy)
        num_stored = prefixes.known(chain, as_tokens(tokens)).edges[-1]
        return await self._remote.find(chain, as_tokens(tokens), num_stored, prefixes.needed)

    async def load(
        self, match: PrefixMatch, *, capacity_tokens: int = 0, only: KvPart | None = None
    ) -> RestoredKv | None:
        """Read a match on I/O threads into evaluated arrays, with memory for `capacity_tokens` tokens in all.

        Reads only the KV that tokens after the match see, or with `only` just this part of the KV. For a
        layer that sees only some tokens, the arrays have just these tokens, in the form for `RingCache.fill`.

        A file that fails verification is moved to quarantine, and the prefix before it is returned. Returns
        None if no prefix is left; if the prefix needs a state or files that were not read (then match again);
        or after the time limit, if the disk hangs. Always releases the match.
        """
        if self._queue.is_closing or not match.placed:
            self.release(match)
            return None
        prefixes = self._under(match.policy)
        nodes, chain = prefixes.to_read(match, only)
        chain = replace(chain, capacity_tokens=capacity_tokens)
        limit_s = LOAD_S + sum(node.size_bytes for node in nodes) / _LOAD_BYTES_PER_S
        try:
            read = partial(read_chain, self._folder, chain, limit_s, self._threads)
            outcome = await self._threads.run(read, limit_s)
            doubtful = None if outcome.doubt is None else nodes[outcome.num_read]
            if doubtful is not None:
                self._keep_no_copy(doubtful)
        except TimeoutError:
            self.timed_out += 1
            if not self._hangs:
                _log.error("restores_hang", limit_s=round(limit_s, 1))
            self._hangs = True
            return None
        except (RuntimeError, MemoryError, OSError) as error:  # a lack of resources: files may be valid
            _log.error("restore_failed", error=str(error))
            return None
        finally:
            self.release(match)
        self._hangs = False
        if doubtful is not None:
            self.rejected += self._remover.reject(doubtful, outcome.doubt or "")
        if outcome.restored is not None:
            self.restored_bytes += outcome.restored.size_bytes
        return outcome.restored

    async def recall(
        self, chain: Chain, tokens: Sequence[int], spans: Sequence[Span]
    ) -> tuple[tuple[Span, ...], dict[str, Any]]:
        """Read the KV of those `spans` that are stored, for the layers to which the chain's policy applies.

        `tokens` must include the last span. Returns the spans that were read, in order, and arrays of all
        their tokens; no spans if nothing was read.
        """
        match = self.match(chain, tokens)
        stored = sorted((span.start, span.end) for span in spans if span.end <= match.num_tokens)
        found = tuple(Span(start, end) for start, end in stored)
        if not found:
            self.release(match)
            return (), {}
        restored = await self.load(match, only=KvPart(match.policy, found))
        return ((), {}) if restored is None else (found, restored.tensors)

    async def block(self, chain: Chain, tokens: Sequence[int], span: Span) -> dict[str, Any] | None:
        """Read the KV of one block, of all layers, into arrays by the names of the snapshot's tensors.

        `tokens` must end with the block. Returns None if the block is not stored or cannot be read.
        """
        found: dict[str, Any] = {}
        for reach in dict.fromkeys(self._under(chain.policy).layout.reaches):
            match = self.match(chain, tokens)
            if match.num_tokens < span.end:
                self.release(match)
                return None
            part = await self.load(match, only=KvPart(reach, (span,)))
            if part is None:
                return None
            found |= part.tensors
        return found

    async def condemn(self, chain: Chain, tokens: Sequence[int], span: Span, why: str) -> str:
        """Move a block with wrong KV to quarantine, and remove all blocks that continue it.

        `tokens` must end with the block. Returns the name of its file.
        """
        digest = chain.names(as_tokens(tokens))[span.end // chain.block]
        with suppress(TimeoutError):  # it is removed even so
            await self._threads.run(partial(self._folder.quarantine, digest), LOAD_S)
        later = [digest]
        for one in later:
            later += [node.digest for node in self._index.children(one)]
        for one in reversed(later):
            if (node := self._index.get(one)) is not None:
                self.rejected += self._remover.reject(node, why)
        return self._folder.codec.file_name(digest)

    async def past(
        self, chain: Chain, tokens: Sequence[int], end: int, patience_s: float
    ) -> StoredPast | None:
        """Wait until the KV of the first `end` tokens is stored; return a `StoredPast`, which reads the KV.

        `tokens` must include the whole block with token `end - 1`. Returns None if some of the KV is neither
        stored nor queued, or if the disk takes no snapshot for `patience_s`. The caller must hold the prefix
        (`hold`) while it reads.
        """
        whole = as_tokens(tokens)[: -(-end // chain.block) * chain.block]
        num_written = -1
        while num_written != self._queue.counts.durable and not self._queue.is_closing:
            num_written = self._queue.counts.durable
            await self.settle(chain, whole, end - 1, patience_s)
        match = self.find(chain, whole)
        if match.num_tokens < end:
            return None
        only = KvPart(chain.policy, (Span(0, end),))
        _, read = self._under(chain.policy).to_read(match._replace(num_tokens=end), only)
        return StoredPast(self._folder, read, chain.policy, self._threads)

    def end_past(self, past: StoredPast) -> None:
        """Add the bytes that a `StoredPast` has read to the store's counts.

        If a file failed verification, remove its snapshot.
        """
        self.restored_bytes += past.size_bytes
        file, why = past.doubt or (None, "")
        node = self._index.get(file.digest) if file is not None else None
        if node is not None:
            self._keep_no_copy(node)
            self.rejected += self._remover.reject(node, why)

    def wanted(self, chain: Chain, tokens: Sequence[int]) -> list[Span]:
        """Return the spans of `tokens` to save: those that are neither stored nor queued.

        The spans are full blocks, then a piece of the last, partial block (see `blocks.tail_start`). A block
        is left out if the cache has a later one, and no layer sees it any more: it was evicted.
        """
        return self._under(chain.policy).wanted(chain, as_tokens(tokens))

    def save(
        self,
        chain: Chain,
        tokens: Sequence[int],
        span: Span,
        tensors: tuple[Tensor, ...],
        used: int | None = None,
    ) -> bool:
        """Queue the KV of `span` for the disk; False if it was dropped. `tokens` must include the span.

        `used` is the `next_use` of an idle session's last turn: only KV that was used earlier is evicted for
        it. None: the KV is in use now.
        Returns True also if the same KV is stored or queued already. Once the snapshot is on disk, smaller
        snapshots of the same tokens are removed. Raises `ValueError` if the tensors do not fit the span or
        the chain.
        """
        prefixes = self._under(chain.policy)
        tokens = as_tokens(tokens)[: span.end]
        parent = prefixes.parent(chain, tokens, span.start)
        if parent is None:
            return True
        resumable = not prefixes.is_stateful or any(tensor.of_state for tensor in tensors)
        mark = self._markers.setdefault(chain, Marker(chain.tenant)).mark(tokens)
        name = Name(parent, span.start, tokens.packed(span.start), resumable, mark)
        encoded = snapshot_format.encode(name, prefixes.identity, prefixes.layout.ordered(tensors))
        size_bytes = self._folder.codec.size_bytes(encoded.size_bytes)
        reason = self._refusal(name, size_bytes)
        node = self._quota.add(name, size_bytes, used) if reason is None else None
        if node is None:
            self._queue.drop(reason or "disk_limit")
            return False
        self._queue.write(node, name.tokens, encoded)
        window = prefixes.window(chain, tokens) if used is None else ()
        if window:  # the blocks that the session has left behind become the least recently used
            self._queue.use(self._index.use([*window, node]), [one.digest for one in window])
        return True

    async def close(self, timeout_s: float) -> bool:
        """End the I/O threads. False if a thread did not end in time; it then ends with the process."""
        return await self._threads.close(timeout_s)

    def _under(self, policy: Policy) -> Prefixes:
        """Return the prefixes under a policy, made at its first use."""
        prefixes = self._prefixes.get(policy)
        if prefixes is None:
            full = self._prefixes[FULL]
            identity = replace(full.identity, policy=full.layout.name(policy))
            prefixes = Prefixes(self._index, identity, full.layout.under(policy))
            self._prefixes[policy] = prefixes
            self._identities[prefixes.digest] = identity.block_tokens
            if self._remote is not None:
                self._remote.note(prefixes.digest, identity.block_tokens)
        return prefixes

    def _refusal(self, name: Name, size_bytes: int) -> DropReason | None:
        if self._queue.is_closing:
            return "closing"
        if self._queue.paused:
            return "disk_error"
        if size_bytes > self._queue.queue_bytes:
            return "too_large"
        if name.parent == bytes(DIGEST_BYTES):
            return "no_parent"
        return "queue_full" if size_bytes > self._queue.vacant_bytes() else None

    def _keep_no_copy(self, doubtful: Node) -> None:
        """Remove a damaged file from quarantine if its snapshot was forgotten during the read."""
        if doubtful.doomed:
            self._queue.unlink([doubtful.row], quarantined=True)
