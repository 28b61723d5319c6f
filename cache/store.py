"""The interface of a running cache: match, load, save, forget, limits, barrier, stats.

Belongs to the event loop, which owns the index and all counts; blocking work runs on the writer thread and
on I/O threads. Callers name KV by tenant and tokens; the store knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from cache.disk.codec import PLAIN, Codec
from cache.disk.stored_past import StoredPast
from cache.disk.write_queue import WriteState
from cache.index.directory import OpenDirectory, open_directory
from cache.index.quota import Quota
from cache.index.remover import Remover
from cache.index.stored_kv import Form, Loading, Match
from cache.index.window_eviction import WindowEviction

from .disk import format as snapshot_format
from .disk.folder import may_hold
from .disk.header import NO_NAME
from .disk.tier import SharedDirectory, Tier
from .index.remote import Remote, RemoteCounts
from .index.stats import SnapshotStats
from .names import blocks
from .names.errors import KeyFileError
from .names.policy import FULL
from .names.snapshot import Name
from .names.tokens import Chain, as_tokens, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cache.disk.chain_reader import RestoredKv
    from cache.disk.write_queue import DropReason, Write

    from .index.nodes import Node
    from .index.remote import RemotePrefix
    from .kv.arrays import Arrays
    from .names.blocks import Span
    from .names.identity import Identity
    from .names.marks import ErasureProgress, Marks
    from .names.policy import Policy
    from .names.snapshot import ModelLayout, Tensor
    from .names.tokens import Tokens

__all__ = [
    "Codec",
    "ErasureResult",
    "HeldPrefix",
    "Match",
    "Store",
    "StoredPast",
    "Tier",
    "codec_by",
    "may_hold",
    "tier_at",
]

_log = structlog.get_logger("turnkeep.cache")

_DEFAULT_MIN_FREE_BYTES: Final = 1 << 30
#: The interval at which `settle` checks again.
_SETTLE_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """The stored and queued snapshots of some tokens, which `Store.hold` protects from eviction.

    `edges` are the positions where the pieces of the last, partial block start and end; the first is a block
    boundary. `last` is the last snapshot; holding it protects its whole chain.
    """

    edges: tuple[int, ...]
    last: Node | None = None


@dataclass(frozen=True, slots=True)
class ErasureResult:
    """The result of an erasure. `settled` is true if certainly no copy is left on disk or in the tier."""

    num_snapshots: int
    settled: bool


def _start(span: Span) -> int:
    return span.start


def codec_by(key_file: Path | None) -> Codec:
    """Return an `Codec` that encrypts with the key in `key_file`, or without a key file does not encrypt.

    Raises `KeyFileError`.
    """
    if key_file is None:
        return PLAIN
    try:
        from .disk.sealing import Sealed, read_key
    except ImportError:
        raise KeyFileError("cryptography is missing; pip install 'turnkeep[encryption]' brings it") from None
    return Sealed(read_key(key_file))


def tier_at(place: str, codec: Codec, *, max_bytes: int, min_free_bytes: int) -> Tier:
    """Open a remote tier at `place`, the URL of an object store or a directory (made if missing). Blocking.

    The limits apply to a directory only. Raises `OSError`, `SealedError` if the files in a directory need
    another key than that of `codec`, and `ModuleNotFoundError` if the library for object stores is missing.
    """
    if "://" in place:
        from .disk.objects import ObjectStore

        return ObjectStore(place)
    return SharedDirectory(Path(place), codec, max_bytes=max_bytes, min_free_bytes=min_free_bytes)


class Store:
    """An open cache directory, made by `open`. Every method but `room` belongs to the event loop."""

    def __init__(
        self,
        opened: OpenDirectory,
        *,
        identity: Identity,
        layout: ModelLayout,
        max_bytes: int,
        queue_bytes: int,
        min_free_bytes: int,
        keep_behind: int | None,
        model: str,
        monotonic: Callable[[], float],
        tier: Tier | None,
    ) -> None:
        self._folder = opened.folder
        self._catalog = opened.catalog
        index = self._index = opened.index
        #: Forms by policy; `_form` adds one at the first use of a policy.
        self._forms = {FULL: Form(identity, layout, index)}
        #: Identities of all models and policies that have snapshots here.
        self._identities = opened.identities
        self._erased = {one.log: one for one in opened.erased}
        #: Erasures that are not certain yet (tenant, packed tokens, `shared`): `erase_marked` repeats them,
        #: since the index no longer has their tokens.
        self._unsettled: set[tuple[str, bytes, int]] = set()
        self._model = model
        writer = self._writer = opened.writer(self._write_ended, queue_bytes=queue_bytes, monotonic=monotonic)
        self._monotonic = monotonic
        removal = self._removal = Remover(index, writer)
        behind = self._behind = WindowEviction(index, removal, keep_behind)
        self._room = Quota(index, writer, removal, behind, max_bytes=max_bytes, min_free_bytes=min_free_bytes)
        self._loading = Loading(
            opened.folder, index, writer, removal, rejected=opened.rejected, release=self.release
        )
        self._remote = None
        if tier is not None:
            self._remote = Remote(tier, opened.folder, index, self._adopt, self._pass_over)
            self._remote.note(identity.digest(), identity.block_tokens)
            removal.useless = self._remote.remove
        self._lost: Callable[[], None] = lambda: None
        self._closing = False
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
        keep_behind: int | None = None,
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
        snapshots that wait in memory for the disk; `min_free_bytes` of the file system stay free. KV that no
        layer sees is evicted once all sessions are `keep_behind` tokens past it; with None, only when disk
        space is needed. `model` is the model's name in listings. `clock` (seconds since 1970) orders uses,
        `monotonic` times pauses after failed writes. `codec` has the directory's key. Snapshots are copied
        to the `tier`, and can be fetched from it. Raises `DirectoryLockedError`, `SealedError`, `OSError`.
        """
        opened = await asyncio.to_thread(open_directory, directory, identity.digest(), model, clock, codec)
        return cls(
            opened,
            identity=identity,
            layout=layout,
            max_bytes=max_bytes,
            queue_bytes=queue_bytes,
            min_free_bytes=min_free_bytes,
            keep_behind=keep_behind,
            model=model,
            monotonic=monotonic,
            tier=tier,
        )

    def chain(self, tenant: str, policy: Policy = FULL, of: Tokens | None = None) -> Chain:
        """Return the chain that names a tenant's blocks under a policy.

        A turn passes its chain to the other methods, so that each block is hashed once. With `of`, these
        tokens and all tokens that extend them share the chain. A method that gets a tenant instead of a chain
        uses the policy `FULL`.
        """
        form = self._form(policy)
        self._writer.note_identity(form.digest, self._model)
        root = blocks.root(form.digest, tenant)
        if form.layout.reach != FULL:
            self._index.limit(root, form.layout.reach)
        self._behind.follow(root, form.layout, form.identity)
        chain = Chain(root, form.identity.block_tokens, policy)
        return chain if of is None else of.chains.setdefault(root, chain)

    def match(self, tenant: str | Chain, tokens: Sequence[int]) -> Match:
        """Find the longest stored prefix of `tokens`; protect it from eviction until `load` or `release`."""
        chain = self._chain(tenant)
        num_tokens, nodes = self._form(chain.policy).prefixes.longest(chain, as_tokens(tokens))
        if nodes:
            self._index.hold(nodes[-1])
            self._use(nodes[-1])
        return Match(num_tokens, tuple(nodes), chain.policy)

    def num_stored(self, chain: Chain, tokens: Sequence[int]) -> int:
        """Return the length of the longest prefix of `tokens` on disk; also once the store is closed."""
        return self._form(chain.policy).prefixes.longest(chain, as_tokens(tokens))[0]

    async def settle(
        self,
        tenant: str | Chain,
        tokens: Sequence[int],
        least: int,
        timeout_s: float,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until the queued snapshots of these tokens are on disk, if they extend beyond `least` tokens.

        The wait ends early after `timeout_s`, or once `is_stopped` returns true.
        """
        chain = self._chain(tenant)
        edges, last = self._form(chain.policy).prefixes.known(chain, as_tokens(tokens))
        until = self._monotonic() + timeout_s
        while last is not None and edges[-1] > least and not last.durable and self._index.has(last):
            if self._monotonic() > until or is_stopped():
                return
            await asyncio.sleep(_SETTLE_S)

    async def find_remote(self, chain: Chain, tokens: Sequence[int]) -> RemotePrefix | None:
        """Find snapshots in the remote tier that extend the stored prefix of `tokens`; None if none."""
        if self._remote is None or self._closing:
            return None
        prefixes = self._form(chain.policy).prefixes
        edges, _ = prefixes.known(chain, as_tokens(tokens))
        return await self._remote.find(chain, as_tokens(tokens), edges[-1], prefixes.needed)

    async def fetch(self, found: RemotePrefix) -> tuple[int, float]:
        """Fetch snapshots from the remote tier into this directory; return the bytes, and the seconds needed.

        Skips a snapshot that cannot be fetched or does not fit, and all snapshots that continue it.
        """
        if self._remote is None or self._closing:
            return 0, 0.0
        return await self._remote.fetch(found)

    def hold(self, tenant: str | Chain, tokens: Sequence[int]) -> HeldPrefix:
        """Protect the snapshots of these tokens, stored or queued, from eviction until `release`.

        So a turn can save snapshots that continue them, whatever other sessions save or forget meanwhile.
        """
        chain = self._chain(tenant)
        edges, last = self._form(chain.policy).prefixes.known(chain, as_tokens(tokens))
        if last is not None:
            self._index.hold(last)
            used = next((node for node in last.chain() if node.usable), None)
            if used is not None:
                self._use(used)
        return HeldPrefix(edges, last)

    def release(self, match: Match | HeldPrefix) -> None:
        """Release a held prefix, or a match that will not be loaded. `load` releases its match itself."""
        last = match.last if isinstance(match, HeldPrefix) else next(reversed(match.nodes), None)
        held = self._index.release(last) if last is not None else None
        if held is not None:
            self._removal.discard_released(held)
        self._room.check()

    async def load(self, match: Match, *, room_tokens: int = 0) -> RestoredKv | None:
        """Read a match on I/O threads into evaluated arrays, with memory for `room_tokens` tokens in total.

        Reads only the KV that tokens after the match see. For a layer that sees only some tokens, the arrays
        have just these tokens, in the form for `RingCache.fill`.

        A file that fails verification is moved to quarantine, the snapshots that continue it are removed, and
        the prefix before it is returned. Returns None if no prefix is left; if the prefix needs a state or
        files that were not read (then match again); or after the time limit, if the disk hangs. Always
        releases the match.
        """
        if self._closing or not match.nodes:
            self.release(match)
            return None
        return await self._loading.load(self._form(match.policy), match, room_tokens)

    async def recall(
        self, chain: Chain, tokens: Sequence[int], spans: Sequence[Span]
    ) -> tuple[tuple[Span, ...], Arrays]:
        """Read the KV of those `spans` that are stored, for the layers to which the chain's policy applies.

        `tokens` must include the last span. Returns the spans that were read, in order, and arrays of all
        their tokens; no spans if nothing was read.
        """
        match = self.match(chain, tokens)
        found = tuple(sorted((span for span in spans if span.end <= match.num_tokens), key=_start))
        if self._closing or not found:
            self.release(match)
            return (), {}
        restored = await self._loading.recall(self._form(match.policy), match, found)
        return ((), {}) if restored is None else (found, restored.tensors)

    async def past(
        self,
        chain: Chain,
        tokens: Sequence[int],
        end: int,
        patience_s: float,
    ) -> StoredPast | None:
        """Wait until the KV of the first `end` tokens is stored; return a `StoredPast`, which reads the KV.

        `tokens` must include the whole block with token `end - 1`. Returns None if some of the KV is neither
        stored nor queued, or if the disk takes no snapshot for `patience_s`. The caller must hold the prefix
        (`hold`) while it reads.
        """
        whole = as_tokens(tokens)[: -(-end // chain.block) * chain.block]
        num_written = -1
        while num_written != self._writer.counts.durable and not self._closing:
            num_written = self._writer.counts.durable
            await self.settle(chain, whole, end - 1, patience_s)
        match = self.match(chain, whole)
        self.release(match)
        form = self._form(chain.policy)
        return self._loading.past(form, match, end) if match.num_tokens >= end else None

    def end_past(self, past: StoredPast) -> None:
        """Add the bytes that a `StoredPast` has read to the store's counts.

        If a file failed verification, remove its snapshot and all snapshots that continue it.
        """
        self._loading.end_past(past)

    def wanted(self, tenant: str | Chain, tokens: Sequence[int]) -> list[Span]:
        """Return the spans of `tokens` to save: those that are neither stored nor queued.

        The spans are full blocks, then a piece of the last, partial block (see `blocks.tail_start`). A block
        is left out if it was evicted and no layer sees it any more.
        """
        chain = self._chain(tenant)
        return self._form(chain.policy).prefixes.wanted(chain, as_tokens(tokens))

    def save(
        self, tenant: str | Chain, tokens: Sequence[int], span: Span, tensors: tuple[Tensor, ...]
    ) -> bool:
        """Queue the KV of `span` for the disk; False if it was dropped. `tokens` must include the span.

        Returns True also if the same KV is stored or queued already. Once the snapshot is on disk, smaller
        snapshots of the same tokens are removed. Raises `ValueError` if the tensors do not fit the span or
        the chain.
        """
        chain = self._chain(tenant)
        form = self._form(chain.policy)
        tokens = as_tokens(tokens)[: span.end]
        parent = form.prefixes.parent(chain, tokens, span.start)
        if parent is None:
            return True
        resumable = not form.stateful or any(tensor.of_state for tensor in tensors)
        name = Name(parent, span.start, tokens.packed(span.start), resumable)
        encoded = snapshot_format.encode(name, form.identity, form.layout.ordered(tensors))
        size_bytes = self._folder.codec.size_bytes(encoded.size_bytes)
        reason = self._refusal(name, size_bytes)
        if reason is not None:
            self._writer.drop(reason)
            return False
        # Added before the eviction: as a queued child the node protects its own chain from it.
        node = self._index.add(name, size_bytes)
        if not self._room.make(size_bytes):
            self._index.undo_add(node)
            self._writer.drop("disk_limit")
            return False
        self._writer.write(node, encoded)
        return True

    def room(self) -> int:
        """Return how many bytes `save` can queue now. Safe on any thread; called before KV is copied."""
        return self._writer.room_bytes

    def spare(self) -> int:
        """Return how many bytes of snapshots that were lost `save` can queue again now.

        They leave half of the queue to new ones, unless it is empty.
        """
        return max(0, self.room() - (0 if self.is_idle else self._writer.queue_bytes // 2))

    @property
    def is_idle(self) -> bool:
        """Whether no write is queued or running."""
        return not self._writer.counts.in_flight_bytes

    def listen(self, lost: Callable[[], None]) -> None:
        """Call `lost` on the event loop for each queued snapshot that was neither written nor removed."""
        self._lost = lost

    def skip(self, num_snapshots: int) -> None:
        """Count snapshots as dropped: the caller did not copy their KV, because `room` was too small."""
        self._writer.drop("disk_error" if self._writer.paused else "queue_full", num_snapshots)

    def free_memory(self) -> None:
        """Drop the queued snapshots, to free their memory on the device.

        The snapshot that is being written keeps its memory until the write ends.
        """
        self._writer.abandon_queued("memory")

    def forget(self, tenant: str, tokens: Sequence[int], *, shared: int = 0) -> int:
        """Remove the snapshots of these tokens, except those that other sequences of tokens share.

        Shared snapshots are those that a remaining snapshot continues, and those of the first `shared`
        tokens. Covers all identities: other models, policies, `kv_bits`. Returns how many snapshots were
        removed. A snapshot that a load or a turn uses is removed at its release. After a `barrier` no removed
        snapshot comes back, not even by a write in flight.
        """
        return self._forget(tenant, pack(tokens), shared)

    def _forget(self, tenant: str, packed: bytes, shared: int) -> int:
        if self._remote is not None:
            self._remote.forget()
        within = self._within(tenant, packed)
        return self._removal.discard(node for node in within if node.end > shared)

    async def erase(
        self, tenant: str, tokens: Sequence[int], timeout_s: float = 2.0, *, shared: int = 0
    ) -> ErasureResult:
        """Call `forget` at once, then wait at most `timeout_s` until the removal is durable.

        Removes copies in quarantine and in the remote tier too. The result is not settled if time ran out, if
        a turn still uses one of the snapshots, if a removal failed, or if there are files of another format
        version, whose tokens are unknown.
        """
        return await self._erase(tenant, pack(tokens), shared, timeout_s)

    async def erase_marked(self, tenant: str, marks: Marks, timeout_s: float = 2.0) -> bool:
        """Erase, like `erase`, the snapshots of a forgotten session, given the marks of its tokens.

        Repeats earlier erasures of these tokens, also those by `erase`, that could not be settled. Returns
        false if one still cannot: call again later. Snapshots that differ from the tokens only after the last
        mark are erased too.
        """
        chains = {(tenant, packed, marks.shared) for packed in self._marked(tenant, marks)}
        for one in self._unsettled:
            if one[0] == tenant and marks.begin(tenant).then(one[1]) is not None:
                chains.add(one)
        for one in chains:
            await self._erase(*one, timeout_s)
        return self._unsettled.isdisjoint(chains)

    def _marked(self, tenant: str, marks: Marks) -> set[bytes]:
        """Return the packed tokens of each longest chain, stored or queued, that agrees with the marks."""
        found: set[bytes] = set()
        for identity in self._identities:
            trails = [(blocks.root(identity, tenant), marks.begin(tenant))]
            while trails:
                parent, trail = trails.pop()
                ways = [(one, trail.then(one.tokens)) for one in self._index.children(parent)]
                behind = [(one.digest, way) for one, way in ways if way is not None]
                trails += behind
                last = None if behind else self._index.get(parent)
                if last is not None and last.end > marks.shared:
                    found.add(b"".join(reversed([node.tokens for node in last.chain()])))
        return found

    def erased_up_to(self, log: str) -> ErasureProgress | None:
        """Return how far this cache has carried out a log's erasures, by `note_erased`; None if unknown."""
        return self._erased.get(log)

    def note_erased(self, erased: ErasureProgress) -> None:
        """Store how far this cache has carried out a log's erasures; on disk only after the queued ones."""
        self._erased[erased.log] = erased
        self._writer.note_erased(erased)

    async def _erase(self, tenant: str, packed: bytes, shared: int, timeout_s: float) -> ErasureResult:
        self._unsettled.add((tenant, packed, shared))
        num_snapshots = self._forget(tenant, packed, shared)
        erasing = None if self._remote is None else self._remote.erase(tenant, packed, shared)
        is_remote_clean = True
        erasure = None
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained()
                erasure = self._writer.erase(packed)
                await self._writer.barrier()
                if erasing is not None:
                    is_remote_clean = await asyncio.shield(erasing)
        except TimeoutError:
            return ErasureResult(num_snapshots, settled=False)
        finally:
            if erasure is None:
                self._writer.erase(packed)  # although nobody waits for its end
        is_held = any(node.doomed for node in self._within(tenant, packed))
        is_clean = erasure.clean and is_remote_clean and not is_held
        if is_clean:
            self._unsettled.discard((tenant, packed, shared))
        # These files are not tried again: only another version of the program can read them.
        is_unknown = bool(self._index.children(NO_NAME.parent))
        return ErasureResult(num_snapshots, is_clean and not is_unknown)

    async def clear(self, timeout_s: float = 5.0) -> bool:
        """Remove everything from this directory: the snapshots of all tenants and models, and quarantine.

        False if time ran out or a removal failed. Snapshots that are saved after the call stay. No earlier
        snapshot comes back, not even by a write in flight.
        """
        if self._remote is not None:
            self._remote.forget()
        self._index.clear()
        erasure = self._writer.clear()
        return await self.barrier(timeout_s) and erasure.clean

    def set_limits(self, *, max_bytes: int | None = None, min_free_bytes: int | None = None) -> None:
        """Change the limits. Snapshots that exceed them are evicted in the background, in small batches."""
        self._room.set_limits(
            self._room.max_bytes if max_bytes is None else max_bytes,
            self._room.min_free_bytes if min_free_bytes is None else min_free_bytes,
        )

    async def barrier(self, timeout_s: float) -> bool:
        """Wait until all earlier writes and removals are done; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained()
        except TimeoutError:
            return False
        return True

    async def barrier_remote(self, timeout_s: float) -> bool:
        """Wait for all uploads to the remote tier that are queued now; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                if self._remote is not None:
                    await self._remote.barrier()
        except TimeoutError:
            return False
        return True

    def stats(self) -> SnapshotStats:
        """Return the current counts: snapshots by outcome, and the use of the disk."""
        return SnapshotStats.collect(
            self._writer.counts,
            self._index,
            self._room,
            restored_bytes=self._loading.restored_bytes,
            rejected=self._loading.rejected,
            timed_out=self._loading.timed_out,
            remote=self._remote.counts if self._remote is not None else RemoteCounts(),
        )

    async def close(self, timeout_s: float = 5.0, *, discard: bool = False) -> bool:
        """Write the queue, end the threads and unlock the directory. False if time ran out.

        Snapshots that are not written in time are dropped. If the writer hangs, the directory stays locked; a
        hanging read ends with the process. Later saves are refused; closing again does nothing. With
        `discard`, everything is removed instead of writing the queue.
        """
        if self._closing:
            return True
        self._closing = True
        self._room.close()
        drained = await (self.clear(timeout_s / 2) if discard else self.barrier(timeout_s / 2))
        remote = self._remote
        _, stopped, left = await asyncio.gather(
            asyncio.sleep(0) if remote is None else remote.close(timeout_s / 2),
            self._writer.stop(timeout_s / 2),
            self._loading.close(timeout_s / 2),
        )
        if stopped:
            self._catalog.close()
            self._folder.close()
        if not (drained and stopped and left):
            _log.warning("cache_closed_in_haste", drained=drained, written=stopped, read=left)
        return drained and stopped and left

    async def _drained(self) -> None:
        await self._writer.barrier()
        # The end of a write may queue removals: of superseded pieces, and of files that were forgotten while
        # they were renamed. Removals queue nothing more.
        await self._writer.barrier()

    def _form(self, policy: Policy) -> Form:
        """Return the identity and layout of the model's snapshots under a policy; cached by policy."""
        form = self._forms.get(policy)
        if form is None:
            full = self._forms[FULL]
            identity = replace(full.identity, policy=full.layout.name(policy))
            form = self._forms[policy] = Form(identity, full.layout.under(policy), self._index)
            self._identities.add(form.digest)
            if self._remote is not None:
                self._remote.note(form.digest, identity.block_tokens)
        return form

    def _within(self, tenant: str, packed: bytes) -> Iterator[Node]:
        """Yield a tenant's snapshots, of all models, that hold only tokens of `packed`; last ones first."""
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

    def _adopt(self, name: Name, path: Path, size_bytes: int) -> Node | None:
        """Add a fetched file to the index and queue its move into the directory; None if it does not fit."""
        if self._closing or self._writer.paused or (name.start and self._index.get(name.parent) is None):
            return None
        node = self._index.add(name, size_bytes)
        if not self._room.make(size_bytes):
            self._index.undo_add(node)
            return None
        self._writer.write(node, None, path)
        return node

    def _pass_over(self, names: Iterable[Name]) -> None:
        """Add gaps (nodes without files) for snapshots in the remote tier that fetched ones continue."""
        nodes = []
        for name in names:
            if self._index.get(name.digest) is None:
                if name.start and self._index.get(name.parent) is None:
                    break
                nodes.append(self._index.add(name, 0))
        self._removal.make_gaps(nodes)

    def _write_ended(self, write: Write[Node]) -> None:
        """Update the index after a write has ended. Called by the writer, on the event loop."""
        self._removal.note_end(write)
        if self._remote is not None and write.node.durable and write.fetched is None:
            self._remote.offer(write.node)
        self._room.check()
        if write.abandoned != "cancelled" and (write.abandoned or write.state is WriteState.FAILED):
            self._lost()
