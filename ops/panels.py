"""Generates the Grafana dashboard and the alert rules; `python -m ops.panels` writes both files.

All expressions use metrics of `exposition`; a test runs each one on a Prometheus that scrapes an exporter.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

FOLDER: Final = Path(__file__).parent / "prometheus"
_COLUMNS: Final = 3
_WIDTH: Final = 24 // _COLUMNS
_HEIGHT: Final = 7
_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True)
class Panel:
    """One graph: PromQL expressions by name. Each has one curve for each combination of the labels `by`."""

    title: str
    unit: str
    curves: dict[str, str]
    by: tuple[str, ...] = ("worker",)
    most: float | None = None


@dataclass(frozen=True)
class Alert:
    """An alert rule: fires once the PromQL expression `figure` has met `compare` for the time `for_`.

    `compare` is a comparison such as `> 0`, or `absent`, which is met while the figure has no value.
    """

    name: str
    figure: str
    compare: str
    for_: str
    severity: str
    summary: str
    advice: str

    @property
    def expr(self) -> str:
        """The rule's PromQL expression."""
        return f"absent({self.figure})" if self.compare == "absent" else f"{self.figure} {self.compare}"


def _of(name: str, labels: str = "") -> str:
    return f'turnkeep_{name}{{worker=~"$worker"{labels}}}'


def _per_s(name: str, *by: str) -> str:
    return f"sum by ({', '.join(('worker', *by))}) (rate({_of(name)}[$__rate_interval]))"


def _quantile(part: float, name: str) -> str:
    buckets = f"sum by (worker, le) (rate({_of(name + '_bucket')}[$__rate_interval]))"
    return f"histogram_quantile({part}, {buckets})"


def _spread(name: str) -> dict[str, str]:
    return {f"p{100 * part:.0f}": _quantile(part, name) for part in (0.5, 0.95)}


def _mean(name: str) -> str:
    return f"{_per_s(name + '_sum')} / {_per_s(name + '_count')}"


PANELS: Final = (
    Panel("Workers", "none", {"up": _of("up")}, most=1),
    Panel(
        "Sessions",
        "none",
        {"in memory": _of("sessions"), "on the device": _of("resident_sessions")}
        | {"running": _of("running_sessions")},
    ),
    Panel(
        "Waiting",
        "none",
        {"for the device": _of("waiting_sessions"), "for memory": _of("memory_waiting_sessions")}
        | {"returned": _of("returned_requests")},
    ),
    Panel(
        "Log's consumer",
        "none",
        {"pending": "turnkeep_consumer_pending", "held by workers": "turnkeep_consumer_ack_pending"}
        | {"redelivered": "turnkeep_consumer_redelivered"},
        by=(),
    ),
    Panel(
        "Requests", "reqps", {"": _per_s("requests_total", "type", "outcome")}, ("worker", "type", "outcome")
    ),
    Panel("Queue time", "s", _spread("queue_time_seconds")),
    Panel("Time to first token", "s", _spread("time_to_first_token_seconds")),
    Panel("Time per output token", "s", _spread("time_per_output_token_seconds")),
    Panel("Request duration", "s", _spread("request_duration_seconds")),
    Panel(
        "Tokens per second",
        "none",
        {kind: _per_s(f"{kind}_tokens_total") for kind in ("generated", "prefilled", "cached", "recalled")},
    ),
    Panel(
        "Share of tokens",
        "percentunit",
        {
            "found in the cache": f"{_per_s('cached_tokens_total')} / "
            f"({_per_s('cached_tokens_total')} + {_per_s('prefilled_tokens_total')})",
            "drafts that were right": f"{_per_s('accepted_draft_tokens_total')} / "
            f"{_per_s('draft_tokens_total')}",
        },
        most=1,
    ),
    Panel(
        "Speed by drafts",
        "none",
        {
            "times as fast": "1 + sum by (worker) (deriv(turnkeep_draft_saved_seconds"
            f'{{worker=~"$worker"}}[$__rate_interval])) / {_per_s("decoding_seconds_total")}'
        },
    ),
    Panel("Batch size", "none", {"mean": _mean("batch_size")}),
    Panel("KV on the device", "bytes", {"in use": _of("resident_kv_bytes"), "limit": _of("kv_limit_bytes")}),
    Panel(
        "Device memory",
        "bytes",
        {
            "in use": _of("mlx_active_bytes"),
            "peak": _of("mlx_peak_bytes"),
            "limit": _of("device_memory_bytes"),
        },
    ),
    Panel("Process memory", "bytes", {"resident": _of("process_bytes")}),
    Panel(
        "Snapshots on disk",
        "bytes",
        {"stored": _of("snapshots_stored_bytes"), "in use": _of("snapshots_held_bytes")}
        | {"capacity": _of("snapshots_capacity_bytes")},
    ),
    Panel(
        "Disk traffic",
        "Bps",
        {
            "written": _per_s("snapshots_written_bytes_total"),
            "read": _per_s("snapshots_restored_bytes_total"),
        },
    ),
    Panel(
        "Remote tier",
        "Bps",
        {"put": _per_s("remote_put_bytes_total"), "fetched": _per_s("remote_fetched_bytes_total")},
    ),
    Panel("Snapshots in flight", "none", {"": _of("snapshots_in_flight")}),
    Panel(
        "Snapshots dropped", "cps", {"": _per_s("snapshots_dropped_total", "reason")}, ("worker", "reason")
    ),
    Panel(
        "Snapshots lost or removed",
        "cps",
        {kind: _per_s(f"snapshots_{kind}_total") for kind in ("evicted", "failed", "rejected", "timed_out")},
    ),
    Panel("Size of the log", "bytes", {"log": _of("log_bytes"), "limit": _of("log_max_bytes")}),
    Panel("Event loop lag", "s", {"p99": _quantile(0.99, "event_loop_lag_seconds")}),
    Panel(
        "Tokens per second by tenant, if named in metrics",
        "none",
        {kind: _per_s(f"tenant_{kind}_tokens_total", "tenant") for kind in ("generated", "prefilled")},
        ("worker", "tenant"),
    ),
)


def _new(name: str, minutes: int, labels: str = "") -> str:
    """Return a PromQL expression for a counter's increase in the last `minutes`, from 0 for a new series.

    PromQL's `increase` ignores a series' first value. A series is new if, in the first half of the time,
    the worker was up but had no sample of the series, or if the worker has started in the second half.
    """
    series, half = f"turnkeep_{name}{labels}", minutes // 2
    before = f"[{half}m] offset {half}m"
    begun = f"max_over_time({series}[{half}m]) unless present_over_time({series}{before})"
    # While the worker is silent, `turnkeep_up` is 0, and the series has no samples although it is old.
    known = f"max_over_time(turnkeep_up{before}) == 1 or turnkeep_uptime_seconds < {60 * half}"
    return f"sum by (worker) ({begun} and on (worker) ({known}) or increase({series}[{minutes}m]))"


ALERTS: Final = (
    Alert(
        *("TurnkeepExporterDown", "turnkeep_nats_connected", "absent", "2m", "critical"),
        summary="No exporter is scraped",
        advice="Start turnkeep exporter, or see Prometheus's page of targets for the scrape's error.",
    ),
    Alert(
        *("TurnkeepNatsDown", "turnkeep_nats_connected", "== 0", "1m", "critical"),
        summary="The exporter has no connection to NATS",
        advice="See whether the NATS server runs; workers stop answering with it, and go on by themselves.",
    ),
    Alert(
        *("TurnkeepNoWorker", "(turnkeep_up == 1)", "absent", "2m", "critical"),
        summary="No worker publishes metrics",
        advice="Start turnkeep serve; requests wait in the log until then.",
    ),
    Alert(
        *("TurnkeepWorkerSilent", "turnkeep_up", "== 0", "30s", "warning"),
        summary="The worker {{ $labels.worker }} is silent",
        advice="See its log; if it hangs, kill it: the next worker goes on where it stopped.",
    ),
    Alert(
        *("TurnkeepWorkerRestarts", "resets(turnkeep_uptime_seconds[15m])", "> 3", "0s", "critical"),
        summary="The worker {{ $labels.worker }} starts again and again",
        advice="The last lines of its log before each start say why it ended.",
    ),
    Alert(
        *("TurnkeepRequestsPending", "turnkeep_consumer_pending", "> 0", "5m", "warning"),
        summary="{{ $value }} requests wait in the log for a worker",
        advice="No worker pulls, or all places for sessions are taken.",
    ),
    Alert(
        "TurnkeepQueueSlow",
        "histogram_quantile(0.95, sum by (worker, le) (rate(turnkeep_queue_time_seconds_bucket[5m])))",
        *("> 30", "10m", "warning"),
        summary="One request in twenty waits {{ $value | humanizeDuration }} at {{ $labels.worker }}",
        advice="More load than the device carries: compare waiting sessions with those that wait for memory.",
    ),
    Alert(
        "TurnkeepRequestsBreak",
        _new("requests_total", 10, '{outcome=~"internal|history_diverged"}'),
        *("> 0", "0s", "critical"),
        summary="Requests at {{ $labels.worker }} end as internal or history_diverged",
        advice="The worker's log has the cause of each.",
    ),
    Alert(
        *("TurnkeepLogNearlyFull", "turnkeep_log_bytes / turnkeep_log_max_bytes", "> 0.9", "5m", "warning"),
        summary="The log is {{ $value | humanizePercentage }} full",
        advice="Closed sessions leave it early; once it is full, requests are refused. Raise log_max_bytes.",
    ),
    Alert(
        *("TurnkeepDiskFails", _new("snapshots_failed_total", 10), "> 0", "0s", "warning"),
        summary="{{ $labels.worker }} cannot write snapshots",
        advice="Its log names the error. Turns go on, and sessions are prefilled after a restart.",
    ),
    Alert(
        *("TurnkeepSnapshotsRejected", _new("snapshots_rejected_total", 60), "> 0", "0s", "warning"),
        summary="Snapshot files of {{ $labels.worker }} failed a check",
        advice="See the folder quarantine in the data directory, and the disk's own health.",
    ),
    Alert(
        *("TurnkeepSnapshotsDropped", _new("snapshots_dropped_total", 60), "> 5", "0s", "warning"),
        summary="{{ $labels.worker }} drops snapshots",
        advice="By reason: the disk is too slow, or too full (max_disk).",
    ),
    Alert(
        "TurnkeepEventLoopSlow",
        "histogram_quantile(0.99, sum by (worker, le) (rate(turnkeep_event_loop_lag_seconds_bucket[5m])))",
        *("> 0.1", "10m", "warning"),
        summary="The event loop of {{ $labels.worker }} is late by {{ $value | humanizeDuration }}",
        advice="Too few processor cores, or a machine that swaps.",
    ),
)


def dashboard() -> dict[str, Any]:
    """Build the dashboard for an import into Grafana; users choose data source and workers on its page."""
    source = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    workers = {
        "name": "worker",
        "label": "Worker",
        "type": "query",
        "datasource": _SOURCE,
        "query": "label_values(turnkeep_up, worker)",
        "refresh": 2,
        "includeAll": True,
        "allValue": ".+",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "title": "Turnkeep",
        "uid": "turnkeep",
        "schemaVersion": 39,
        "tags": ["turnkeep"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "15s",
        "templating": {"list": [source, workers]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    labels = " ".join(f"{{{{{label}}}}}" for label in panel.by)
    return {
        "id": number + 1,
        "title": panel.title,
        "type": "timeseries",
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0} | ({"max": panel.most} if panel.most else {}),
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expr, "legendFormat": f"{labels} {name}".strip()}
            for place, (name, expr) in enumerate(panel.curves.items())
        ],
    }


def rules() -> dict[str, Any]:
    """Build the alert rules in Prometheus's format."""
    return {
        "groups": [
            {
                "name": "turnkeep",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expr,
                        "for": alert.for_,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "description": alert.advice},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }


def files() -> dict[Path, str]:
    """Return the generated files by path, with their text."""
    return {
        FOLDER / "dashboard.json": json.dumps(dashboard(), indent=1) + "\n",
        FOLDER / "alerts.yml": yaml.safe_dump(rules(), sort_keys=False, width=110),
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the files; with `--check` only compare them, and return 1 if one is out of date."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args(arguments).check:
        return int(any(not path.exists() or path.read_text() != text for path, text in files().items()))
    for path, text in files().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
