"""Erases forgotten KV in a remote tier that still has it: one that was put back from a backup, say.

The tier itself says how far a log's erasures are carried out in it, so a backup says less than was erased
since. Belongs to the event loop; the tier is changed on the thread that uploads.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, defaultdict
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from cache.disk.header import read_name
from cache.disk.tier import ERASED, FileKey
from cache.names.errors import DoubtfulSnapshotError
from cache.names.marks import MARK_BYTES, ErasureProgress

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from cache.disk.folder import Folder
    from cache.disk.tier import Tier
    from cache.names.marks import Marks


class _Ask(Protocol):
    def __call__(self, work: Callable[[], dict[str, int]]) -> Awaitable[dict[str, int] | None]: ...


class TierEraser:
    """Carries out notes of forgotten sessions in the tier: collects them, then reads the tier once.

    While `is_certain` is false, the tier may have KV that must not be used.
    """

    #: Always empty: a tier that was restored from a backup also has its old entry in `ERASED`.
    put_back: Final[frozenset[bytes]] = frozenset()

    def __init__(
        self,
        tier: Tier,
        folder: Folder,
        there: set[bytes],
        ask: _Ask,
        queue: Callable[[Callable[[], None]], asyncio.Future[bool]],
    ) -> None:
        """`there` are the digests that this process has put; `ask` and `queue` run work on threads."""
        self.is_certain = True
        self._tier = tier
        self._folder = folder
        self._there = there
        self._ask = ask
        self._queue = queue
        self._marks: list[Marks] = []
        self._is_all = False
        self._erasure: asyncio.Future[bool] | None = None

    def doubt(self) -> None:
        """Let nothing be fetched from the tier until the next `note_erased` is done."""
        self.is_certain = False

    async def erase_marked(self, tenant: str, marks: Marks) -> bool:  # noqa: ARG002  # it is in the marks
        """Have the next `note_erased` remove snapshots with these marks; `doubt` until then. Return true."""
        self.doubt()
        self._marks.append(marks)
        return True

    async def clear(self) -> bool:
        """Have the next `note_erased` remove all snapshots; `doubt` until then. Return true."""
        self.doubt()
        self._is_all = True
        return True

    async def erased_up_to(self, log: str) -> ErasureProgress | None:
        """Return how far a log's erasures are carried out in the tier, by its own record; None without one.

        Forgets the earlier calls of `erase_marked` and `clear`. Raises `OSError` if the tier does not answer.
        """
        if self._erasure is not None:
            await asyncio.shield(self._erasure)
        self._marks, self._is_all = [], False
        found = await self._ask(partial(self._tier.contains, ERASED))
        if found is None:
            raise OSError("the remote tier does not answer")
        return min((progress for _, progress in _said(found, log)), default=None)

    async def note_erased(self, erased: ErasureProgress) -> None:
        """Carry out `erase_marked` and `clear`, then record in the tier how far erasures are carried out.

        Sets `is_certain`. Raises `OSError` if this fails: then the tier keeps its old record.
        """
        self._erasure = self._queue(partial(self._carry_out, self._marks, self._is_all, erased))
        if not await asyncio.shield(self._erasure):
            raise OSError("the remote tier could not erase what was forgotten")
        self.is_certain = True

    # The methods below run on the uploading thread.

    def _carry_out(self, marks: Sequence[Marks], is_all: bool, erased: ErasureProgress) -> None:
        if marks or is_all:
            keys = [*self._tier.keys()]
            self._remove(keys if is_all else self._forgotten(keys, marks))
            self._tier.sync()
        others = self._tier.contains(ERASED)
        name = f"{_hashed(erased.log)}-{erased.seq}-{int(erased.time_s)}-{erased.stored_s}"
        empty = self._folder.tmp / f"{name}.erased"
        empty.touch()
        self._tier.put(FileKey(ERASED, name), empty)
        empty.unlink(missing_ok=True)
        older = (one for one, progress in _said(others, erased.log) if progress <= erased and one != name)
        self._tier.remove(FileKey(ERASED, one) for one in older)

    def _remove(self, keys: Iterable[FileKey]) -> None:
        for key in keys:
            self._tier.remove([key])
            self._there.discard(self._folder.codec.digest_of(key.file) or b"")

    def _forgotten(self, keys: Sequence[FileKey], marks: Sequence[Marks]) -> Iterator[FileKey]:
        """Yield the keys of snapshots with these marks, except of those that another snapshot continues.

        Also of those that cannot be read.
        """
        noted: defaultdict[bytes, list[Marks]] = defaultdict(list)
        for one in marks:
            for at in range(0, len(one.digests), MARK_BYTES):
                noted[one.digests[at : at + MARK_BYTES]].append(one)
        num_later = Counter(key.parent for key in keys)
        for _, key in sorted(self._marked(keys, noted), reverse=True):
            if not num_later[key.file.partition(".")[0]]:
                num_later[key.parent] -= 1
                yield key

    def _marked(
        self, keys: Iterable[FileKey], noted: dict[bytes, list[Marks]]
    ) -> Iterator[tuple[int, FileKey]]:
        codec = self._folder.codec
        for key in keys:
            digest = codec.digest_of(key.file)
            if digest is None:  # not a file of Turnkeep
                continue
            copy = self._folder.fetch_path(digest, 0)
            try:
                name = read_name(self._tier.local(key, copy), codec)
                if any(one.has(name.mark, name.span.end) for one in noted.get(name.mark, ())):
                    yield name.start, key
            except DoubtfulSnapshotError:
                yield 0, key
            except FileNotFoundError:  # evicted meanwhile
                continue
            finally:
                copy.unlink(missing_ok=True)


def _hashed(log: str) -> str:
    return hashlib.blake2b(log.encode(), digest_size=8).hexdigest()


def _said(names: Iterable[str], log: str) -> Iterator[tuple[str, ErasureProgress]]:
    """Yield the names that say how far the erasures of a log are carried out, and what they say."""
    for name in names:
        of, _, said = name.partition("-")
        with suppress(ValueError):  # not a file of Turnkeep
            if of == _hashed(log):
                seq, time_s, stored_s = said.split("-")
                yield name, ErasureProgress(log, int(seq), float(time_s), float(stored_s))
