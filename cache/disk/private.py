"""Creates files and directories that only their owner can read: KV and tokens reveal conversations.

Knows file modes; `folder` knows the directory's layout.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_log = structlog.get_logger("turnkeep.cache")

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700


def opener(path: str, flags: int) -> int:
    """Open a file for `open(opener=...)`; a new one is accessible to its owner only.

    Raises `OSError` for a symbolic link.
    """
    return os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)


def is_open_to_others(directory: Path) -> bool:
    """Whether users other than the owner have access to a directory."""
    return bool(stat.S_IMODE(directory.stat().st_mode) & ~DIRECTORY_MODE)


def tighten(directory: Path, files: Iterable[Path]) -> None:
    """If other users have access to a directory, make these files, then the directory, private.

    If this fails for one of them, for example because another user owns it, log that and leave the rest.
    """
    if not is_open_to_others(directory):
        return
    try:
        for path in files:
            with suppress(FileNotFoundError):
                if stat.S_ISREG(path.lstat().st_mode):
                    path.chmod(FILE_MODE)
        directory.chmod(DIRECTORY_MODE)  # last: if a crash prevents this, the next start begins again
    except OSError as error:
        _log.warning("cache_open_to_others", directory=str(directory), error=str(error))
    else:
        _log.info("cache_closed_to_others", directory=str(directory))
