"""The dashboard and the alert rules: each query returns data from the samples that an exporter serves."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from ops.exposition import families
from ops.fleet import Fleet
from tests.protocol.scripted_worker import metrics
from turnkeep_client.messages import Histogram, Metrics, SnapshotCounters, TenantFigures
from turnkeep_client.wire import Backlog

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed; Debian's package prometheus has it"
)


FOLDER = Path(__file__).parents[2] / "ops" / "prometheus"
PANELS = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
RULES = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]


def figure(rule: dict[str, Any]) -> str:
    """Return an alert's expression without its comparison, so that it has a value while all is well."""
    return re.sub(r"^absent\((.*)\)$| (?:==|>) [\d.]+$", r"\1", rule["expr"])


def test_no_two_grafana_panels_share_a_position_and_no_two_prometheus_alerts_a_name() -> None:
    places = [panel["gridPos"] for panel in PANELS]
    assert len({(place["x"], place["y"]) for place in places}) == len(PANELS)
    assert max(place["x"] + place["w"] for place in places) == 24
    assert len({panel["id"] for panel in PANELS}) == len({panel["title"] for panel in PANELS}) == len(PANELS)
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


def test_the_dashboard_and_the_alerts_name_only_metrics_that_an_exporter_serves() -> None:
    exprs = [rule["expr"] for rule in RULES]
    exprs += [target["expr"] for panel in PANELS for target in panel["targets"]]
    assert set(re.findall(r"\bturnkeep_\w+", " ".join(exprs))) <= exported()


def busy(seconds: float) -> Metrics:
    """Return metrics of a worker in which, after `seconds`, every event has occurred that a query counts."""
    events = int(seconds * 10)
    histogram = Histogram(bounds=(0.1, 1.0), counts=(events, events, 0), sum=seconds, count=2 * events)
    names = ("queue_time", "request_duration", "time_to_first_token", "time_per_output_token")
    histograms = dict.fromkeys((*names, "batch_size", "event_loop_lag"), histogram)
    counters = (
        "cached_tokens",
        "prefilled_tokens",
        "generated_tokens",
        "draft_tokens",
        "recalled_tokens",
    )
    return structs.replace(
        metrics("busy"),
        uptime_s=seconds,
        requests={"generate": {"ok": events, "internal": events}},
        snapshots=SnapshotCounters(dropped={"queue_full": events}, failed=events, rejected=events),
        accepted_draft_tokens=events,
        by_tenant=TenantFigures(generated_tokens={"acme": events}, prefilled_tokens={"acme": events}),
        log_bytes=1,
        log_max_bytes=10,
        **dict.fromkeys(counters, events),
        **histograms,
    )


def served(seconds: float) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return all samples that an exporter serves of a worker which has been busy for some seconds."""
    fleet = Fleet(60)
    histogram = metrics("w1").batch_size
    fleet.hear(structs.replace(busy(seconds), worker="w1", queue_time=histogram, request_duration=histogram))
    found = families(fleet.sightings(), Backlog(0, 0, 0), connected=True)
    return {(one.name, tuple(one.labels.items())): float(one.value) for each in found for one in each.samples}


def check_rules(folder: Path, tests: list[dict[str, Any]]) -> None:
    """Have promtool play series of metrics against the alerts, and compare what queries then return."""
    config = {"rule_files": [str(FOLDER / "alerts.yml")], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_every_query_of_every_dashboard_panel_and_alert_returns_data(tmp_path: Path) -> None:
    queries = [figure(rule) for rule in RULES]
    queries += [target["expr"] for panel in PANELS for target in panel["targets"]]
    queries = [one.replace("$worker", ".+").replace("$__rate_interval", "5m") for one in queries]
    early, late = served(1.0), served(61.0)
    series = [
        {
            "series": f"{name}{{{','.join(f'{label}={json.dumps(value)}' for label, value in labels)}}}",
            "values": f"{early[name, labels]:f}{late[name, labels] - early[name, labels]:+f}x20",
        }
        for name, labels in early
    ]
    one = [{"labels": "{}", "value": 1}]
    asked = [
        {"expr": f"count({query}) > bool 0", "eval_time": "20m", "exp_samples": one} for query in queries
    ]
    check_rules(tmp_path, [{"interval": "1m", "input_series": series, "promql_expr_test": asked}])


def exported() -> set[str]:
    return {name for name, _ in served(1.0)}


@needs_promtool
def test_each_prometheus_alert_fires_when_its_fault_occurs_and_for_no_healthy_worker(tmp_path: Path) -> None:
    def series(name: str, values: str, **labels: str) -> dict[str, str]:
        shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
        return {"series": f"turnkeep_{name}{{{shown}}}", "values": values}

    def buckets(name: str, per_minute: dict[str, int], **labels: str) -> list[dict[str, str]]:
        return [series(f"{name}_bucket", f"0+{num}x21", **labels, le=le) for le, num in per_minute.items()]

    one, two, three, four = ({"worker": f"w{number}"} for number in (1, 2, 3, 4))
    # Two workers for long, and one that has just started.
    workers = [series("up", "1x21", **worker) for worker in (one, two)]
    workers += [series("uptime_seconds", "90000+60x21", **worker) for worker in (one, two)]
    workers += [series("up", "_x12 1x9", **three), series("uptime_seconds", "_x12 0+60x9", **three)]
    # One that was silent for eight minutes, as when NATS was gone; the exporter forgot it after five.
    workers += [series("up", "1x7 0x4 _x3 1x4", **four)]
    workers += [series("uptime_seconds", "90000+60x7 _x8 90960+60x4", **four)]
    cases = {  # after 20 minutes of one sample a minute
        "TurnkeepWorkerSilent": ([series("up", "1x18 0 0 0", **one), series("up", "1x21", **two)], [one]),
        "TurnkeepNoWorker": ([series("up", "0x21", **one)], [{}]),
        "TurnkeepExporterDown": ([series("up", "1x21", **one)], [{}]),
        "TurnkeepNatsDown": ([series("nats_connected", "1x18 0 0 0")], [{}]),
        "TurnkeepCannotStore": (
            [series("recorded", "1x18 0 0 0", **one), series("recorded", "1x21", **two)],
            [one],
        ),
        "TurnkeepRequestsPending": ([series("consumer_pending", "0x10 3x11")], [{}]),
        # The first event of its kind makes its series.
        "TurnkeepRequestsBreak": (
            [
                *workers,
                series("requests_total", "_x17 1 1 1", **one, outcome="internal"),
                series("requests_total", "5x21", **two, outcome="internal"),
                series("requests_total", "0+9x21", **two, outcome="ok"),
                # A worker that had more of them, and begins again; its first one makes the series again.
                series("requests_total", "9x10 _x7 1 1 1", **three, outcome="internal"),
                series("requests_total", "5x7 _x8 5x4", **four, outcome="internal"),
            ],
            [one, three],
        ),
        "TurnkeepLogNearlyFull": (
            [series("log_bytes", "91x21", **one), series("log_max_bytes", "100x21", **one)],
            [one],
        ),
        "TurnkeepDiskFails": (
            [
                *workers,
                series("snapshots_failed_total", "0x18 0 1 2", **one),
                series("snapshots_failed_total", "3x9 _ 3x10", **two),  # a scrape was missed
                series("snapshots_failed_total", "_x17 3x3", **three),
            ],
            [one, three],
        ),
        "TurnkeepQueueSlow": (
            [
                *buckets("queue_time_seconds", {"20.48": 0, "40.96": 10, "+Inf": 10}, **one),
                *buckets("queue_time_seconds", {"20.48": 10, "40.96": 10, "+Inf": 10}, **two),
            ],
            [one],
        ),
        "TurnkeepSnapshotsRejected": (
            [
                *workers,
                series("snapshots_rejected_total", "0x18 0 1 1", **one),
                series("snapshots_rejected_total", "7x21", **two),
                series("snapshots_rejected_total", "_x17 3x3", **three),  # found while it starts
            ],
            [one, three],
        ),
        "TurnkeepWrongKv": ([series("wrong_blocks_total", "0x18 1 1 1", **one)], [one]),
        # A single one is no reason to wake somebody.
        "TurnkeepSnapshotsDropped": (
            [
                *workers,
                series("snapshots_dropped_total", "0+1x21", **one, reason="queue_full"),
                series("snapshots_dropped_total", "0x14 1x6", **two, reason="queue_full"),
                series("snapshots_dropped_total", "_x14 300x6", **three, reason="queue_full"),
            ],
            [one, three],
        ),
        "TurnkeepEventLoopSlow": (
            [
                *buckets("event_loop_lag_seconds", {"0.1": 9, "0.5": 10, "+Inf": 10}, **one),
                *buckets("event_loop_lag_seconds", {"0.1": 10, "0.5": 10, "+Inf": 10}, **two),
            ],
            [one],
        ),
        "TurnkeepWorkerRestarts": ([series("uptime_seconds", "1 2 1 2 1 2 1 2 " * 3, **one)], [one]),
    }
    assert set(cases) == {rule["alert"] for rule in RULES}
    given = {one["series"].partition("{")[0] for inputs, _ in cases.values() for one in inputs}
    assert given <= exported(), "series that the exporter does not name"
    tests = []
    for name, (inputs, firing) in cases.items():
        rule = next(rule for rule in RULES if rule["alert"] == name)
        assert rule["annotations"]
        expected = [{"labels": labels} for labels in firing]
        expr = f'count by (worker) (ALERTS{{alertname="{name}",alertstate="firing"}})'
        samples = [
            {"labels": "{" + ",".join(f'{k}="{v}"' for k, v in one["labels"].items()) + "}", "value": 1}
            for one in expected
        ]
        check = {"expr": expr, "eval_time": "20m", "exp_samples": samples}
        tests.append({"name": name, "interval": "1m", "input_series": inputs, "promql_expr_test": [check]})
    check_rules(tmp_path, tests)
