"""`bench many` against real workers: what it sees, what it catches, and how it is ended."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
from bench_runs import PATIENCE_S, check_death, check_interrupted, check_one_line, turnkeep, wait_for

from bench.corpus import built_in
from bench.old import report
from bench.old.many.measure import ManyBench
from bench.old.many.plan import KEPT_TURNS, Plan
from bench.old.many.summary import ManyReport
from bench.old.run import Run, Where
from worker.device import runner
from worker.device.admission import Ledger
from worker.sessions import history

if TYPE_CHECKING:
    from pathlib import Path

    from turnkeep_client.subjects import SessionKey
    from worker.device.admission import Claim

ANSWERED, STILL, REMEMBERED, LIMIT = range(4)
MIB = 2**20
NOBODY = "nats://127.0.0.1:1"


def plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "sessions": 16,
        "turns": 40,
        "duration_s": None,
        "room": 4,
        "in_flight": 8,
        "concurrency": 1,
        "skew": 1.1,
        "history": 4,
        "max_tokens": 4,
        "turn_timeout_s": 30.0,
        "seed": 0,
    }
    return Plan(**(fields | changes))


async def measure(worker: Any, wanted: Plan) -> ManyReport:
    where = Where(worker.settings.nats, worker.settings.prefix, "default")
    return await Run().conduct(ManyBench(wanted, built_in(), where))


async def test_more_sessions_than_fit_are_all_remembered_within_the_limit(local_worker):
    worker = await local_worker(max_memory=MIB, metrics_interval_s=0.1)
    found = await measure(worker, plan())
    assert [check.passed for check in found.checks if check.exact] == [True] * 4 + [None]
    summary = found.summary
    assert (summary.built, summary.answered, summary.asked_sessions) == (16, 40, 16)
    assert summary.max_memory_bytes == MIB
    assert {one.place for one in summary.places} == {"memory", "SSD"}
    assert summary.restored_bytes > 0
    assert summary.ssd_bytes_per_session > 0


async def test_a_popular_session_is_rewound_and_still_remembered(local_worker):
    worker = await local_worker()
    found = await measure(worker, plan(sessions=2, turns=16, concurrency=2))
    assert found.summary.rewinds >= 1
    assert [check.passed for check in found.checks if check.exact] == [True] * 4 + [None]


async def test_a_session_that_is_full_begins_anew_and_is_no_fault(local_worker):
    worker = await local_worker(max_context=360)
    found = await measure(worker, plan(sessions=3, turns=12))
    assert found.summary.rewinds >= 1
    assert found.summary.errors == {}
    assert found.summary.answered == 12


async def test_a_worker_that_forgets_a_session_is_caught(local_worker, monkeypatch):
    """Once all sessions are built, it answers one turn as if the session began with it."""
    extend, extended = history.Folder.extend, []
    before_turns = 4 * (1 + KEPT_TURNS) + 4  # those that size the sessions, and the four beginnings

    def forget(self: history.Folder, before: history.History, request: Any) -> Any:
        extended.append(before)
        if len(extended) == before_turns + 3:
            before = self.begin(before.conversation.started)
        return extend(self, before, request)

    monkeypatch.setattr(history.Folder, "extend", forget)
    worker = await local_worker()
    found = await measure(worker, plan(sessions=4, turns=8))
    assert len(found.summary.forgotten) == 1
    exact = [check.passed for check in found.checks if check.exact]
    assert exact == [True, True, False, True, None]


async def test_a_worker_that_lies_about_its_cache_is_caught(local_worker, monkeypatch, let_tokens_cost):
    """It prefills the whole session every turn, and reports what an honest one would."""
    begin = runner.Runner._begin

    def lie(self: runner.Runner, turn: Any) -> None:
        kept, turn.num_kept, turn.restored = max(turn.num_kept, turn.num_restored), 0, None
        begin(self, turn)
        turn.num_reused = kept
        turn.num_prefilled -= kept

    monkeypatch.setattr(runner.Runner, "_begin", lie)
    let_tokens_cost(1e-3)
    worker = await local_worker()
    found = await measure(worker, plan(sessions=8))
    assert found.checks[5].passed is False, found.checks[5].detail


async def test_a_worker_that_exceeds_its_memory_is_caught(local_worker, monkeypatch):
    """It never lets go of an idle session."""

    def hold(self: Ledger, claim: Claim, size_bytes: int) -> list[SessionKey]:
        self.forget(claim.key)
        self._reserved_bytes += size_bytes - self._reserved.pop(claim, 0)
        self._reserved[claim] = size_bytes
        return []

    monkeypatch.setattr(Ledger, "reserve", hold)
    worker = await local_worker(max_memory=MIB)
    found = await measure(worker, plan())
    assert found.summary.over_limit > 0
    exact = [check.passed for check in found.checks if check.exact]
    assert exact == [True, True, True, False, None]


@pytest.mark.process
def test_an_unreachable_worker_is_one_line(tmp_path: Path) -> None:
    check_one_line(
        turnkeep("many", "--smoke", "--nats", NOBODY, "--out", tmp_path), "no NATS server at", NOBODY
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_the_smoke_form_ends_well(tmp_path: Path, tiny_model: Path) -> None:
    process = turnkeep("many", "--smoke", "--out", tmp_path, model=tiny_model)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    found = report.read(next(tmp_path.glob("many-*.json")), ManyReport)
    assert found.complete
    assert [check.passed for check in found.checks if check.exact] == [True] * 5
    assert (found.summary.built, found.summary.answered) == (20, 40)
    assert f"report: {tmp_path}" in out
    page = next(tmp_path.glob("many-*.html")).read_text()
    assert page.count("<svg") == 6


@pytest.mark.process
def test_a_run_that_is_interrupted_keeps_its_report_and_leaves_no_process(
    tmp_path: Path, tiny_model: Path
) -> None:
    options = ("--corpus", "built-in", "--duration", 600, "--sessions", 12, "--checkpoint", 0.3)
    process = turnkeep("many", *options, "--max-tokens", 2, "--out", tmp_path, model=tiny_model)
    check_interrupted(process, wait_for(tmp_path, process, "turn, found in SSD"), signal.SIGTERM)


@pytest.mark.process
def test_a_worker_that_dies_ends_the_run_with_a_partial_report(tmp_path: Path, tiny_model: Path) -> None:
    options = ("--corpus", "built-in", "--sessions", 5000, "--checkpoint", 0.3)
    process = turnkeep("many", *options, "--max-tokens", 2, "--out", tmp_path, model=tiny_model)
    check_death(process, wait_for(tmp_path, process, "build"))
