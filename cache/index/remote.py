"""A store's interface to the remote tier: uploads the store's snapshots, fetches other workers', erases.

Belongs to the event loop, except for the methods that run on threads. One thread uploads and removes, in the
order of the calls, so that no snapshot stays in the tier that was uploaded and then forgotten. Other threads
fetch. If the tier fails, only time is lost: the missing KV is prefilled.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from cache.disk import header
from cache.disk.io_threads import IoThreads
from cache.disk.tier import IDENTITIES, FileKey
from cache.names import blocks
from cache.names.errors import DoubtfulSnapshotError
from cache.names.tokens import TOKEN_BYTES

from .tier_eraser import TierEraser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from cache.disk.folder import Folder
    from cache.disk.tier import Tier
    from cache.names.snapshot import Name
    from cache.names.tokens import Chain, Tokens

    from .index import SnapshotIndex
    from .nodes import Node
    from .quota import Quota
    from .remover import Remover
    from .write_queue import WriteQueue

_T = TypeVar("_T")

_log = structlog.get_logger("turnkeep.cache")

_THREADS: Final = 8
#: Files that are fetched at a time. Files that continue a missing one cannot be used.
_BATCH: Final = 16
#: The time limit of one call of the tier, even for a large file.
_LIMIT_S: Final = 10.0
#: The most jobs that may wait for the uploading thread; further snapshots are dropped.
_MAX_WAITING: Final = 10_000
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
#: How long `fetch` waits for adopted files to be in place, and how often it checks.
_PLACED_S: Final = 5.0
_POLL_S: Final = 0.002


@dataclass(slots=True)
class RemoteCounts:
    """Totals since the start."""

    #: Bytes uploaded, also of snapshots that the tier had already; and bytes fetched.
    put_bytes: int = 0
    fetched_bytes: int = 0
    #: Snapshots not uploaded, because the tier is too slow or paused.
    dropped: int = 0
    #: Calls of the tier that failed or exceeded the time limit.
    failed: int = 0


@dataclass(frozen=True, slots=True)
class RemotePrefix:
    """Snapshots in the tier that continue the prefix that this worker has stored."""

    #: The length of the stored prefix in tokens, and with these snapshots.
    num_stored: int
    num_tokens: int
    #: The snapshots to fetch: (parent, digest), in order.
    links: tuple[tuple[bytes, bytes], ...]


class TierAccess:
    """One worker's access to the tier."""

    def __init__(
        self,
        tier: Tier,
        folder: Folder,
        index: SnapshotIndex,
        queue: WriteQueue,
        quota: Quota,
        remover: Remover,
    ) -> None:
        self.counts = RemoteCounts()
        self._tier = tier
        self._folder = folder
        self._index = index
        self._write_queue = queue
        self._quota = quota
        self._remover = remover
        remover.useless = self.remove
        #: Incremented by each `forget`: files whose fetch began before it are not adopted.
        self._num_forgotten = 0
        self._paused_until = self._pause_s = 0.0
        self._numbers = count()
        #: The names of this process's identities in the tier's list.
        self._identities: set[str] = set()
        #: Digests of snapshots that this process has put or fetched. The tier may have evicted some.
        self._there: set[bytes] = set()
        #: Files of forgotten snapshots that `erase_nodes` has not removed yet.
        self._to_erase: set[FileKey] = set()
        self._fetching = IoThreads("fetch", _THREADS)
        #: One thread, which keeps the order of uploads and removals.
        self._uploading = IoThreads("upload", 1)
        self.eraser: Final = TierEraser(tier, folder, self._there, self._asked, self._queue_erasure)

    def note(self, identity: bytes, block_tokens: int) -> None:
        """Add an identity to the tier's list, so that every worker's `erase` covers its snapshots.

        The list is written before each upload, as somebody may have emptied the tier.
        """
        self._identities.add(f"{identity.hex()}-{block_tokens}")

    def offer(self, node: Node) -> None:
        """Queue the upload of a stored snapshot, and before it of earlier snapshots that the tier may lack.

        Does nothing if the tier is too slow or fails: a later offer of the same chain includes the snapshot.
        """
        if self._uploading.num_waiting >= _MAX_WAITING or monotonic() < self._paused_until:
            self.counts.dropped += 1
            return
        before = takewhile(lambda one: one.digest not in self._there, self._index.chain(node))
        for one in reversed([one for one in before if one.usable]):
            self._there.add(one.digest)
            self._uploading.submit(partial(self._try, partial(self._put, one.parent, one.digest)))

    def remove(self, node: Node) -> None:
        """Queue the removal of a snapshot from the tier that is damaged, or contained in a larger one."""
        self._there.discard(node.digest)
        self._uploading.submit(partial(self._try, partial(self._remove, self._key(node.parent, node.digest))))

    async def find(
        self, chain: Chain, tokens: Tokens, num_stored: int, needed: Callable[[int, int, int], Sequence[int]]
    ) -> RemotePrefix | None:
        """Find snapshots in the tier that extend the stored prefix of `num_stored` tokens.

        `needed` is `Prefixes.needed`, which says which blocks a session needs to resume. None if the tier has
        none, fails, is paused after a failure, or may have forgotten KV (`TierEraser.is_certain`).
        """
        if num_stored >= len(tokens) or monotonic() < self._paused_until or self._write_queue.is_closing:
            return None
        if not self.eraser.is_certain:
            return None
        names = chain.names(tokens)[: len(tokens) // chain.block + 1]
        here = (number for number, name in enumerate(names[1:]) if self._index.get(name) is None)
        first = next(here, len(names) - 1)
        found = await self._asked(partial(self._find, names, first, tokens, chain.block))
        if found is None or found[0] <= num_stored:
            return None
        num_tokens, num_blocks, pieces = found
        needs = needed(num_blocks, num_tokens, first)
        links = (*((names[number], names[number + 1]) for number in needs), *pieces)
        missing = (link for link in links if self._index.get(link[1]) is None)
        return RemotePrefix(num_stored, num_tokens, tuple(missing))

    async def fetch(self, found: RemotePrefix) -> tuple[int, float]:
        """Fetch snapshots into this worker's directory, and wait until they are in place.

        Returns the bytes fetched and the seconds needed. The first snapshot that is missing, damaged or does
        not fit ends the fetch, since later ones need it; those before it are kept.
        """
        if self._write_queue.is_closing:
            return 0, 0.0
        began, before, forgotten = monotonic(), self.counts.fetched_bytes, self._num_forgotten
        last = node = None
        for at in range(0, len(found.links), _BATCH):
            links = found.links[at : at + _BATCH]
            got = await self._got(links)
            for number, one in enumerate(got):
                node = None
                if one is not None and self._num_forgotten == forgotten:
                    node = self._adopted(*one)
                if node is None:
                    self._discard(got[number:])
                    break
                last = node
            if node is None:
                break
        until = monotonic() + _PLACED_S
        while last is not None and self._index.has(last) and not last.durable:
            if monotonic() > until:
                break
            await asyncio.sleep(_POLL_S)
        return self.counts.fetched_bytes - before, monotonic() - began

    async def _got(self, links: Sequence[tuple[bytes, bytes]]) -> list[tuple[Name, Path, int] | None]:
        """Fetch files to temporary paths; if cancelled, remove files that have arrived or arrive later."""
        wanted = Event()
        wanted.set()
        gets = (self._asked(partial(self._get, *link, wanted)) for link in links)
        try:
            return await asyncio.gather(*gets)
        except BaseException:
            wanted.clear()
            for _, digest in links:
                self._uploading.submit(partial(self._folder.discard_fetched, digest))
            raise

    def _adopted(self, name: Name, path: Path, size_bytes: int) -> Node | None:
        """Add a fetched file to the index, and queue its move into the directory; return its node.

        Returns None if the file does not fit.
        """
        known = self._index.get(name.digest)
        if known is not None:  # another turn was faster
            self._discard([(name, path, size_bytes)])
            return known
        if self._write_queue.is_closing or self._write_queue.paused:
            return None
        node = self._quota.add(name, size_bytes)
        if node is not None:
            self._write_queue.write(node, name.tokens, None, path)
            self._there.add(name.digest)
            self.counts.fetched_bytes += size_bytes
        return node

    def forget(self) -> None:
        """Have the files that are being fetched now discarded: they may have KV that is being erased."""
        self._num_forgotten += 1

    def erase(self, tenant: str, packed: bytes, shared: int) -> asyncio.Future[bool]:
        """Queue the removal of these tokens' snapshots from the tier, but not of the first `shared` tokens.

        Snapshots that others continue stay. The returned future gets true once the removal is durable, false
        on failure; shield it from cancellation.
        """
        return self._queue_erasure(partial(self._erase, tenant, packed, shared))

    def erase_nodes(self, nodes: Iterable[Node]) -> asyncio.Future[bool]:
        """Queue the removal of these snapshots from the tier, and of those of earlier calls that failed.

        The returned future is like that of `erase`.
        """
        for node in nodes:
            self._there.discard(node.digest)
            self._to_erase.add(self._key(node.parent, node.digest))
        return self._queue_erasure(self._erase_left)

    def _queue_erasure(self, work: Callable[[], None]) -> asyncio.Future[bool]:
        """Queue `work`, which removes files from the tier. Returns a future (shield it): false on failure."""
        return asyncio.wrap_future(self._uploading.submit(partial(self._is_erased_by, work)))

    async def close(self, timeout_s: float) -> bool:
        """Finish the queued uploads and removals, and end the threads; False after `timeout_s`."""
        threads = (self._uploading, self._fetching)
        return all(await asyncio.gather(*(one.close(timeout_s) for one in threads)))

    async def _asked(self, work: Callable[[], _T | None]) -> _T | None:
        """Run `work`, which calls the tier, on a thread; None if the tier fails or is too slow."""
        try:
            return await self._fetching.run(work, _LIMIT_S)
        except (OSError, TimeoutError) as error:
            self._failed(error)
            return None

    def _discard(self, got: Sequence[tuple[Name, Path, int] | None]) -> None:
        """Remove fetched files that were not adopted."""
        for one in got:
            if one is not None:
                self._uploading.submit(partial(one[1].unlink, missing_ok=True))

    def _failed(self, error: Exception) -> None:
        """Pause `find` and uploads after a failed call; each further one doubles the pause. Any thread."""
        self.counts.failed += 1
        self._there.clear()  # some of them may not have been put
        if not self._pause_s:
            _log.error("remote_tier_fails", error=str(error) or repr(error))
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
        self._paused_until = monotonic() + self._pause_s

    # The methods below run on the threads.

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # the thread must go on
            self._failed(error)
        else:
            if self._pause_s:
                _log.info("remote_tier_recovered")
            self._pause_s = self._paused_until = 0.0

    def _stem(self, digest: bytes) -> str:
        return self._folder.codec.file_name(digest).partition(".")[0]

    def _key(self, parent: bytes, digest: bytes) -> FileKey:
        return FileKey(self._stem(parent), self._folder.codec.file_name(digest))

    def _note_identities(self) -> None:
        for identity in tuple(self._identities):
            path = self._folder.tmp / f"{identity}.identity"
            path.touch()
            self._tier.put(FileKey(IDENTITIES, identity), path)
            path.unlink(missing_ok=True)

    def _put(self, parent: bytes, digest: bytes) -> None:
        self._note_identities()
        path = self._folder.path(digest)
        try:
            size_bytes = path.stat().st_size
            self._tier.put(self._key(parent, digest), path)
        except FileNotFoundError:
            if path.exists():
                raise
            self._there.discard(digest)  # evicted meanwhile
            return
        self.counts.put_bytes += size_bytes

    def _remove(self, key: FileKey) -> None:
        self._tier.remove([key])
        self._there.discard(self._folder.codec.digest_of(key.file) or b"")  # so that a later save is uploaded

    def _find(
        self, names: Sequence[bytes], first: int, tokens: Tokens, block: int
    ) -> tuple[int, int, tuple[tuple[bytes, bytes], ...]]:
        """Find the last block in the tier, by bisection from block `first` on, then the pieces after it.

        Bisection works because a tier evicts chains from their ends. Returns the position after the last
        piece, the number of blocks, and the pieces as (parent, digest).
        """

        def is_missing(number: int) -> bool:
            key = self._key(names[number], names[number + 1])
            return not self._tier.contains(key.parent, [key.file])

        last = len(names) - 1
        if first < last and is_missing(first):
            num = first
        else:
            num = first + bisect_left(range(first, last), True, key=is_missing)
        pieces: list[tuple[bytes, bytes]] = []
        end = num * block
        if num:  # at the root, all sessions of the tenant would be listed
            for parent, digest, num_tokens in self._pieces(names[num], tokens.packed(end, end + block)):
                pieces.append((parent, digest))
                end += num_tokens
        return end, num, tuple(pieces)

    def _pieces(self, parent: bytes, rest: bytes) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield the pieces of the tail `rest` in the tier, in order: parent, digest, number of tokens."""
        while rest:
            named = self._named(parent, rest)
            there = self._tier.contains(self._stem(parent), named)
            if not there:
                return
            digest, num_tokens = max((named[file] for file in there), key=lambda one: one[1])
            yield parent, digest, num_tokens
            parent, rest = digest, rest[num_tokens * TOKEN_BYTES :]

    def _named(self, parent: bytes, rest: bytes) -> dict[str, tuple[bytes, int]]:
        """Map the file name of each prefix of `rest`, as a piece after `parent`, to (digest, tokens)."""
        ends = range(TOKEN_BYTES, len(rest) + 1, TOKEN_BYTES)
        digests = ((blocks.link(parent, rest[:end]), end // TOKEN_BYTES) for end in ends)
        return {self._folder.codec.file_name(digest): (digest, num) for digest, num in digests}

    def _get(self, parent: bytes, digest: bytes, wanted: Event) -> tuple[Name, Path, int] | None:
        key, path = self._key(parent, digest), self._folder.fetch_path(digest, next(self._numbers))
        if not self._tier.get(key, path):
            return None
        try:
            name, size_bytes = header.read_name(path, self._folder.codec), path.stat().st_size
        except FileNotFoundError:  # an erasure has removed all temporary files
            return None
        except DoubtfulSnapshotError as error:
            _log.warning("remote_snapshot_doubtful", digest=digest.hex(), reason=error.reason)
            path.unlink(missing_ok=True)
            self._tier.remove([key])
            return None
        if not wanted.is_set():
            path.unlink(missing_ok=True)
            return None
        return name, path, size_bytes

    def _is_erased_by(self, work: Callable[[], None]) -> bool:
        try:
            work()
            self._tier.sync()
        except Exception as error:  # noqa: BLE001  # the thread must go on
            self._failed(error)
            return False
        return True

    def _erase(self, tenant: str, packed: bytes, shared: int) -> None:
        for identity in self._identities | self._tier.contains(IDENTITIES).keys():
            digest, _, block = identity.partition("-")
            with suppress(ValueError):  # not a file of Turnkeep
                self._erase_of(blocks.root(bytes.fromhex(digest), tenant), int(block), packed, shared)

    def _erase_left(self) -> None:
        keys = [*self._to_erase]
        self._tier.remove(keys)
        self._tier.sync()
        self._to_erase.difference_update(keys)

    def _erase_of(self, root: bytes, block: int, packed: bytes, shared: int) -> None:
        """Remove a chain's snapshots, from the end to the first that another chain continues."""
        width, names = block * TOKEN_BYTES, [root]
        for at in range(0, len(packed) - width + 1, width):
            names.append(blocks.link(names[-1], packed[at : at + width]))
        for number in reversed(range(len(names))):
            start = number * block
            rest = packed[number * width : (number + 1) * width]
            is_continued = self._erase_pieces(names[number], rest, shared - start)
            if is_continued or start <= shared:
                return
            self._remove(self._key(names[number - 1], names[number]))

    def _erase_pieces(self, parent: bytes, rest: bytes, least: int) -> bool:
        """Remove snapshots after `parent` whose tokens are a prefix of `rest` with more than `least` tokens.

        Returns whether any snapshot that continues `parent` is left.
        """
        there = self._tier.contains(self._stem(parent))
        named = self._named(parent, rest) if there else {}
        left = set(there) - named.keys()
        for file in there.keys() & named.keys():
            digest, num = named[file]
            if self._erase_pieces(digest, rest[num * TOKEN_BYTES :], least - num) or num <= least:
                left.add(file)
            else:
                self._remove(FileKey(self._stem(parent), file))
        return bool(left)
