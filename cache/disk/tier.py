"""The remote tier: snapshot files that several workers share, in a directory or an object store.

Each worker uploads its complete snapshots, and fetches the snapshots of other workers. A file in the tier
is the same as in a worker's own directory (encrypted if that directory is), and never changes: its name is
the digest of its tokens, model and tenant. So workers need no coordination. The tier is not trusted: a
fetched file is verified when it is read, like every snapshot.

Used on the threads of `index.remote`. Knows names and files; nothing of tokens or the index.
"""

from __future__ import annotations

import errno
import heapq
import os
import shutil
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol
from uuid import uuid4

import structlog

from . import private
from .codec import SEAL
from .fsync import sync

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    from .codec import Codec

_log = structlog.get_logger("turnkeep.cache")

#: Errors of a hard link between two file systems, or on one without hard links.
_UNLINKABLE: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP})
#: A sweep evicts until this share of the limit is used, so that not every put needs a sweep.
_SWEPT_SHARE: Final = 0.9
#: How often the directory is measured again, since other workers change it too.
_MEASURE_S: Final = 60.0
#: The folder with the files; `Codec.check` looks for files of another key there.
_FILES: Final = "snapshots"
_TMP: Final = "tmp"


#: The parent of empty files whose names are the identities with snapshots here. They are never evicted.
IDENTITIES: Final = "identities"
#: The parent of empty files whose names say how far erasures are carried out here: see `TierEraser`.
ERASED: Final = "erased"
#: An unfinished copy that nobody has written to for so long is a dead process's.
_DEAD_COPY_S: Final = 600.0


class FileKey(NamedTuple):
    """The name of a file in the tier."""

    #: The file name, without its suffix, of the snapshot that this one continues; or `IDENTITIES`, `ERASED`.
    parent: str
    file: str


class Tier(Protocol):
    """Files that workers share. All methods block, are safe on any thread, and raise `OSError`."""

    def put(self, key: FileKey, path: Path) -> None:
        """Store a copy of the complete file at `path`, unless the tier has this key."""

    def contains(self, parent: str, files: Collection[str] | None = None) -> dict[str, int]:
        """Return the names and sizes in bytes of the stored files that continue `parent`.

        With `files`, only look for files with these names.
        """

    def get(self, key: FileKey, path: Path) -> bool:
        """Copy a file to `path`, and record its use; False if the tier does not have the file."""

    def keys(self) -> Iterator[FileKey]:
        """Yield the keys of all snapshots."""

    def local(self, key: FileKey, path: Path) -> Path:
        """Return where to read a file: its own path, or `path`, to which the call has copied it."""

    def remove(self, keys: Iterable[FileKey]) -> None:
        """Remove files; missing ones are no error. Until `sync`, a power failure may undo the removal."""

    def sync(self) -> None:
        """Make earlier removals durable, and remove unfinished copies of dead processes."""


class SharedDirectory:
    """A tier in a directory that the workers share: on one machine, or on a network file system.

    If a worker's own directory is on the same file system, files are hard links, which take no extra space.
    While the files exceed `max_bytes`, or the file system has less than `min_free_bytes` left, the least
    recently used files are removed, each chain from its end.
    """

    def __init__(self, directory: Path, codec: Codec, *, max_bytes: int, min_free_bytes: int) -> None:
        """Open or create the directory. Raises `OSError`, and `SealedError` if its files need another key."""
        self._directory, self._codec = directory, codec
        self._files, self._tmp = directory / _FILES, directory / _TMP
        self._max_bytes, self._min_free_bytes = max_bytes, min_free_bytes
        self._used_bytes = 0
        self._measure_at = 0.0
        #: While fewer bytes than this are free, removals for want of free space have no effect.
        self._no_effect_below = 0
        self._unsynced: set[Path] = set()
        if any((directory / name).exists() for name in ("lock", "worker.lock")):
            raise FileExistsError(errno.EEXIST, "it is a worker's own directory", str(directory))
        codec.check(directory)
        directory.mkdir(parents=True, exist_ok=True, mode=private.DIRECTORY_MODE)
        #: The directory's file system: another one is below the mount point of a disk that is gone.
        self._device = directory.stat().st_dev
        self._make_folders()
        probe = self._tmp / f"probe-{uuid4().hex}"
        probe.touch(private.FILE_MODE)
        probe.unlink()

    def put(self, key: FileKey, path: Path) -> None:
        """Link or copy the file at `path` into the directory, unless the directory has this key.

        Evicts files first if the directory is full. Raises `OSError` (ENOSPC) if the disk is still full then.
        """
        target = self._path(key)
        if target.exists():
            os.utime(target)
            return
        size_bytes = path.stat().st_size
        self._make_folders()
        self._evict_for(size_bytes)
        target.parent.mkdir(exist_ok=True, mode=private.DIRECTORY_MODE)
        with suppress(FileExistsError):  # another worker was faster
            _link_or_copy(path, target, self._tmp / uuid4().hex)
            self._used_bytes += size_bytes

    def contains(self, parent: str, files: Collection[str] | None = None) -> dict[str, int]:
        """List the stored files that continue `parent`, with their sizes: see `Tier`."""
        found: dict[str, int] = {}
        if files is not None and len(files) == 1:
            for file in files:
                with suppress(FileNotFoundError):
                    found[file] = self._path(FileKey(parent, file)).stat().st_size
            return found
        with suppress(FileNotFoundError), os.scandir(self._files / parent[:2]) as entries:
            for entry in entries:
                of, _, file = entry.name.partition(".")
                if of == parent and (files is None or file in files):
                    with suppress(FileNotFoundError):
                        found[file] = entry.stat().st_size
        return found

    def get(self, key: FileKey, path: Path) -> bool:
        """Link or copy a file to `path`; False if the directory does not have the file."""
        source = self._path(key)
        try:
            path.unlink(missing_ok=True)
            _link_or_copy(source, path, path.with_suffix(".copy"))
            os.utime(source)
        except FileNotFoundError:
            return False
        return True

    def keys(self) -> Iterator[FileKey]:
        """Yield the keys of all snapshots: see `Tier`."""
        self._make_folders()
        return (FileKey(entry.parent, entry.file) for entry in self._entries())

    def local(self, key: FileKey, path: Path) -> Path:  # noqa: ARG002  # it is never copied
        """Return a file's path in the directory, whether or not the file is there."""
        return self._path(key)

    def remove(self, keys: Iterable[FileKey]) -> None:
        """Remove files; `sync` makes this durable."""
        for key in keys:
            path = self._path(key)
            path.unlink(missing_ok=True)
            self._unsynced.add(path.parent)

    def sync(self) -> None:
        """Sync the folders from which files were removed, and remove unfinished copies of dead processes."""
        self._make_folders()
        for copy in self._tmp.iterdir():
            with suppress(FileNotFoundError):
                if time.time() - copy.stat().st_mtime > _DEAD_COPY_S:
                    copy.unlink()
                    self._unsynced.add(self._tmp)
        for folder in [*self._unsynced]:
            with suppress(FileNotFoundError):  # nothing was ever stored there
                sync(folder, through=True)
            self._unsynced.discard(folder)

    def _make_folders(self) -> None:
        """Create the folders, again if somebody has emptied the directory, but not where its disk is gone."""
        seal = self._directory / SEAL
        if self._files.exists() and self._tmp.exists() and (seal.exists() or not self._codec.mark):
            return
        if self._directory.stat().st_dev != self._device:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), str(self._directory))
        for folder in (self._files, self._tmp):
            folder.mkdir(exist_ok=True, mode=private.DIRECTORY_MODE)
        if self._codec.mark:
            seal.write_text(self._codec.mark)

    def _path(self, key: FileKey) -> Path:
        return self._files / key.parent[:2] / f"{key.parent}.{key.file}"

    def _evict_for(self, size_bytes: int) -> None:
        now = time.monotonic()
        before_bytes = self._free_bytes()
        if before_bytes >= self._no_effect_below:
            self._no_effect_below = 0
        missing_bytes = 0 if self._no_effect_below else self._min_free_bytes + size_bytes - before_bytes
        is_full = self._used_bytes + size_bytes > self._max_bytes or missing_bytes > 0
        if is_full or now >= self._measure_at:
            self._used_bytes = self._swept(size_bytes, max(missing_bytes, 0))
            self._measure_at = now + _MEASURE_S
            if self._free_bytes() < (enough_bytes := before_bytes + missing_bytes // 2):
                self._no_effect_below = enough_bytes
        if self._free_bytes() - size_bytes < self._min_free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _free_bytes(self) -> int:
        stat = os.statvfs(self._files)
        return stat.f_bavail * stat.f_frsize

    def _swept(self, size_bytes: int, missing_bytes: int) -> int:
        """Evict files until `size_bytes` more fit the limits; return the bytes that are used afterwards.

        The file system lacks `missing_bytes` of its minimum of free bytes. A removed file counts as freed,
        even if a worker's hard link still keeps its bytes; then no more are removed for want of free space.
        """
        entries = {entry.file: entry for entry in self._entries()}
        used_bytes = sum(entry.size_bytes for entry in entries.values())
        aim = used_bytes - missing_bytes
        if used_bytes + size_bytes > self._max_bytes:
            aim = min(aim, int(self._max_bytes * _SWEPT_SHARE) - size_bytes)
        if used_bytes <= aim:
            return used_bytes
        for entry in _in_order_of_eviction(entries):
            if used_bytes <= aim:
                break
            self.remove([FileKey(entry.parent, entry.file)])
            used_bytes -= entry.size_bytes
        _log.info("remote_tier_swept", used_bytes=used_bytes, max_bytes=self._max_bytes)
        return used_bytes

    def _entries(self) -> Iterator[_Entry]:
        for folder in list(self._files.iterdir()):
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
                for entry in files:
                    parent, _, file = entry.name.partition(".")
                    if parent in (IDENTITIES, ERASED):
                        continue
                    with suppress(FileNotFoundError):
                        stat = entry.stat()
                        yield _Entry(parent, file, stat.st_size, stat.st_mtime)


class _Entry(NamedTuple):
    parent: str
    file: str
    size_bytes: int
    used: float


def _in_order_of_eviction(entries: dict[str, _Entry]) -> Iterator[_Entry]:
    """Yield files in the order of eviction: least recently used first, but each after those that continue it.

    So a use of a file counts also as a use of the files that it continues.
    """
    stems = {entry.file.partition(".")[0]: entry for entry in entries.values()}
    num_children = Counter(entry.parent for entry in entries.values())
    leaves = [(entry.used, stem) for stem, entry in stems.items() if not num_children[stem]]
    heapq.heapify(leaves)
    while leaves:
        _, stem = heapq.heappop(leaves)
        yield stems[stem]
        parent = stems[stem].parent
        if parent in stems:
            num_children[parent] -= 1
            if not num_children[parent]:
                heapq.heappush(leaves, (stems[parent].used, parent))


def _link_or_copy(source: Path, target: Path, fresh: Path) -> None:
    """Make `target` a hard link of `source`, or a copy, which is written to `fresh` first.

    Raises `FileExistsError` if `target` exists.
    """
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in _UNLINKABLE:
            raise
    else:
        return
    try:
        with source.open("rb") as whole, open(fresh, "xb", opener=private.opener) as copy:
            shutil.copyfileobj(whole, copy, 1 << 20)
        fresh.rename(target)
    finally:
        fresh.unlink(missing_ok=True)
