"""A worker on a bad disk: every sync of its writer thread takes long, or fails.

Run as `python -m bench.old.snapshots.disk --sync-s 5 serve ...`, with what `turnkeep` takes behind it. A sync
is where a slow disk makes its caller wait, and where many faults are told; like a real one it waits without
the GIL. Only the cache's writer is touched, so that the log and the model are where they always are. For
measuring what a worker does then: it stands in for the disk, not for the kernel's own work on it.
"""

from __future__ import annotations

import argparse
import errno
import os
import runpy
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

#: The thread that writes snapshots, as `cache.writer` names it; the measurement checks that it was hit.
WRITER: Final = "turnkeep-writer"


def spoil(*, sync_s: float = 0.0, fails: bool = False) -> None:
    """Make every `os.fsync` of the writer thread take `sync_s` longer, or fail with EIO."""
    sync = os.fsync

    def fsync(fd: FileDescriptorLike) -> None:
        if threading.current_thread().name == WRITER:
            if fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            time.sleep(sync_s)
        sync(fd)

    os.fsync = fsync


def main() -> None:
    """Spoil the disk, and become the worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--sync-s", type=float, default=0.0)
    how.add_argument("--fails", action="store_true")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    spoil(sync_s=chosen.sync_s, fails=chosen.fails)
    sys.argv = ["turnkeep", *chosen.arguments]
    runpy.run_module("worker", run_name="__main__")


if __name__ == "__main__":
    main()
