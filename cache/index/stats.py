"""The cache's counts at one instant: snapshots by outcome, and the use of the disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from cache.disk.write_queue import Counts

    from .index import Index
    from .quota import Quota
    from .remote import RemoteCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStats:
    """The counts: `accepted = durable + sum(dropped) + failed + cancelled + in_flight`.

    `stored` and `stored_bytes` count the present snapshots, `evicted` the evicted ones, `rejected` files that
    failed verification, `timed_out` the loads that exceeded their time limit; for counts that begin with
    `remote_` see `RemoteCounts`. For bytes, `free + held + evictable = capacity` holds (see
    `room.DiskUsage`). All other byte counts are totals since the start.
    """

    accepted: int = 0
    durable: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    in_flight_bytes: int = 0
    written_bytes: int = 0
    restored_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    evicted: int = 0
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

    @classmethod
    def collect(
        cls,
        counts: Counts,
        index: Index,
        room: Quota,
        *,
        restored_bytes: int,
        rejected: int,
        timed_out: int,
        remote: RemoteCounts,
    ) -> Self:
        """Collect the counts of an open store."""
        usage = room.usage()
        return cls(
            accepted=counts.accepted,
            durable=counts.durable,
            dropped=dict(counts.dropped),
            failed=counts.failed,
            cancelled=counts.cancelled,
            in_flight=counts.in_flight,
            in_flight_bytes=counts.in_flight_bytes,
            written_bytes=counts.written_bytes,
            restored_bytes=restored_bytes,
            stored=index.stored,
            stored_bytes=index.stored_bytes,
            evicted=room.evicted,
            rejected=rejected,
            timed_out=timed_out,
            capacity_bytes=usage.capacity,
            free_bytes=usage.free,
            held_bytes=usage.held,
            evictable_bytes=usage.evictable,
            remote_put_bytes=remote.put_bytes,
            remote_fetched_bytes=remote.fetched_bytes,
            remote_dropped=remote.dropped,
            remote_failed=remote.failed,
        )
