"""What may go wrong with a cache, for whoever calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class CacheError(Exception):
    """Root of what this package raises."""


class DoubtfulSnapshotError(CacheError):
    """A file is not, beyond doubt, the snapshot that was asked for. `reason` is a short phrase."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class DirectoryLockedError(CacheError):
    """Another process has this directory open; `owner` is its pid, or "unknown"."""

    def __init__(self, directory: Path, owner: str) -> None:
        why = f"is in use by process {owner}; give each worker its own"
        super().__init__(f"cache directory {directory} {why}")
        self.directory = directory
        self.owner = owner


class NotACacheError(CacheError):
    """The directory does not exist, or is none of a cache."""


class PinRefusedError(CacheError):
    """The prefix is too large to be pinned; the message has the numbers."""
