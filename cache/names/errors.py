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


class PartialSnapshotError(DoubtfulSnapshotError):
    """A file is right, but lacks sections that were asked for: they were evicted."""


class DirectoryLockedError(CacheError):
    """Another process has this directory open; `owner` is its pid, or "unknown"."""

    def __init__(self, directory: Path, owner: str) -> None:
        why = f"is in use by process {owner}; give each worker its own"
        super().__init__(f"cache directory {directory} {why}")
        self.directory = directory
        self.owner = owner


class KeyFileError(CacheError):
    """A key cannot be read from its file; the message says why, and what would be right."""


class SealedError(CacheError):
    """The directory's contents have another key than the one given, or none."""

    def __init__(self, directory: Path, why: str) -> None:
        advice = "or remove what is there: turnkeep cache prune --all"
        super().__init__(f"cache directory {directory} {why}, {advice}")


class NotACacheError(CacheError):
    """The directory does not exist, or is not a cache."""


class CutOffError(CacheError):
    """Tokens, or a part of a conversation, are needed that were left out: read the whole session again."""


class LostPastError(CacheError):
    """KV that a pass must read from disk is not there, or cannot be read; the message says why."""


class PinRefusedError(CacheError):
    """The prefix is too large to pin; the message gives the sizes."""
