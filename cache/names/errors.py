"""The exceptions that the cache raises to its callers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class CacheError(Exception):
    """Base class of this package's exceptions."""


class DoubtfulSnapshotError(CacheError):
    """A file failed verification: it may be damaged or another snapshot. `reason` is a short phrase."""

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


class KeyFileError(CacheError):
    """The encryption key cannot be read from its file; the message says why, and what a valid file has."""


class SealedError(CacheError):
    """The given encryption key does not fit the cache directory.

    Its files were encrypted with another key, or they are encrypted and no key was given, or they are
    unencrypted and a key was given.
    """

    def __init__(self, directory: Path, why: str) -> None:
        advice = "or remove what is there: turnkeep cache prune --all"
        super().__init__(f"cache directory {directory} {why}, {advice}")


class NotACacheError(CacheError):
    """The directory does not exist, or is not a cache."""


class InterruptionError(Exception):
    """Base class of what ends the work on a request before it has a result: the request is begun again."""


class LostPastError(CacheError):
    """KV that the model's next pass needs from disk is missing or cannot be read; the message says why."""
