"""Converts workers' metrics messages to Prometheus metrics: names, types and labels. Pure.

A metric's name is the field of the metrics message, followed by the unit. Every metric of a worker has the
labels `worker`, `model` and `device`.
"""

from __future__ import annotations

from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from turnkeep_client.messages import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from turnkeep_client.messages import Metrics
    from turnkeep_client.wire import Backlog

    from .fleet import Sighting

_WORKER: Final = ("worker", "model", "device")

#: Name after `turnkeep_`, field of the message, help text, and a label for each level of a mapping.
COUNTERS: Final[tuple[tuple[str, ...], ...]] = (
    ("requests", "requests", "Requests with a result, by type and outcome.", "type", "outcome"),
    ("ignored_entries", "ignored", "Entries and chunks that no worker can have published.", "kind"),
    ("prefilled_tokens", "prefilled_tokens", "Prompt tokens that were run."),
    ("cached_tokens", "cached_tokens", "Prompt tokens whose KV was reused."),
    ("generated_tokens", "generated_tokens", "Tokens of answers."),
    ("draft_tokens", "draft_tokens", "Tokens that were speculated."),
    ("accepted_draft_tokens", "accepted_draft_tokens", "Speculated tokens that were right."),
    ("recalled_tokens", "recalled_tokens", "Tokens whose KV an answer has recalled from SSD."),
    ("decoding_seconds", "decoding_s", "Time in which answers were decoded."),
    ("tenant_requests", "by_tenant.requests", "Requests with a result, by tenant.", "tenant", "outcome"),
    (
        "tenant_prefilled_tokens",
        "by_tenant.prefilled_tokens",
        "Prompt tokens that were run, by tenant.",
        "tenant",
    ),
    (
        "tenant_cached_tokens",
        "by_tenant.cached_tokens",
        "Prompt tokens whose KV was reused, by tenant.",
        "tenant",
    ),
    ("tenant_restored_tokens", "by_tenant.restored_tokens", "Tokens read from disk, by tenant.", "tenant"),
    ("tenant_generated_tokens", "by_tenant.generated_tokens", "Tokens of answers, by tenant.", "tenant"),
    ("snapshots_accepted", "snapshots.accepted", "Snapshots given to the writer."),
    ("snapshots_durable", "snapshots.durable", "Snapshots that were written and synced."),
    ("snapshots_dropped", "snapshots.dropped", "Snapshots dropped before they were written.", "reason"),
    ("snapshots_failed", "snapshots.failed", "Snapshots that could not be written."),
    ("snapshots_cancelled", "snapshots.cancelled", "Snapshots of forgotten sessions."),
    ("snapshots_evicted", "snapshots.evicted", "Snapshots evicted to make room."),
    ("snapshots_rejected", "snapshots.rejected", "Snapshot files that failed a check."),
    ("snapshots_timed_out", "snapshots.timed_out", "Restores that the disk did not answer in time."),
    ("snapshots_written_bytes", "snapshots.written_bytes", "Bytes written to the disk."),
    ("snapshots_restored_bytes", "snapshots.restored_bytes", "Bytes read from the disk."),
    ("remote_put_bytes", "snapshots.remote_put_bytes", "Bytes put in the remote tier."),
    ("remote_fetched_bytes", "snapshots.remote_fetched_bytes", "Bytes fetched from the remote tier."),
    ("remote_dropped", "snapshots.remote_dropped", "Snapshots that were not put in the remote tier."),
    ("remote_failed", "snapshots.remote_failed", "Calls of the remote tier that failed."),
)
GAUGES: Final[tuple[tuple[str, ...], ...]] = (
    ("uptime_seconds", "uptime_s", "Time since the worker started."),
    ("draft_saved_seconds", "draft_saved_s", "Time that speculation has saved."),
    ("drains", "drains", "1 while the worker gives its sessions to the others."),
    ("metrics_interval_seconds", "interval_s", "Time between two metrics messages."),
    ("sessions", "sessions", "Sessions in memory."),
    ("policy_sessions", "sessions_by_policy", "Sessions in memory, by cache policy.", "policy"),
    ("tenant_sessions", "by_tenant.sessions", "Sessions with requests that wait or run.", "tenant"),
    ("resident_sessions", "resident_sessions", "Sessions with KV on the device."),
    ("running_sessions", "running", "Sessions with a turn on the device."),
    ("waiting_sessions", "waiting", "Sessions that wait in the worker."),
    ("memory_waiting_sessions", "waiting_for_memory", "Waiting sessions that lack only device memory."),
    ("returned_requests", "returned", "Requests that wait in the log for their tenant's share."),
    ("log_bytes", "log_bytes", "Size of the log's stream."),
    ("log_max_bytes", "log_max_bytes", "Size at which the log refuses requests."),
    ("resident_kv_bytes", "resident_kv_bytes", "KV on the device."),
    ("kv_limit_bytes", "kv_limit_bytes", "Limit of KV on the device."),
    ("context_tokens", "context_tokens", "Most tokens of a session with all of its KV."),
    ("device_memory_bytes", "device_memory_bytes", "Limit of all memory on the device."),
    ("mlx_active_bytes", "mlx_active_bytes", "Memory that MLX has in use."),
    ("mlx_peak_bytes", "mlx_peak_bytes", "Most memory that MLX had in use."),
    ("estimated_scratch_bytes", "estimated_scratch_bytes", "Scratch memory of a step, as estimated."),
    ("measured_scratch_bytes", "measured_scratch_bytes", "Scratch memory of a step, as measured."),
    ("process_bytes", "process_bytes", "Resident memory of the process."),
    ("weight_bytes", "weight_bytes", "Size of the model's weights in memory."),
    ("snapshots_in_flight", "snapshots.in_flight", "Snapshots queued for the disk."),
    ("snapshots_in_flight_bytes", "snapshots.in_flight_bytes", "Size of the snapshots queued for the disk."),
    ("snapshots_stored", "snapshots.stored", "Snapshots on the disk."),
    ("snapshots_stored_bytes", "snapshots.stored_bytes", "Size of the snapshots on the disk."),
    ("snapshots_capacity_bytes", "snapshots.capacity_bytes", "Disk space for snapshots."),
    (
        "snapshots_free_bytes",
        "snapshots.free_bytes",
        "Free disk space for snapshots; negative above a limit.",
    ),
    ("snapshots_held_bytes", "snapshots.held_bytes", "Disk space that must not be evicted now."),
    ("snapshots_evictable_bytes", "snapshots.evictable_bytes", "Disk space that eviction can free."),
)
HISTOGRAMS: Final[tuple[tuple[str, ...], ...]] = (
    ("queue_time_seconds", "queue_time", "From the log's time of a request until it runs."),
    ("time_to_first_token_seconds", "time_to_first_token", "From a generate's arrival to its first token."),
    ("time_per_output_token_seconds", "time_per_output_token", "Time between two tokens of an answer."),
    ("request_duration_seconds", "request_duration", "From the log's time of a request to its result."),
    ("batch_size", "batch_size", "Answers that a step decodes."),
    ("event_loop_lag_seconds", "event_loop_lag", "How late the event loop runs a task that is due."),
)


def families(sightings: Sequence[Sighting], backlog: Backlog | None, *, connected: bool) -> Iterator[Metric]:
    """Yield all metric families.

    A silent worker has only `up`, `last_seen_seconds` and the info metrics, since all its other values are
    old. If `backlog` is None, leave out the metrics of the log's consumer.
    """
    yield _single("nats_connected", "Whether the exporter has a connection to NATS.", connected)
    if backlog is not None:
        yield from _consumer(backlog)
    yield from _known(sightings)
    figures = [one.metrics for one in sightings if one.up]
    for name, field, text, *labels in COUNTERS:
        counter = CounterMetricFamily(f"turnkeep_{name}", text, labels=(*_WORKER, *labels))
        yield _filled(counter, field, figures)
    for name, field, text, *labels in GAUGES:
        gauge = GaugeMetricFamily(f"turnkeep_{name}", text, labels=(*_WORKER, *labels))
        yield _filled(gauge, field, figures)
    for name, field, text in HISTOGRAMS:
        histogram = HistogramMetricFamily(f"turnkeep_{name}", text, labels=_WORKER)
        for metrics in figures:
            value = attrgetter(field)(metrics)
            if isinstance(value, Histogram):
                histogram.add_metric(_labels(metrics), _buckets(value), value.sum)
        yield histogram


def _consumer(backlog: Backlog) -> Iterator[Metric]:
    """Yield the metrics of the log's consumer."""
    yield _single("consumer_pending", "Requests in the log that wait for a worker.", backlog.num_pending)
    text = "Requests that workers hold; one of each session at work."
    yield _single("consumer_ack_pending", text, backlog.num_ack_pending)
    text = "Requests that workers hold and that were delivered more than once."
    yield _single("consumer_redelivered", text, backlog.num_redelivered)


def _known(sightings: Sequence[Sighting]) -> Iterator[Metric]:
    """Yield the metrics of all workers, silent ones too: up, last seen, and version."""
    up = GaugeMetricFamily("turnkeep_up", "Whether the worker publishes metrics.", labels=_WORKER)
    last_seen = GaugeMetricFamily(
        "turnkeep_last_seen_seconds", "Time since the worker's last metrics.", labels=_WORKER
    )
    info = GaugeMetricFamily("turnkeep_worker_info", "The worker's version.", labels=(*_WORKER, "version"))
    for one in sightings:
        worker = _labels(one.metrics)
        up.add_metric(worker, one.up)
        last_seen.add_metric(worker, one.age_s)
        info.add_metric((*worker, one.metrics.version), 1)
    yield from (up, last_seen, info)


def _single(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"turnkeep_{name}", text, value=value)


def _labels(metrics: Metrics) -> tuple[str, str, str]:
    return metrics.worker, metrics.model, metrics.device


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, field: str, figures: Iterable[Metrics]
) -> Metric:
    for metrics in figures:
        for labels, value in _values(attrgetter(field)(metrics)):
            family.add_metric((*_labels(metrics), *labels), value)
    return family


def _values(value: Any) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the numbers of a field; if the field is a mapping, nested or not, each with the number's keys."""
    if not isinstance(value, dict):
        yield (), value
        return
    for key, inner in value.items():
        for keys, number in _values(inner):
            yield (key, *keys), number


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    counts = accumulate(histogram.counts)
    bounds = [(str(bound), count) for bound, count in zip(histogram.bounds, counts, strict=False)]
    return [*bounds, ("+Inf", histogram.count)]
