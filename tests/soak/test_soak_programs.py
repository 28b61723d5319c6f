"""Short runs of the programs in this folder, and tests that their oracle (`judge`) finds faults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attack import attack
from cluster import campaign
from damage import damage
from doors import measure as at_both_doors
from floods import laid_out, measure
from harness import Heard, SessionKey, judge, target, tiny_model
from malformed import malformed
from service import serve
from shorts import measure as beside_streams
from soak import slopes, soak

from turnkeep_client.log import MODEL_HEADER
from turnkeep_client.messages import decode_chunk

pytestmark = pytest.mark.process
KEY = SessionKey("default", "s")


async def test_every_request_gets_exactly_one_result_while_worker_and_server_are_killed(
    tmp_path: Path,
) -> None:
    run, verdict = await attack(tmp_path, requests=60, kills=2, server_kills=1, seed=1)
    assert (run.kills, run.server_kills, run.sent) == (2, 1, 60)
    assert verdict.answered == verdict.requests > 20  # others were forgotten
    assert not verdict.faults.total(), verdict.notes


async def test_every_request_gets_exactly_one_result_under_random_faults_of_two_workers_and_a_server(
    tmp_path: Path,
) -> None:
    run, verdict = await campaign(
        tmp_path, workers=2, nodes=1, requests=80, faults=4, share=True, cuts=False, seed=1
    )
    assert (run.struck.total(), run.sent) == (4, 80)
    assert verdict.answered == verdict.requests > 30
    assert not verdict.faults.total(), verdict.notes


async def test_malformed_requests_are_each_answered_once_while_another_client_is_served(
    tmp_path: Path,
) -> None:
    run, verdict, _ = await malformed(tmp_path, requests=600, seed=1)
    assert run.waits_s
    assert verdict.answered == verdict.requests > 100
    assert not verdict.faults.total(), verdict.notes


async def test_short_answers_over_nats_and_http_are_measured_in_turns(tmp_path: Path) -> None:
    async with target(tmp_path / "data", tiny_model(tmp_path, endless=True)) as worker:
        ways = await at_both_doors(worker.url, requests=6, at_once=3, tokens=4, rounds=2)
    for way in ways.values():
        assert (len(way.rounds_s), len(way.firsts_s), min(way.firsts_s) > 0) == (2, 12, True)


@pytest.mark.soak
async def test_a_quiet_tenant_is_answered_while_another_floods_the_worker(tmp_path: Path) -> None:
    waits = await measure(tmp_path, tiny_model(tmp_path), (), requests=120, sessions=40, num_probes=4)
    assert len(waits["quiet"]) >= 8
    assert all(waits.values()), "not one was answered before the flood was over"
    assert "quiet" in laid_out(waits)


@pytest.mark.soak
async def test_short_answers_complete_and_are_timed_while_long_answers_stream(tmp_path: Path) -> None:
    async with target(tmp_path / "data", tiny_model(tmp_path, endless=True), "--max-batch", "2") as worker:
        waits, took_s = await beside_streams(worker.url, streams=8, long=1500)
    assert waits
    assert took_s > 2.0


async def test_snapshots_damaged_while_a_worker_runs_change_no_answer(tmp_path: Path) -> None:
    run, verdict = await damage(tmp_path, requests=60, seed=1)
    assert run.damaged.total() > 30
    assert run.counters.rejected
    assert not verdict.faults.total(), verdict.notes


@pytest.mark.soak
async def test_no_request_of_a_short_soak_run_fails_and_growth_per_hour_is_reported(tmp_path: Path) -> None:
    readings, load = await soak(tmp_path, minutes=0.05, interval_s=0.7, seed=1)
    assert not load.failed
    assert readings[-1].requests > 0
    assert "nan" not in slopes(readings, load)


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
async def test_prometheus_scrapes_succeed_while_worker_and_server_are_killed(tmp_path: Path) -> None:
    run, verdict, seen = await serve(
        tmp_path, minutes=0.4, sessions=10, pause_s=1.0, kill_s=3.0, interval_s=5.0, seed=1
    )
    assert run.attack.kills
    assert run.readings[-1].requests > 20
    assert seen["scrapes"] == seen["scrapes answered"] > 2
    assert not verdict.faults.total(), verdict.notes


def stored(at: int, kind: str, **body: Any) -> SimpleNamespace:
    headers = {"Nats-Subject": f"turnkeep.default.s.{kind}", "Nats-Time-Stamp": "2025-01-01T00:00:00Z"}
    if kind == "out":
        headers[MODEL_HEADER] = "tiny"
    return SimpleNamespace(seq=at, headers=headers, body=json.dumps(body).encode())


def asked(seq: int, text: str = "a") -> SimpleNamespace:
    return stored(seq, "in", type="append", id="r1", text=text)


def having(text: str) -> dict[str, Any]:
    return {"stored": "2025-01-01T00:00:00Z", "request": json.loads(asked(1, text).body)}


def told(seq: int, of: int, position: int = 1, **more: Any) -> SimpleNamespace:
    counts = {"tokens": 0, "cached_tokens": 0, "prefilled_tokens": 0, "kv_live_bytes": 0, "seconds": 0.1}
    return stored(seq, "out", type="appended", id="r1", seq=of, position=position, **counts, **more)


@pytest.mark.parametrize(
    ("log", "acked", "fault"),
    [
        ([asked(1), told(2, 1)], {3: (KEY, b"{}")}, "lost"),
        ([asked(1)], {}, "unanswered"),
        ([asked(1), told(2, 1), told(3, 1)], {}, "doubled"),
        ([asked(1), told(2, 1), told(3, 9)], {}, "contradicting"),
        ([asked(1), told(2, 1), asked(3), told(4, 3, 2, repeat_of=1)], {}, "contradicting"),
        ([asked(1), told(2, 1), asked(3, "b"), told(4, 3)], {}, "contradicting"),
        ([asked(1), told(2, 1, asked=having("b"))], {}, "contradicting"),
        (
            [
                asked(1),
                stored(2, "out", type="failed", id="r1", seq=1, code="internal", message="", retryable=True),
            ],
            {},
            "internal",
        ),
    ],
)
def test_the_oracle_finds_each_kind_of_fault_in_a_log(
    log: list[Any], acked: dict[int, Any], fault: str
) -> None:
    assert judge(log, acked).faults.most_common(1) == [(fault, 1)]


def test_a_request_that_only_its_result_still_has_is_not_lost() -> None:
    verdict = judge([told(2, 1, asked=having("a"))], {1: (KEY, asked(1).body)})
    assert (verdict.requests, verdict.answered, verdict.faults.total()) == (1, 1, 0)


def test_the_oracle_counts_received_results_and_chunks_that_contradict_the_log() -> None:
    heard = Heard()
    heard.results[KEY, 1].append(told(2, 1, position=7).body)
    heard.chunks[KEY, "r1"].append(decode_chunk(b'{"i": 0, "tokens": [5], "text": "x", "seq": 1}'))
    assert judge([asked(1), told(2, 1)], {}, heard).faults["contradicting"] == 2
