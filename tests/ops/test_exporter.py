"""`turnkeep exporter`: the workers' metrics in Prometheus's format, and the command's errors."""

import asyncio
import contextlib
import http.client
import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from msgspec import UNSET, structs
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ops.exporter import metrics_app, run
from ops.exposition import FIGURES, families
from ops.fleet import Fleet
from ops.http_server import listening, server, url_of
from tests.commands.command_runs import serving_process, turnkeep
from tests.parts import NatsServer
from tests.protocol.scripted_worker import metrics
from turnkeep_client.client import connect
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import (
    UNLOADED,
    Histogram,
    Metrics,
    SnapshotCounters,
    TenantFigures,
    Totals,
    encode,
)
from turnkeep_client.subjects import Subjects
from turnkeep_client.wire import Backlog
from worker.observe.telemetry import Telemetry

#: Fields that become labels, or values of `turnkeep_..._info`.
LABELS = {"worker", "others", "model", "device", "version", "sampling", "reasoning", "vision", "makes"}
LABELS |= {"snapshots", "by_tenant", "model_changed_s"}
LABELS |= {"max_message_bytes", "refusal"}  # a setting and a sentence, of which there are no figures
LABEL = {"worker": "w1", "model": "tiny", "device": "cpu"}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(page: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"turnkeep_{name}", frozenset((LABEL | labels).items())


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def page(fleet: Fleet, backlog: Backlog | None = None) -> str:
    class Registry:
        def collect(self) -> Iterator[Any]:
            return families(fleet.sightings(), backlog, connected=True)

    return generate_latest(Registry()).decode()


def shown(message: Metrics) -> Samples:
    fleet = Fleet(60)
    fleet.hear(message)
    return samples(page(fleet))


def test_the_exporter_exports_every_field_of_a_workers_metrics_message() -> None:
    exported = {path for _, path, _ in FIGURES}
    fields = {*Metrics.__struct_fields__} - LABELS
    fields |= {f"snapshots.{name}" for name in SnapshotCounters.__struct_fields__}
    fields |= {f"by_tenant.{name}" for name in TenantFigures.__struct_fields__}
    assert exported == fields


@pytest.mark.parametrize("field", Totals.__struct_fields__)
def test_each_counter_of_the_worker_totals_appears_in_the_metrics_message_and_in_prometheus(
    field: str,
) -> None:
    telemetry = Telemetry()
    setattr(telemetry.totals, field, 7)
    [(name, figure)] = [(name, figure) for name, path, figure in FIGURES if path == field]
    found = shown(structs.replace(metrics("w1"), **telemetry.figures()))
    assert found[key(name + ("_total" if figure.kind == "counter" else ""))] == 7


def test_the_exporter_exports_metrics_by_tenant_only_if_a_worker_sends_them() -> None:
    assert not [name for name, _ in shown(metrics("w1")) if name.startswith("turnkeep_tenant")]
    figures = TenantFigures(
        requests={"acme": {"ok": 3, "overloaded": 1}, "_other": {"ok": 7}},
        sessions={"acme": 2},
        restored_tokens={"acme": 5},
    )
    found = shown(structs.replace(metrics("w1"), by_tenant=figures))
    assert found[key("tenant_requests_total", tenant="acme", outcome="overloaded")] == 1
    assert found[key("tenant_requests_total", tenant="_other", outcome="ok")] == 7
    assert found[key("tenant_sessions", tenant="acme")] == 2
    assert found[key("tenant_restored_tokens_total", tenant="acme")] == 5


def test_exported_metrics_have_labels_for_the_worker_and_for_the_outcome_or_reason() -> None:
    found = shown(metrics("w1"))
    assert found[key("prefilled_tokens_total")] == 10
    assert found[key("resident_kv_bytes")] == 1024
    assert found[key("requests_total", type="default", outcome="appended")] == 2
    assert found[key("snapshots_dropped_total", reason="queue_full")] == 1
    assert found[key("worker_info", version="0.1.0")] == 1


def test_the_metrics_page_leaves_out_the_snapshots_of_a_model_that_is_not_loaded() -> None:
    """Nobody counts them then: with zeros, a graph of the disk space would drop."""
    found = shown(structs.replace(metrics("w1"), device=UNLOADED))
    assert ("turnkeep_sessions", frozenset((LABEL | {"device": UNLOADED}).items())) in found
    assert not [name for name, _ in found if name.startswith("turnkeep_snapshots")]


def test_exported_histogram_buckets_are_cumulative_and_end_with_the_total_count() -> None:
    found = shown(metrics("w1"))
    name = "time_to_first_token_seconds"
    assert [found[key(f"{name}_bucket", le=le)] for le in ("0.1", "1.0", "+Inf")] == [1, 3, 3]
    assert (found[key(f"{name}_sum")], found[key(f"{name}_count")]) == (1.5, 3)


def test_the_metrics_page_leaves_out_a_histogram_that_a_worker_does_not_send() -> None:
    histogram = Histogram(bounds=(1.0,), counts=(1, 0), sum=0.5, count=1)
    assert key("queue_time_seconds_count") in shown(structs.replace(metrics("w1"), queue_time=histogram))
    assert key("queue_time_seconds_count") not in shown(structs.replace(metrics("w1"), queue_time=UNSET))


def test_the_metrics_page_is_served_even_if_a_worker_sends_a_histogram_with_missing_buckets() -> None:
    forged = Histogram(bounds=(1.0, 2.0), counts=(), sum=0.0, count=7)
    assert shown(structs.replace(metrics("w1"), batch_size=forged))[key("batch_size_count")] == 7


def test_the_exporter_reports_a_silent_worker_as_down_and_later_removes_it_while_other_workers_stay() -> None:
    clock = Clock()
    fleet = Fleet(60, clock)
    fleet.hear(structs.replace(metrics("w1"), interval_s=2.0))
    clock.now_s += 6
    fleet.hear(metrics("w2"))
    assert samples(page(fleet))[key("up")] == 1
    clock.now_s += 1
    found = samples(page(fleet))
    assert (found[key("up")], found[key("last_seen_seconds")]) == (0, 7)
    assert key("sessions") not in found
    assert found[key("sessions", worker="w2")] == 3
    clock.now_s += 54
    assert "w1" not in page(fleet)
    assert "w2" in page(fleet)


def test_a_worker_that_returns_with_another_model_is_exported_only_under_that_model() -> None:
    fleet = Fleet(60)
    fleet.hear(metrics("w1"))
    fleet.hear(structs.replace(metrics("w1"), model="large"))
    found = samples(page(fleet))
    assert key("up") not in found
    assert found[key("up", model="large")] == 1


def test_promtool_finds_no_fault_in_the_exported_metric_names_types_and_help_texts() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed; Debian's package prometheus has it")
    fleet = Fleet(60)
    histogram = metrics("w1").batch_size
    for worker in ("w1", "w2"):
        tenants = TenantFigures(requests={"acme": {"ok": 1}}, sessions={"_other": 2})
        more = {"queue_time": histogram, "request_duration": histogram, "by_tenant": tenants}
        fleet.hear(structs.replace(metrics(worker), **more))
    text = page(fleet, Backlog(1, 2, 3))
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def get(url: str, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


async def scraped(url: str, is_it: Callable[[Samples], Any]) -> Samples:
    """Read the exporter's page until `is_it` is true of its samples; return these."""
    async with asyncio.timeout(30):
        while True:
            _, text, _ = await asyncio.to_thread(get, url, "/metrics")
            found = samples(text)
            with contextlib.suppress(KeyError):
                if is_it(found):
                    return found
            await asyncio.sleep(0.05)


async def test_the_exporter_reports_nats_as_down_while_it_is_away_and_as_up_once_it_is_back(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server = NatsServer(tmp_path / "js")
    request.addfinalizer(server.kill)
    server.start()
    connected = "turnkeep_nats_connected", frozenset[tuple[str, str]]()
    with serving_process("exporter", "--nats", server.url, "--listen", "127.0.0.1:0") as url:
        await scraped(url, lambda found: found[connected] == 1)
        server.kill()
        await scraped(url, lambda found: found[connected] == 0)
        server.start()
        await scraped(url, lambda found: found[connected] == 1)
        publisher = await nats.connect(server.url)

        async def publish() -> None:
            while True:
                await publisher.publish(Subjects().metrics("w1"), encode(metrics("w1")))
                await asyncio.sleep(0.1)

        publishing = asyncio.create_task(publish())
        await scraped(url, lambda found: found[key("up")] == 1)
        publishing.cancel()
        await publisher.close()


class Page:
    """What an exporter without NATS has: a few metrics to serve."""

    def collect(self) -> Iterator[Any]:
        return families([], None, connected=True)


async def test_an_exporter_on_a_loopback_address_answers_only_requests_for_local_host_names() -> None:
    with listening("127.0.0.1", 0) as listener:
        running = server(metrics_app(Page()), 1)
        task, url = asyncio.create_task(running.serve(sockets=[listener])), url_of(listener)
        for host in ("localhost:80", "127.0.0.1", "[::1]:9422"):
            status, body, _ = await asyncio.to_thread(get, url, "/metrics", Host=host)
            assert (status, "turnkeep_nats_connected 1.0" in body) == (200, True)
        for host in ("rebound.example", "[", ""):
            status, body, _ = await asyncio.to_thread(get, url, "/metrics", Host=host)
            assert (status, body) == (421, "ask for localhost or 127.0.0.1, not for another name\n")
        running.should_exit = True
        await task


async def test_the_exporter_fails_with_one_line_if_its_user_may_not_subscribe_to_metrics(
    tmp_path: Path,
) -> None:
    user = {"user": "eve", "password": "pw", "permissions": {"subscribe": ["_INBOX.>"]}}
    (tmp_path / "server.conf").write_text(json.dumps({"authorization": {"users": [user]}}))
    server = NatsServer(tmp_path / "js", ("-c", str(tmp_path / "server.conf")))
    server.start()
    try:
        url = server.url.replace("//", "//eve:pw@")
        done = turnkeep("exporter", "--nats", url, "--listen", "127.0.0.1:0")
    finally:
        server.kill()
    assert (done.returncode, done.stdout) == (1, "")
    _, line = done.stderr.splitlines()  # it serves at first, and says so
    assert line.startswith("turnkeep: this user may not subscribe to turnkeep._metrics.*: ")
    assert "pw" not in line


async def test_an_exporter_whose_password_is_changed_at_the_server_ends_and_says_why(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = tmp_path / "nats.conf"
    config.write_text("authorization { users: [{ user: w, password: one }] }")
    server = NatsServer(tmp_path / "js", ("-c", str(config)))
    request.addfinalizer(server.kill)
    server.start()
    async with connect(server.url.replace("//", "//w:one@")) as client:
        running = asyncio.create_task(run(client, "127.0.0.1", 0, keep_s=300.0))
        await asyncio.sleep(0.5)
        config.write_text("authorization { users: [{ user: w, password: two }] }")
        assert server._process is not None
        server._process.send_signal(signal.SIGHUP)
        with pytest.raises(
            TurnkeepError, match="the NATS server refuses the credentials, or wants some; check"
        ):
            async with asyncio.timeout(30):
                await running
