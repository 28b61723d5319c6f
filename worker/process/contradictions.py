"""Refuses settings that are valid one by one, but contradict each other or this machine's disk."""

from __future__ import annotations

import shutil

from .formatting import size
from .settings import Settings, SettingsError


def check_together(settings: Settings) -> None:
    """Raise `SettingsError` if a worker cannot have these settings together."""
    snapshots, policy = settings.snapshots, settings.cache_policy
    if settings.remote_tier is not None and snapshots != "on":
        raise SettingsError(f"remote_tier is for snapshots, and snapshots is {snapshots}; make it on")
    if policy.recall and snapshots == "off":
        raise SettingsError(f"cache_policy {policy.name} needs snapshots, which are off; make them on")
    if (settings.log_replicas or 1) > 1 and settings.nats is None:
        raise SettingsError(
            "log_replicas needs a cluster of NATS servers, and the worker's own is one; name it with --nats"
        )
    place = next(one for one in (settings.data_dir, *settings.data_dir.absolute().parents) if one.exists())
    whole = shutil.disk_usage(place).total
    # A worker on a volume that is smaller than the default serves without snapshots.
    limit = max(whole, Settings().min_free_disk + 1)
    if snapshots != "off" and settings.min_free_disk >= limit:
        raise SettingsError(
            f"min_free_disk is {size(settings.min_free_disk)}, and the disk of {settings.data_dir} has"
            f" {size(whole)} in all; lower it"
        )
