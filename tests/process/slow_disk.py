"""Runs a worker on a simulated slow disk: every fsync of the cache's writer thread takes longer.

`python slow_disk.py SECONDS MODULE ...` patches `os.fsync`, then runs the module. The patch waits without the
GIL, as a real sync does. It affects only the cache's writer thread, not the log or the model, and does not
simulate what a slow disk does inside the kernel.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from typing import Any, Final

#: The name of the writer thread in `cache.disk.writer`; the test notices if the patch misses it.
WRITER: Final = "turnkeep-writer"


def main() -> None:
    """Make `os.fsync` slow in the cache's writer thread, then run the given module."""
    seconds, module = sys.argv[1:3]
    sync = os.fsync

    def fsync(fd: Any) -> None:
        if threading.current_thread().name == WRITER:
            time.sleep(float(seconds))
        sync(fd)

    os.fsync = fsync
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
