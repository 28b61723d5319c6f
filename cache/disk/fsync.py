"""Syncs files and directories to the disk. Knows neither their contents nor when to sync them."""

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
    """Sync a file or a directory; with `through` also empty the disk's own cache. Raises `OSError`.

    On Linux a plain sync does both. On macOS `fsync` leaves the bytes in the disk's own cache, where a power
    failure can lose them. Emptying this cache takes about 20 ms, so `through` is only for bytes that a power
    failure must not lose.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        if not (through and _sync_through(file)):
            os.fsync(file)
    finally:
        os.close(file)


def _sync_through(file: int) -> bool:
    """Sync a file and empty the disk's own cache. False if the system has no separate command for this."""
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
