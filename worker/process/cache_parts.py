"""Reads the snapshots' encryption key, and opens the remote tier: the store that workers share.

For the worker, and for commands that use the worker's data directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from cache.names.errors import KeyFileError, SealedError
from turnkeep_client.errors import TurnkeepError

from .datadir import is_same
from .settings import SettingsError

if TYPE_CHECKING:
    from cache.store import Codec, Tier

    from .settings import Settings

#: The disk space for a directory as `remote_tier`; least recently used snapshots are removed.
_TIER_BYTES: Final = 100 * 2**30


def cache_codec(settings: Settings) -> Codec:
    """Return the object that reads and writes snapshots, encrypted if the settings name a key.

    Raises `SettingsError`.
    """
    from cache.store import codec_by  # most commands need no cache

    try:
        return codec_by(settings.cache_key_file)
    except KeyFileError as error:
        raise SettingsError(f"cache_key_file: {error}") from None


def remote_tier(settings: Settings, codec: Codec, *, must_answer: bool = False) -> Tier | None:
    """Open the remote tier; return None if the settings name none. Blocks.

    Raises `SettingsError`, and another `TurnkeepError` for what may end while the settings stay the same. An
    object store that does not answer raises only if it `must_answer`.
    """
    from cache.store import tier_at

    if settings.remote_tier is None:
        return None
    place = settings.remote_tier
    own, there = settings.data_dir, Path(place).absolute()
    is_inside = any(is_same(one, own / "snapshots") for one in (there, *there.parents))
    if "://" not in place and (is_same(there, own) or is_inside):
        raise SettingsError(f"remote_tier: {place} is this worker's own directory; choose another")
    try:
        return tier_at(
            place,
            codec,
            must_answer=must_answer,
            max_bytes=_TIER_BYTES,
            min_free_bytes=settings.min_free_disk,
        )
    except ModuleNotFoundError:
        raise SettingsError("obstore is missing; pip install 'turnkeep[objects]' brings it") from None
    except SealedError as error:
        raise SettingsError(f"remote_tier: {error}") from None
    except OSError as error:
        right = "name the URL of an object store" if "://" in place else "mount its disk, or name a directory"
        raise TurnkeepError(
            f"remote_tier: {place} cannot be used: {error.strerror}; {right} that this worker may write"
        ) from None
