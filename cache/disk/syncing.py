"""Syncs of files and directories. Knows neither what is in them nor when a sync is due."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

#: Errors of a file system that has no `F_FULLFSYNC`.
_UNSUPPORTED: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOTTY})


def sync(path: Path, *, through: bool = False) -> None:
    """Sync a file or a directory; `through` the disk's own cache too. Raises `OSError`.

    On Linux both are the same. On macOS `fsync` leaves what was written in the disk's cache, where a power
    failure finds it. To empty that cache takes about 20 ms: for what was promised to be on disk.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        if not (through and _sync_through(file)):
            os.fsync(file)
    finally:
        os.close(file)


def _sync_through(file: int) -> bool:
    """Sync through the disk's cache; False if that takes no command of its own, or there is none."""
    command = getattr(fcntl, "F_FULLFSYNC", None)  # macOS alone has it
    if command is None:
        return False
    try:
        fcntl.fcntl(file, command)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True
