"""The limit of open files of this process, which macOS sets to 256 for programs of terminals and services."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

#: What macOS allows each process without privileges; connections, snapshots and models need some hundreds.
_WANTED: Final = 10_240


def raise_limit() -> None:
    """Raise the soft limit to 10,240 files, or to the hard limit; child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # the kernel's own maximum is lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
