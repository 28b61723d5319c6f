"""The snapshot files of each session, told apart by when they appeared: nobody else gives the worker work."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

#: Where a worker keeps snapshots, below its data directory.
_PATTERN = "snapshots/snapshots/*.safetensors"


class Files:
    """What has appeared since the last look belongs to whoever claims it."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._known: set[Path] = set()
        self._owned: defaultdict[Hashable, set[Path]] = defaultdict(set)

    def claim(self, owner: Hashable) -> None:
        """Take all new files for `owner`. Call it when the worker has no snapshots in flight."""
        now = set(self._data_dir.glob(_PATTERN))
        self._owned[owner] |= now - self._known
        self._known = now

    @contextlib.contextmanager
    def held(self, owner: Hashable) -> Iterator[list[Path]]:
        """Give the owner's files second names, under which they stay when the worker removes them."""
        with tempfile.TemporaryDirectory(dir=self._data_dir, prefix="held-") as folder:
            held = []
            for path in sorted(self._owned[owner]):
                with contextlib.suppress(FileNotFoundError):  # a newer tail has taken its place
                    held.append(Path(folder) / path.name)
                    held[-1].hardlink_to(path)
            yield [path for path in held if path.exists()]


def can_leave_memory() -> bool:
    """Say whether this system lets a program ask for files to leave the page cache."""
    return hasattr(os, "posix_fadvise")


def leave_memory(paths: list[Path]) -> None:
    """Ask the system to forget what it has of files in memory, so that the next read is from the disk."""
    for path in paths:
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(number)
