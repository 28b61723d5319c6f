"""Keeps the workers' history for the console's charts: current figures, and points over time.

One thread adds points, while others may read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .figures import Figures, percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .fleet import Sighting

    #: A time, and the figures at that time in the order of `SERIES`.
    _Point = tuple[float, tuple[float | None, ...]]

#: Most points of a worker's history; a page is not wide enough to draw more.
MOST_POINTS: Final = 720
#: The shortest time between two points: the default interval of a worker's messages.
LEAST_STEP_S: Final = 5.0

#: The figures of a point. Rates, shares and percentiles cover the fleet's window; None without events.
SERIES: Final[dict[str, Callable[[Sighting, Figures], float | None]]] = {
    "first_token_p50_s": lambda _, of: percentile(of.first_token, 0.5),
    "first_token_p95_s": lambda _, of: percentile(of.first_token, 0.95),
    "duration_p50_s": lambda _, of: percentile(of.duration, 0.5),
    "duration_p95_s": lambda _, of: percentile(of.duration, 0.95),
    "generated_per_s": lambda _, of: of.generated_per_s,
    "prefilled_per_s": lambda _, of: of.prefilled_per_s,
    "cached_per_s": lambda _, of: of.cached_per_s,
    "accepted_share": lambda _, of: of.accepted_share,
    "draft_gain": lambda _, of: of.draft_gain,
    "kv_bytes": lambda one, _: one.metrics.resident_kv_bytes,
    "kv_limit_bytes": lambda one, _: one.metrics.kv_limit_bytes,
    "disk_bytes": lambda one, _: one.metrics.snapshots.stored_bytes,
    "disk_limit_bytes": lambda one, _: one.metrics.snapshots.capacity_bytes,
    "running": lambda one, _: one.metrics.running,
    "waiting": lambda one, _: one.metrics.waiting,
    "sessions": lambda one, _: one.metrics.sessions,
    "resident_sessions": lambda one, _: one.metrics.resident_sessions,
}


class FigureHistory:
    """The last `keep_s` seconds of each worker that the fleet remembers, as points `step_s` seconds apart."""

    def __init__(self, keep_s: float) -> None:
        self.step_s = max(keep_s / MOST_POINTS, LEAST_STEP_S)
        self._keep_s = keep_s
        #: The current figures of each worker, and its points. Both mappings are replaced, not changed.
        self._now: dict[str, dict[str, Any]] = {}
        self._points: dict[str, list[_Point]] = {}

    def take(self, sightings: Sequence[Sighting], at_s: float) -> None:
        """Add a point for each worker. The point of a silent worker has no figures, so the curves have a gap.

        If the last two points are less than half of `step_s` apart, the new point replaces the last one.
        """
        now, points = {}, {}
        for one in sightings:
            name, figures = one.metrics.worker, Figures(one)
            values = tuple(of(one, figures) if one.up else None for of in SERIES.values())
            # Points of the future are of a clock that was set back meanwhile.
            kept = [point for point in self._points.get(name, ()) if 0 <= at_s - point[0] <= self._keep_s]
            if len(kept) > 1 and kept[-1][0] - kept[-2][0] < self.step_s / 2:
                kept.pop()
            points[name] = [*kept, (at_s, values)]
            now[name] = {
                "model": one.metrics.model,
                "device": one.metrics.device,
                "up": one.up,
                "age_s": one.age_s,
                "uptime_s": one.metrics.uptime_s,
                "drains": one.metrics.drains,
                **dict(zip(SERIES, values, strict=True)),
            }
        self._now, self._points = now, points

    def shown(self, worker: str | None = None) -> dict[str, Any]:
        """Return the figures of all workers, and the history of `worker`; if unknown, of one that is up."""
        now = self._now
        if worker not in now:
            worker = min(now, key=lambda name: (not now[name]["up"], name), default=None)
        return {"workers": now, "worker": worker, "course": self.course(worker or "")}

    def course(self, worker: str) -> dict[str, Sequence[float | None]]:
        """Return a worker's points as columns: times (`at_s`) and figures; empty for an unknown worker."""
        points = self._points.get(worker, [])
        columns = zip(*(values for _, values in points), strict=True) if points else ((),) * len(SERIES)
        return {"at_s": [at_s for at_s, _ in points], **dict(zip(SERIES, columns, strict=True))}
