"""What a worker publishes of itself while it is measured: memory, disk, its event loop's lag, over time.

Listens only: nothing is asked of the worker for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import Struct

from turnkeep_client.messages import Histogram  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics


class Reading(Struct, frozen=True, kw_only=True):
    """A worker at one time; `at_s` counts from the start of the watch. Its counters are since its start."""

    at_s: float
    worker: str
    uptime_s: float
    process_bytes: int
    resident_kv_bytes: int
    max_memory_bytes: int
    sessions: int
    resident_sessions: int
    running: int
    waiting: int
    written_bytes: int
    restored_bytes: int
    stored_bytes: int
    unwritten: int
    lag: Histogram


class Watch:
    """Keeps the readings of all workers that publish under the client's prefix."""

    def __init__(self, client: Client) -> None:
        self.readings: list[Reading] = []
        self.worker: Metrics | None = None
        self._client = client
        self._started_s = time.monotonic()

    @property
    def of_one(self) -> list[Reading]:
        """The readings of the worker that was heard first; there may be others on the same NATS."""
        name = self.worker.worker if self.worker else None
        return [reading for reading in self.readings if reading.worker == name]

    @property
    def elapsed_s(self) -> float:
        """Seconds since the watch began."""
        return time.monotonic() - self._started_s

    async def run(self) -> None:
        """Listen until cancelled."""
        async for metrics in self._client.metrics():
            self.take(metrics)

    def take(self, metrics: Metrics) -> None:
        """Keep a reading, also one that came as part of an answer."""
        self.worker = self.worker or metrics
        self.readings.append(
            Reading(
                at_s=self.elapsed_s,
                worker=metrics.worker,
                uptime_s=metrics.uptime_s,
                process_bytes=metrics.process_bytes,
                resident_kv_bytes=metrics.resident_kv_bytes,
                max_memory_bytes=metrics.max_memory_bytes,
                sessions=metrics.sessions,
                resident_sessions=metrics.resident_sessions,
                running=metrics.running,
                waiting=metrics.waiting,
                written_bytes=metrics.snapshots.written_bytes,
                restored_bytes=metrics.snapshots.restored_bytes,
                stored_bytes=metrics.snapshots.stored_bytes,
                unwritten=metrics.snapshots.in_flight,
                lag=metrics.event_loop_lag,
            )
        )


class Lag(Struct, frozen=True, kw_only=True):
    """How late a worker's event loop ran what it had to; `p99_s` is an upper bound.

    It is None where the true one lies beyond the last bound of the worker's histogram.
    """

    mean_s: float
    p99_s: float | None


def lag(readings: Sequence[Reading]) -> Lag | None:
    """Return the event loop's lag between the first reading and the last; None where nothing was counted."""
    if len(readings) < 2 or readings[0].worker != readings[-1].worker:
        return None
    first, last = readings[0].lag, readings[-1].lag
    counts = [b - a for a, b in zip(first.counts, last.counts, strict=True)]
    total = sum(counts)
    if total <= 0:  # also where the worker was started anew in between
        return None
    below, bound = 0, None
    for count, upper in zip(counts, (*last.bounds, None), strict=True):
        below += count
        if below >= 0.99 * total:
            bound = upper
            break
    return Lag(mean_s=(last.sum - first.sum) / total, p99_s=bound)
