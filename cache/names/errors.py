"""The exceptions that the cache raises to its callers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class CacheError(Exception):
    """Base class of this package's exceptions."""


class DoubtfulSnapshotError(CacheError):
    """A file cannot be proved to be the requested snapshot; `reason` is a short phrase."""

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
    """The directory does not exist, or is not a cache."""


class PinRefusedError(CacheError):
    """The prefix is too large to pin; the message gives the sizes."""
