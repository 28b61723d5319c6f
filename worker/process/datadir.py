"""A data directory: its layout, and the lock that reserves it for one `turnkeep serve`.

Knows nothing of the contents of its folders.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from uuid import uuid4

from turnkeep_client.errors import TurnkeepError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

LOCK_NAME: Final = "worker.lock"
#: The file with the token of the directory's own NATS server.
TOKEN_NAME: Final = "nats-token"  # noqa: S105  # a name

#: A worker counts as starting for this time; without a server after it, it may be downloading a model.
_STARTING_S: Final = 120.0
_MAX_NOTE_BYTES: Final = 2**16
#: How long what a killed process has started may take to end, and the pause between two looks.
_ENDING_S: Final = 10.0
_LOOK_S: Final = 0.01

_ADVICE: Final = {
    # On macOS also if a disk's folder below /Volumes is to be made.
    errno.EACCES: "it is not writable for this user; mount its disk, change its owner, or choose another with"
    " --data-dir",
    errno.EPERM: "it is not writable for this user; change its owner, or choose another with --data-dir",
    errno.EROFS: "its file system is read-only; choose another with --data-dir",
    errno.ENOSPC: "the disk is full; free some space, or choose another with --data-dir",
    errno.EDQUOT: "the disk quota is used up; free some space, or choose another with --data-dir",
    errno.EEXIST: "there is a file in its place, or a link to what is not there; remove it, mount its disk,"
    " or choose another with --data-dir",
    errno.ENOTDIR: "there is a file in its place; remove it, or choose another with --data-dir",
    errno.ENOLCK: "its file system has no locks; choose a local disk with --data-dir",
    errno.ENOTSUP: "its file system has no locks; choose a local disk with --data-dir",
}


def _keep_out_of_backups(folder: Path) -> None:
    """On macOS, exclude a folder of what can be made again from Time Machine's backups."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["tmutil", "addexclusion", folder], check=False, capture_output=True, timeout=10)


def real_path(path: Path) -> Path:
    """Return the one spelling of a path: absolute, without links, on macOS in the case that the disk has."""
    path = path.resolve()
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            try:
                path = Path(os.fsdecode(fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
            finally:
                os.close(fd)
    return path


def is_same(one: Path, other: Path) -> bool:
    """Say whether two paths name one file or directory, also by links or, on macOS, in another case."""
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist
        return real_path(one) == real_path(other)


class DataDirError(TurnkeepError):
    """The data directory cannot be used. The message is one line with the reason and the remedy."""


class DataDirInUseError(DataDirError):
    """Another worker holds the data directory's lock."""


class DataDir:
    """An open data directory.

    It stays locked until `close`, or until this process, and those that have got `lock_fds`, have ended.
    """

    def __init__(self, path: Path, lock_fd: int, name: str) -> None:
        self.path = path
        #: Unique among all data directories, and constant while the directory exists.
        self.name = name
        self._lock_fd = lock_fd

    @classmethod
    def open(
        cls,
        path: Path,
        worker: str = "",
        nats: str | int | None = None,
        limits: Mapping[str, Any] = MappingProxyType({}),
        gateway: int | None = None,
    ) -> DataDir:
        """Create the directory if needed, check that it is writable, and lock it.

        Waits until what a killed process has started on the directory has ended. Other processes can read
        from the lock file: the name `worker`, its NATS server `nats` (None keeps the noted one), its `limits`
        and the port of its `gateway`. Raises `DataDirError`.
        """
        path = path.absolute()
        fd = -1
        try:
            # Conversations are private: no access for other users.
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
            _lock(path, fd)
            # The file is never unlinked: two workers could then each lock an inode of this name.
            opened = cls(path, fd, _note_worker(fd, worker, nats, limits, gateway))
            for folder in (opened.nats, opened.models, opened.snapshots, opened.logs):
                is_new = not folder.exists()
                folder.mkdir(mode=0o700, exist_ok=True)
                if is_new and folder in {opened.models, opened.snapshots}:
                    _keep_out_of_backups(folder)
                if folder != opened.models:  # a copied directory may be readable by all users
                    folder.chmod(0o700)
        except BlockingIOError:
            owner = _owner(fd)
            os.close(fd)
            raise DataDirInUseError(
                f"the data directory {path} is in use by {owner}; stop it, or choose another with --data-dir"
            ) from None
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            reason = _ADVICE.get(error.errno or 0, f"{error.strerror}; choose another with --data-dir")
            inner = f", because of {error.filename}" if str(error.filename or path) != str(path) else ""
            raise DataDirError(f"the data directory {path} cannot be used{inner}: {reason}") from None
        return opened

    @classmethod
    def of_parent(cls, path: Path) -> DataDir:
        """Return the directory that the parent of this process has opened, and keeps locked."""
        with (path / LOCK_NAME).open("rb") as file:
            return cls(path, -1, _read_note(file.fileno())["directory"])

    @property
    def nats(self) -> Path:
        """The folder of the embedded NATS server's store."""
        return self.path / "nats"

    @property
    def models(self) -> Path:
        """The folder of models: converted ones, and those that the user put there."""
        return self.path / "models"

    @property
    def snapshots(self) -> Path:
        """The folder of KV snapshots and their index."""
        return self.path / "snapshots"

    @property
    def logs(self) -> Path:
        """The folder of logs of the worker's child processes."""
        return self.path / "logs"

    @property
    def lock_fds(self) -> tuple[int, ...]:
        """The descriptors that a child process must inherit to hold the lock, too."""
        return (self._lock_fd,)

    def note_limits(self, limits: Mapping[str, Any]) -> None:
        """Tell other processes new limits of the worker, unless the disk is full or the lock released."""
        note = json.dumps(_read_note(self._lock_fd) | {"limits": dict(limits)}).encode()
        with contextlib.suppress(OSError):
            before = os.fstat(self._lock_fd)
            # In one write, without truncation: a reader finds the old note or the new one.
            os.pwrite(self._lock_fd, note.ljust(before.st_size), 0)
            os.utime(self._lock_fd, ns=(before.st_atime_ns, before.st_mtime_ns))  # it was not locked now

    def close(self) -> None:
        """Release the lock. Later calls do nothing."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(path: Path, fd: int) -> None:
    """Lock a directory's lock file. Raises `BlockingIOError` while the process that is noted there runs."""
    until_s = time.monotonic() + _ENDING_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if holder(path) is not None or time.monotonic() > until_s:
                raise
        time.sleep(_LOOK_S)


def noted_nats(path: Path) -> str | int | None:
    """Return the NATS server that a data directory's last worker used; None if unknown.

    It is the URLs of external servers, or the port of the worker's own server.
    """
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        nats = _read_note(fd).get("nats")
    finally:
        os.close(fd)
    return nats if isinstance(nats, str | int) else None


def starting_pid(path: Path) -> int | None:
    """Return the pid of a worker that locked a data directory less than 120 s ago; else None."""
    held = holder(path)
    # Before that time, too: somebody may have set the clock back.
    return held.pid if held and abs(time.time() - held.locked_s) < _STARTING_S else None


def is_unused(path: Path) -> bool:
    """Say whether no process has locked a data directory, so that no server is its own; a copy is unused.

    False for a folder that never was one: it may have a copy of the token.
    """
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _is_locked(fd)
    finally:
        os.close(fd)


class Holder(NamedTuple):
    """The process that has locked a data directory, and the time of the lock; messages use `name` for it."""

    pid: int
    locked_s: float
    name: str
    #: What it has noted of its limits, by name.
    limits: Mapping[str, Any]
    #: The port of the gateway that it runs, or will run once it serves; None without one.
    gateway: int | None


def holder(path: Path) -> Holder | None:
    """Return the process that has locked a data directory; None if none runs.

    Times do not say it, as somebody may set the clock. What a killed process has started may hold the lock
    too, so the process must run. This look at the lock is shared, and a start that meets it tries again.
    """
    import psutil  # imported here, since most commands do not need it

    with contextlib.suppress(OSError, psutil.Error):
        fd = os.open(path / LOCK_NAME, os.O_RDONLY)
        try:
            note, locked_s = _read_note(fd), os.fstat(fd).st_mtime
            pid = note.get("pid")
            if not isinstance(pid, int) or not _is_locked(fd):
                return None
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return Holder(pid, locked_s, _owner(fd), note.get("limits") or {}, note.get("gateway"))
        finally:
            os.close(fd)
    return None


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _owner(lock_fd: int) -> str:
    owner = _read_note(lock_fd)
    if "pid" not in owner:  # it has locked the file, but not yet written to it
        return "another worker that is just starting"
    name = f"worker {owner['worker']} " if owner.get("worker") else "a worker "
    return f"{name}(pid {owner['pid']})"


def _note_worker(
    fd: int, worker: str, nats: str | int | None, limits: Mapping[str, Any], gateway: int | None
) -> str:
    """Write this process into the lock file; return the directory's unique name, a new one if it has none."""
    last, inode = _read_note(fd), os.fstat(fd).st_ino
    # In a copy of the directory the file has another inode: the note is that of the original's worker.
    last = last if last.get("inode") == inode else {}
    name, nats = last.get("directory") or uuid4().hex, nats or last.get("nats")
    os.ftruncate(fd, 0)
    note = {"pid": os.getpid(), "worker": worker, "directory": name, "inode": inode, "nats": nats}
    note |= {"limits": dict(limits), "gateway": gateway}
    os.pwrite(fd, json.dumps(note).encode(), 0)
    os.fsync(fd)  # a full disk fails here, not in the middle of a turn
    return name


def _read_note(lock_fd: int) -> dict[str, Any]:
    """Read what the last owner wrote into the lock file; empty if it cannot be read."""
    try:
        note = json.loads(os.pread(lock_fd, _MAX_NOTE_BYTES, 0))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}
