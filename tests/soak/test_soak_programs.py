"""Short runs of the programs in this folder, and tests that their oracle (`judge`) finds faults."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from attack import attack
from cluster import campaign
from day import play
from harness import Heard, SessionKey, judge
from one_session import converse
from restores import campaign as restore_campaign

from cache.disk.format import _OpenSnapshot
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


async def test_answers_about_images_are_the_same_with_and_without_faults_of_worker_and_server(
    tmp_path: Path,
) -> None:
    run, verdict = await campaign(
        tmp_path, workers=2, nodes=1, requests=0, faults=3, share=False, cuts=False, seed=1, images=10
    )
    assert (run.struck.total(), run.sent) == (3, 22)
    assert verdict.answered == verdict.requests > 22
    assert not verdict.faults.total(), verdict.notes


async def test_a_short_soak_run_with_restarts_and_model_changes_answers_every_request_and_finds_no_fault(
    tmp_path: Path,
) -> None:
    day, verdict = await play(tmp_path, requests=80, sessions=16, seed=1)
    assert (day.struck["restart"], day.struck["exchange"], len(day.rows)) == (2, 2, 10)
    assert verdict.answered == verdict.requests > 20
    assert not verdict.faults.total(), verdict.notes


def test_a_soak_program_ended_by_sigterm_leaves_no_process_and_prints_where_its_files_are(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(Path(__file__).with_name("day.py"))]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert running.stdout is not None
    assert running.stdout.readline(), "its workers serve"
    left = psutil.Process(running.pid).children(recursive=True)
    assert len(left) > 2
    running.terminate()
    try:
        _, said = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 128 + signal.SIGTERM
    assert f"what is left of the run is in {tmp_path}" in said.decode()
    _, alive = psutil.wait_procs(left, timeout=10)
    for one in alive:
        one.kill()
    assert not alive


async def test_all_turns_of_a_long_session_are_answered_although_its_worker_is_killed(
    tmp_path: Path,
) -> None:
    rows = await converse(tmp_path, 20)
    assert [row.split()[0] for row in rows] == ["2", "a", *map(str, range(4, 21, 2)), "a"]


async def test_no_restore_returns_wrong_kv_after_random_damage_to_the_cache_files(tmp_path: Path) -> None:
    kinds = ("llama", "gemma3_text", "qwen3_next")
    verdict = await restore_campaign(tmp_path, restores=1200, seed=1, kinds=kinds)
    assert verdict.wrong == []
    assert verdict.put == verdict.found
    assert len(verdict.put) == 7


async def test_the_soak_program_for_restores_detects_a_restore_of_wrong_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_OpenSnapshot, "check", lambda *_: None)  # a file may have any name
    verdict = await restore_campaign(tmp_path, restores=300, seed=1, kinds=("llama",))
    assert verdict.wrong


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


FAILED = {"type": "failed", "id": "r1", "seq": 1, "code": "internal", "message": "", "retryable": True}
FAULTY: dict[str, tuple[list[Any], dict[int, Any], str]] = {
    "acknowledged request is not in the log": ([asked(1), told(2, 1)], {3: (KEY, b"{}")}, "lost"),
    "request without result": ([asked(1)], {}, "unanswered"),
    "two results of a request": ([asked(1), told(2, 1), told(3, 1)], {}, "doubled"),
    "result of no request": ([asked(1), told(2, 1), told(3, 9)], {}, "contradicting"),
    "repeat with another position": (
        [asked(1), told(2, 1), asked(3), told(4, 3, 2, repeat_of=1)],
        {},
        "contradicting",
    ),
    "reused id is not refused": ([asked(1), told(2, 1), asked(3, "b"), told(4, 3)], {}, "contradicting"),
    "result quotes another request": ([asked(1), told(2, 1, asked=having("b"))], {}, "contradicting"),
    "internal error": ([asked(1), stored(2, "out", **FAILED)], {}, "internal"),
}


@pytest.mark.parametrize(("log", "acked", "fault"), FAULTY.values(), ids=FAULTY)
def test_the_soak_judge_finds_lost_unanswered_doubled_and_contradicting_results_in_a_log(
    log: list[Any], acked: dict[int, Any], fault: str
) -> None:
    assert judge(log, acked).faults.most_common(1) == [(fault, 1)]


def test_the_soak_judge_does_not_report_a_request_as_lost_if_its_result_still_contains_the_request() -> None:
    verdict = judge([told(2, 1, asked=having("a"))], {1: (KEY, asked(1).body)})
    assert (verdict.requests, verdict.answered, verdict.faults.total()) == (1, 1, 0)


def test_the_soak_judge_reports_received_results_and_chunks_that_contradict_the_log() -> None:
    heard = Heard()
    heard.results[KEY, 1].append(told(2, 1, position=7).body)
    heard.chunks[KEY, "r1"].append(decode_chunk(b'{"i": 0, "tokens": [5], "text": "x", "seq": 1}'))
    assert judge([asked(1), told(2, 1)], {}, heard).faults["contradicting"] == 2
