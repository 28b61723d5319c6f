"""The directory on SSD: its lock, its paths, and moving files between its subfolders. Knows no index.

lock            locked while a store is open
sealed          identifies the encryption key; missing without encryption
index.sqlite    the catalog: snapshots and their last use; rebuilt if lost
snapshots/      complete files, named by digest
tmp/            files being written, and unfinished files of a dead process
quarantine/     the latest files that failed verification, for inspection
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Final

import structlog

from cache.names.errors import DirectoryLockedError, DoubtfulSnapshotError

from . import private
from .codec import PLAIN, SEAL
from .fsync import sync
from .header import read_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cache.names.snapshot import Name

    from .codec import Codec

_log = structlog.get_logger("turnkeep.cache")

#: Quarantined files beyond this many are removed, oldest first.
QUARANTINE_FILES: Final = 8


def scan(snapshots: Path, codec: Codec = PLAIN) -> dict[bytes, tuple[int, int]]:
    """Map the digest of each snapshot in a folder to (size in bytes, mtime in ns)."""
    found = {}
    with os.scandir(snapshots) as entries:
        for entry in entries:
            digest = codec.digest_of(entry.name)
            with suppress(FileNotFoundError):  # removed meanwhile
                if digest is not None and entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    found[digest] = (stat.st_size, stat.st_mtime_ns)
    return found


def may_hold(directory: Path) -> bool:
    """Whether a directory that no store has open may contain snapshots or remains of snapshots.

    False if it does not exist, True if it cannot be read.
    """
    try:
        return any(any(path.iterdir()) for path in directory.iterdir() if path.is_dir())
    except FileNotFoundError:
        return False
    except OSError:
        return True


class Folder:
    """A cache directory, locked from construction to `close`. Raises `DirectoryLockedError`, `OSError`."""

    def __init__(self, directory: Path, codec: Codec = PLAIN) -> None:
        self.directory = directory
        self.codec = codec
        self.snapshots = directory / "snapshots"
        self.tmp = directory / "tmp"
        self.quarantined = directory / "quarantine"
        self.catalog = directory / "index.sqlite"
        for path in (directory, self.snapshots, self.tmp, self.quarantined):
            path.mkdir(parents=True, exist_ok=True, mode=private.DIRECTORY_MODE)
        self._lock = private.opener(str(directory / "lock"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise DirectoryLockedError(directory, owner) from None
        except OSError:  # a file system without locks
            os.close(self._lock)
            raise
        last_stamp = self._stamp()
        with suppress(OSError):  # on a full disk the owner stays unknown, but the cache is still useful
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        self._tighten()
        #: The stamp that the previous opening left, and the stamp of this one: the lock file's device, inode
        #: and ctime. Nobody can set these, so the first one differs in a copy and in a restored backup.
        self.stamps = (last_stamp, self._stamp())

    def _stamp(self) -> str:
        stat = os.fstat(self._lock)  # some file systems have numbers beyond SQLite's 63 bits
        return f"{stat.st_dev} {stat.st_ino} {stat.st_ctime_ns}"

    def _tighten(self) -> None:
        """Make files of an older version private, if the directory is still readable to other users."""
        subfolders = (self.snapshots, self.tmp, self.quarantined)
        files = [self.directory.glob(name) for name in ("lock", f"{self.catalog.name}*")]
        files += [
            (path for path in subfolder.iterdir() if self.codec.digest_of(path.name))
            for subfolder in subfolders
        ]
        private.tighten(self.directory, chain(*files))
        for subfolder in subfolders:
            private.tighten(subfolder, ())

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def claim(self) -> None:
        """Record in an encrypted directory which key it is encrypted with, unless it has this record.

        Raises `SealedError` if the directory's contents do not fit the key.
        """
        self.codec.check(self.directory)
        if self.codec.mark and not (self.directory / SEAL).exists():
            fresh = self.tmp / SEAL
            with open(fresh, "w", opener=private.opener) as file:
                file.write(self.codec.mark)
            sync(fresh, through=True)
            fresh.rename(self.directory / SEAL)
            sync(self.directory, through=True)

    def path(self, digest: bytes) -> Path:
        """Return the path of a snapshot's file."""
        return self.snapshots / self.codec.file_name(digest)

    def names(self) -> set[str]:
        """List the file names in `snapshots/`, without `stat`, which would double the time of a start."""
        return set(os.listdir(self.snapshots))  # noqa: PTH208  # there may be a hundred thousand of them

    def clear_tmp(self) -> int:
        """Remove the unfinished files of a dead process; return how many."""
        leftovers = _within(self.tmp)
        for path in leftovers:
            _discard(path)
        return len(leftovers)

    @contextmanager
    def placing(self, digest: bytes) -> Iterator[Path]:
        """Yield a temporary path for a snapshot's file; after the block remove a file that is left there."""
        path = self._unfinished(digest)
        try:
            yield path
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def fetch_path(self, digest: bytes, number: int) -> Path:
        """Return a temporary path for fetching a snapshot from the remote tier, as fetch number `number`."""
        return (self.tmp / self.codec.file_name(digest)).with_suffix(f".fetched{number}")

    def discard_fetched(self, digest: bytes) -> None:
        """Remove the temporary files of a snapshot whose fetch from the remote tier was cancelled."""
        stem = self.codec.file_name(digest).partition(".")[0]
        for path in self.tmp.glob(f"{stem}.fetched*"):
            path.unlink(missing_ok=True)

    def _unfinished(self, digest: bytes) -> Path:
        return (self.tmp / self.codec.file_name(digest)).with_suffix("")

    def place(self, path: Path, digest: bytes) -> None:
        """Move a complete, synced file to its path in `snapshots/`, and sync that folder."""
        path.rename(self.path(digest))
        sync(self.snapshots)

    def repair(self, digest: bytes) -> None:
        """Recreate missing subfolders, and remove anything that blocks the paths of this snapshot's file.

        Raises `OSError` if the directory itself is gone.
        """
        for subfolder in (self.snapshots, self.tmp, self.quarantined):
            subfolder.mkdir(exist_ok=True, mode=private.DIRECTORY_MODE)
        _discard(self._unfinished(digest))
        if self.path(digest).is_dir():
            self.quarantine(digest)

    def remove(self, digest: bytes) -> None:
        """Remove a snapshot's file, or a directory in its place; a missing file is no error."""
        _discard(self.path(digest))

    def quarantine(self, digest: bytes) -> None:
        """Move a file that failed verification to quarantine, which keeps the latest `QUARANTINE_FILES`.

        A file that cannot be moved stays, and fails verification again when next read.
        """
        path = self.path(digest)
        try:
            self.quarantined.mkdir(exist_ok=True, mode=private.DIRECTORY_MODE)
            if (self.quarantined / path.name).is_dir():
                _discard(self.quarantined / path.name)  # a file cannot replace a directory
            with suppress(FileNotFoundError):
                path.rename(self.quarantined / path.name)
            kept = sorted(self.quarantined.iterdir(), key=lambda kept: kept.stat().st_ctime_ns)
            for old in kept[:-QUARANTINE_FILES]:
                _discard(old)
        except OSError as error:  # a read-only or missing disk must not fail the load
            _log.warning("snapshot_not_quarantined", digest=digest.hex(), error=str(error))

    def remove_quarantined(self, digest: bytes) -> None:
        """Remove a snapshot's file from quarantine, if it is there."""
        (self.quarantined / self.codec.file_name(digest)).unlink(missing_ok=True)

    def clear_quarantine(self) -> None:
        """Remove all files from quarantine."""
        for path in _within(self.quarantined):
            _discard(path)

    def remove_quarantined_of(self, is_of: Callable[[Name], bool]) -> None:
        """Remove quarantined snapshots whose `Name` fits `is_of`, and files whose `Name` cannot be read."""
        for path in _within(self.quarantined):
            if path.is_file() and self.may_be(path, is_of):
                path.unlink(missing_ok=True)

    def may_be(self, path: Path, is_of: Callable[[Name], bool]) -> bool:
        """Whether `is_of` is true of the `Name` in a file's header; True also if that cannot be read."""
        try:
            return is_of(read_name(path, self.codec))
        except (DoubtfulSnapshotError, OSError):
            return True

    def sync(self) -> None:
        """Sync the subfolders, so that removals survive a power failure."""
        for subfolder in (self.snapshots, self.tmp, self.quarantined):
            with suppress(FileNotFoundError):  # a removed folder has no files to sync
                sync(subfolder, through=True)

    def quarantined_bytes(self) -> int:
        """Return the bytes in quarantine, which count against the disk limit; 0 if it cannot be read."""
        try:
            return sum(path.stat().st_size for path in self.quarantined.iterdir())
        except OSError:  # the folder was removed, or is being removed
            return 0

    def clear(self) -> list[str]:
        """Remove all snapshots, quarantined ones too; return the names that could not be removed."""
        left = []
        for subfolder in (self.snapshots, self.quarantined):
            with suppress(FileNotFoundError), os.scandir(subfolder) as entries:
                for entry in entries:
                    try:
                        if subfolder is self.quarantined and entry.is_dir(follow_symlinks=False):
                            shutil.rmtree(entry.path)
                        else:
                            os.unlink(entry.path)  # noqa: PTH108  # there may be a hundred thousand of them
                    except OSError:
                        left.append(entry.name)
        return left

    def free_bytes(self) -> int:
        """Return the bytes that the file system has free for this process."""
        stat = os.statvfs(self.directory)
        return stat.f_bavail * stat.f_frsize


def _within(directory: Path) -> list[Path]:
    """List the paths in a directory; a missing directory counts as empty."""
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _discard(path: Path) -> None:
    """Remove a file or a directory tree; a missing path is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
