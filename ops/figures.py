"""Computes rates, shares and percentiles from a worker's recent messages, for people to read. Pure."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from turnkeep_client.messages import Histogram

if TYPE_CHECKING:
    from collections.abc import Mapping

    from msgspec import UnsetType

    from .fleet import Sighting


class Figures:
    """Rates, shares and histograms from a worker's recent messages; a figure without events is None."""

    def __init__(self, sighting: Sighting) -> None:
        now, before = sighting.metrics, sighting.before
        self._elapsed_s = now.uptime_s - before.uptime_s if before else 0.0
        prefilled, cached, drafted, accepted, decoding_s, saved_s = (
            getattr(now, name) - (getattr(before, name) if before else 0)
            for name in (
                *("prefilled_tokens", "cached_tokens", "draft_tokens", "accepted_draft_tokens"),
                *("decoding_s", "draft_saved_s"),
            )
        )
        self.prefilled_per_s = self._per_s(prefilled)
        self.cached_per_s = self._per_s(cached)
        self.cached_share = share(cached, cached + prefilled)
        self.accepted_share = share(accepted, drafted)
        #: The speedup of answers by drafts: 2 is twice as fast.
        self.draft_gain = share(decoding_s + saved_s, decoding_s) if drafted else None
        self.kv_share = share(now.resident_kv_bytes, now.kv_limit_bytes)
        self.disk_share = share(now.snapshots.stored_bytes, now.snapshots.capacity_bytes)
        self.queue_time = since(now.queue_time, before.queue_time if before else None)
        self.duration = since(now.request_duration, before.request_duration if before else None)
        self.first_token = since(now.time_to_first_token, before.time_to_first_token if before else None)
        self.per_token = since(now.time_per_output_token, before.time_per_output_token if before else None)
        #: Tokens per second, counting only the time in which answers ran.
        self.generated_per_s = share(self.per_token.count, decoding_s) if before and self.per_token else None
        self.batch = since(now.batch_size, before.batch_size if before else None)
        self.num_drops = sum(now.snapshots.dropped.values())

    def _per_s(self, count: float) -> float | None:
        return count / self._elapsed_s if self._elapsed_s > 0 else None


def share(part: float, whole: float) -> float | None:
    """Return `part / whole`; None if `whole` is 0."""
    return part / whole if whole > 0 else None


def since(now: Histogram | UnsetType, before: Histogram | UnsetType | None) -> Histogram | None:
    """Return the values that were added to a histogram between `before` and `now`; None if there are none.

    If `before` is missing or has other bounds, return all values of `now`.
    """
    if not isinstance(now, Histogram):
        return None
    if isinstance(before, Histogram) and before.bounds == now.bounds:
        counts = tuple(new - old for new, old in zip(now.counts, before.counts, strict=False))
        now = Histogram(now.bounds, counts, now.sum - before.sum, now.count - before.count)
    return now if now.count > 0 else None


def mean(histogram: Histogram | None) -> float | None:
    """Return the mean of a histogram's values; None if there is no histogram."""
    return histogram.sum / histogram.count if histogram else None


def percentile(histogram: Histogram | None, part: float) -> float | None:
    """Return the percentile `part` (0 to 1) of a histogram's values, by linear interpolation in a bucket.

    A value above the last bound counts as this bound, as in Prometheus's `histogram_quantile`.
    """
    if histogram is None or not histogram.bounds:
        return None
    wanted = part * histogram.count
    lower, below = 0.0, 0
    for bound, reached in zip(histogram.bounds, accumulate(histogram.counts), strict=False):
        if reached >= wanted and reached > below:
            return lower + (bound - lower) * (wanted - below) / (reached - below)
        lower, below = bound, reached
    return histogram.bounds[-1]


def listed(counts: Mapping[str, float]) -> str:
    """Format counts by kind, the largest first: `queue_full 3, disk_limit 1`."""
    found = sorted(((count, kind) for kind, count in counts.items() if count), reverse=True)
    return ", ".join(f"{kind} {count:g}" for count, kind in found)
