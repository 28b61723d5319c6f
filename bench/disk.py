"""A worker on a bad disk: every sync of its writer thread takes long, or fails.

`python -m bench.disk SECONDS|fails MODULE ...` becomes that module. A sync is where a slow disk makes its
caller wait, and where many faults are told; like a real one it waits without the GIL. Only the cache's writer
is touched: the log and the model are where they always are. It stands in for the disk, not for the kernel's
own work on it.
"""

from __future__ import annotations

import errno
import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

#: The thread that writes snapshots, as `cache.disk.writer` names it; the checks tell whether it was hit.
WRITER: Final = "turnkeep-writer"


def main() -> None:
    """Spoil the disk, and become the worker."""
    how, module = sys.argv[1:3]
    sync = os.fsync
    if how == "fails":  # it would say so of every file; the bench counts them
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # as long as the process

    def fsync(fd: FileDescriptorLike) -> None:
        if threading.current_thread().name == WRITER:
            if how == "fails":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            time.sleep(float(how))
        sync(fd)

    os.fsync = fsync
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
