"""What differs while launchd runs this process as the service of `turnkeep service install`, on macOS.

launchd restarts a process unless it exits with 0. It appends its
standard error to a file that nothing rotates.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

#: The environment variable with the file of the service's log; only the service has it.
LOG: Final = "TURNKEEP_SERVICE_LOG"
#: A larger log is moved to a second file, in place of the previous one.
_MAX_LOG_BYTES: Final = 2**24


def final_code(code: int) -> int:
    """Return the exit code of a process that no restart can help: 0 if launchd started it, else `code`.

    A child of the service keeps its code, which the service reads: only launchd itself is process 1.
    """
    return 0 if LOG in os.environ and os.getppid() == 1 else code


class _BoundedLog:
    """Standard error, which launchd appends to `path`; bounds that file and the one before it (`.1`)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, text: str) -> int:
        written = sys.stderr.write(text)
        with suppress(OSError):  # the disk is full, or somebody has removed the file
            if self._path.stat().st_size > _MAX_LOG_BYTES:
                sys.stderr.flush()
                shutil.copyfile(self._path, f"{self._path}.1")
                os.truncate(self._path, 0)
        return written

    def flush(self) -> None:
        sys.stderr.flush()


def log_file() -> TextIO:
    """Return the file for log lines: standard error, bounded if launchd appends it to a file."""
    path = os.environ.get(LOG)
    return _BoundedLog(Path(path)) if path else sys.stderr  # type: ignore[return-value]  # all that structlog calls
