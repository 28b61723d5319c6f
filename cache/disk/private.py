"""Files and directories for nobody but their owner: KV and its tokens are what users have said.

Knows no layout: `folder` says which there are.
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
    """Open a file for `open`, made for its owner alone where it is new; what a link points to is refused."""
    return os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)


def is_open(directory: Path) -> bool:
    """Say whether others than its owner have any access to a directory."""
    return bool(stat.S_IMODE(directory.stat().st_mode) & ~DIRECTORY_MODE)


def tighten(directory: Path, files: Iterable[Path]) -> None:
    """Take others' access to a directory away, if they have any, after that to the files in it.

    Where that is not allowed, of what is another user's, it is said and left.
    """
    if not is_open(directory):
        return
    try:
        for path in files:
            with suppress(FileNotFoundError):
                if stat.S_ISREG(path.lstat().st_mode):
                    path.chmod(FILE_MODE)
        directory.chmod(DIRECTORY_MODE)  # the last: if this is not reached, the next start begins again
    except OSError as error:
        _log.warning("cache_open_to_others", directory=str(directory), error=str(error))
    else:
        _log.info("cache_closed_to_others", directory=str(directory))
