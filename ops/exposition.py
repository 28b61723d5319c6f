"""Converts workers' metrics messages to Prometheus metrics. Pure.

The fields of the message say which of them are exported, and how (`turnkeep_client.metrics`). A metric's name
is the field's, followed by the unit. Every metric of a worker has the labels `worker`, `model` and `device`.
"""

from __future__ import annotations

import re
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.inspect import Metadata
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from turnkeep_client.messages import UNLOADED, Histogram, Metrics, SnapshotCounters, TenantFigures

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from msgspec import Struct
    from prometheus_client.metrics_core import Metric

    from turnkeep_client.messages import Figure
    from turnkeep_client.wire import Backlog

    from .fleet import Sighting

_WORKER: Final = ("worker", "model", "device")

_FAMILIES: Final = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def exported(
    kind: type[Struct], path: str = "", prefix: str = "", *labels: str
) -> Iterator[tuple[str, str, Figure]]:
    """Yield each field of a message type that is exported: its name after `turnkeep_`, its path, its figure.

    If `kind` is a part of a message, names begin with `prefix`, paths with `path`, and labels with `labels`.
    """
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]  # of a Struct
        if isinstance(field.type, Metadata) and (figure := (field.type.extra or {}).get("figure")):
            own = re.sub("_s$", "_seconds", f"{prefix}{field.name}") + (figure.unit and f"_{figure.unit}")
            figure = figure._replace(labels=(*labels, *figure.labels))
            yield figure.name or own, f"{path}{field.name}", figure


#: The figures of a worker's message.
FIGURES: Final = (
    *exported(Metrics),
    *exported(SnapshotCounters, "snapshots.", "snapshots_"),
    *exported(TenantFigures, "by_tenant.", "tenant_", "tenant"),
)


def families(sightings: Sequence[Sighting], backlog: Backlog | None, *, connected: bool) -> Iterator[Metric]:
    """Yield all metric families: those of the exporter, of the log's consumer, and of the workers.

    A silent worker has only `up`, `last_seen_seconds` and the info metrics, since all its other values are
    old; a model that is not loaded has no figures of its snapshots. If `backlog` is None, the metrics of the
    log's consumer are left out.
    """
    yield _single("nats_connected", "Whether the exporter has a connection to NATS.", connected)
    if backlog is not None:
        yield from _consumer(backlog)
    yield from _known(sightings)
    heard = [one.metrics for one in sightings if one.up]
    for name, path, figure in FIGURES:
        family = _FAMILIES[figure.kind](f"turnkeep_{name}", figure.text, labels=(*_WORKER, *figure.labels))
        for metrics in heard:
            if metrics.device == UNLOADED and path.startswith("snapshots."):
                continue  # nobody has counted them
            _add(family, _labels(metrics), attrgetter(path)(metrics))
        yield family


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


def _add(family: Any, labels: tuple[str, ...], value: Any) -> None:
    """Add a field's value to a metric family; the keys of a mapping are further labels."""
    match value:
        case Histogram():
            family.add_metric(labels, _buckets(value), value.sum)
        case dict():
            for key, inner in value.items():
                _add(family, (*labels, key), inner)
        case int() | float():
            family.add_metric(labels, value)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    counts = accumulate(histogram.counts)
    bounds = [(str(bound), count) for bound, count in zip(histogram.bounds, counts, strict=False)]
    return [*bounds, ("+Inf", histogram.count)]
