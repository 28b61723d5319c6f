"""The disk limits of a running worker, which it notes in its data directory for commands that look there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from .datadir import holder

if TYPE_CHECKING:
    from pathlib import Path

    from .settings import Settings

_LIMITS: Final = ("max_disk", "min_free_disk", "log_max_bytes", "snapshots")


def limits_of(settings: Settings) -> dict[str, Any]:
    """Return the values of the settings that limit the disk, by name, as a note for the data directory."""
    return {name: getattr(settings, name) for name in _LIMITS}


def with_running_limits(settings: Settings, data_dir: Path) -> tuple[Settings, str | None]:
    """Return the settings with the limits of the worker that runs on a data directory, and who that is.

    Without one, returns the settings as they are, and None.
    """
    held = holder(data_dir)
    noted = held.limits if held is not None else {}
    if held is None or not noted.keys() >= {*_LIMITS}:  # the worker's version may be another one
        return settings, None
    return replace(settings, **{name: noted[name] for name in _LIMITS}), held.name
