"""The cache's counts at one instant: snapshots by outcome, and the use of the disk."""

from __future__ import annotations

from dataclasses import dataclass

from .write_queue import Counts


@dataclass(slots=True, kw_only=True)
class SnapshotStats(Counts):
    """The counts: `accepted = durable + sum(dropped) + failed + cancelled + in_flight`.

    For counts that begin with `remote_` see `RemoteCounts`. For bytes, `free + held + evictable = capacity`
    holds (see `quota.DiskUsage`). All other byte counts are totals since the start.
    """

    restored_bytes: int = 0
    #: Snapshots that are present, and those that were evicted.
    stored: int = 0
    stored_bytes: int = 0
    evicted: int = 0
    #: Files that failed verification, and loads that exceeded their time limit.
    rejected: int = 0
    timed_out: int = 0
    capacity_bytes: int = 0
    free_bytes: int = 0
    held_bytes: int = 0
    evictable_bytes: int = 0
    remote_put_bytes: int = 0
    remote_fetched_bytes: int = 0
    remote_dropped: int = 0
    remote_failed: int = 0
