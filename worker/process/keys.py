"""Reads the encryption key of the snapshots on disk, for the worker and for commands on its directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.names.errors import KeyFileError

from .settings import SettingsError

if TYPE_CHECKING:
    from cache.store import Access

    from .settings import Settings


def cache_access(settings: Settings) -> Access:
    """Read the key, if one is set. Raises `SettingsError`."""
    from cache.store import access_by  # most commands need no cache

    try:
        return access_by(settings.cache_key_file)
    except KeyFileError as error:
        raise SettingsError(f"cache_key_file: {error}") from None
