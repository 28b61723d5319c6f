"""Runs a worker on a simulated bad disk: every fsync of the cache's writer thread is slow, or fails.

`python -m bench.disk SECONDS|fails MODULE ...` patches `os.fsync`, then runs the module. The patch waits
without the GIL, as a real sync does. It affects only the cache's writer thread, not the log or the model, and
does not simulate what a bad disk does inside the kernel. `bench.overhead` starts this module.
"""

from __future__ import annotations

import errno
import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

#: The name of the writer thread in `cache.disk.writer`; the checks tell whether the patch hit it.
WRITER: Final = "turnkeep-writer"


def main() -> None:
    """Make `os.fsync` slow or failing in the cache's writer thread, then run the given module."""
    how, module = sys.argv[1:3]
    sync = os.fsync
    if how == "fails":  # hide an error line per file; the bench counts the failures
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # as long as the process

    def fsync(fd: Any) -> None:
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
