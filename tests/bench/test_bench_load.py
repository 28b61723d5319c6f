"""`bench load` against real workers: what it sees, what it catches, and how it is ended."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from bench_runs import PATIENCE_S, check_death, check_interrupted, check_one_line, turnkeep, wait_for
from click.testing import CliRunner

from bench.corpus import built_in
from bench.faults import BenchError
from bench.old import report, stats
from bench.old.load.measure import LoadBench
from bench.old.load.plan import Level, Plan
from bench.old.load.summary import LoadReport
from bench.old.run import Run, Where
from worker.batch import batch
from worker.commands.cli import main
from worker.device import runner

if TYPE_CHECKING:
    from pathlib import Path

ONE = (Level("closed", 1),)
NOBODY = "nats://127.0.0.1:1"


def plan(levels: tuple[Level, ...] = ONE, **changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "levels": levels,
        "sessions": 4,
        "turns": 3,
        "history": 3,
        "max_tokens": 4,
        "duration_s": 1.0,
        "long_prompt": None,
        "rounds": 1,
        "pause_s": 0.1,
        "answer_tokens": 32,
        "turn_timeout_s": 30.0,
        "seed": 0,
    }
    return Plan(**(fields | changes))


async def measure(worker: Any, wanted: Plan) -> LoadReport:
    where = Where(worker.settings.nats, worker.settings.prefix, "default")
    return await Run().conduct(LoadBench(wanted, built_in(), where))


async def test_closed_and_open_loops_keep_every_promise_that_counts(local_worker):
    worker = await local_worker(metrics_interval_s=0.1)
    levels = (Level("closed", 1), Level("closed", 4), Level("poisson", 8.0))
    found = await measure(worker, plan(levels, long_prompt=200))
    assert [check.passed for check in found.checks if check.exact] == [True] * 3
    one, four, opened = found.levels
    assert one.turns == four.turns == one.answered == four.answered == 12
    assert opened.answered == opened.turns > 0
    assert one.generated.mean > 0
    assert one.fairness.sessions >= 2
    assert opened.lateness is not None
    assert found.stall.tokens == pytest.approx(200, rel=0.2)
    assert found.stall.alone.count > 0
    assert len(found.readings) > 2
    assert all(reading.worker == "test" for reading in found.readings)
    async for metrics in worker.client.metrics():
        # Those of the levels, and the few beside the long prompt.
        assert metrics.requests["close"]["ok"] >= len({(turn.level, turn.session) for turn in found.turns})
        break


async def test_turns_of_a_session_are_in_order_and_histories_differ(local_worker):
    worker = await local_worker()
    found = await measure(worker, plan((Level("closed", 4),), history=3))
    beginnings = set()
    for session in range(4):
        turns = [turn for turn in found.turns if turn.session == session]
        numbers = [turn.turn for turn in turns]
        assert numbers == sorted(numbers)
        positions = [turn.answer.position for turn in turns]
        assert [turn.answer.position_before for turn in turns] == [0, *positions[:-1]]
        beginnings.add(next(turn.answer.position_before for turn in turns if turn.turn == 1))
    assert len(beginnings) == 4


async def test_a_worker_that_was_slowed_down_is_seen_as_slower(local_worker, monkeypatch):
    worker = await local_worker()
    base = await measure(worker, plan())
    step = batch.Batch.step
    monkeypatch.setattr(batch.Batch, "step", lambda self, *a, **k: time.sleep(0.03) or step(self, *a, **k))
    other = await measure(worker, plan())
    for name in ("whole turn, 1 at a time", "per token, 1 at a time"):
        assert stats.median_ratio(base.series[name].values, other.series[name].values).low > 1, name
    name = "generated, 1 at a time"
    assert stats.median_ratio(base.series[name].values, other.series[name].values).high < 1


async def test_a_worker_that_lies_about_its_cache_is_caught(local_worker, monkeypatch, let_tokens_cost):
    """It prefills the whole session every turn, and reports what an honest one would."""
    begin = runner.Runner._begin

    def lie(self: runner.Runner, turn: Any) -> None:
        kept, turn.num_kept, turn.restored = max(turn.num_kept, turn.num_restored), 0, None
        begin(self, turn)
        turn.num_reused = kept
        turn.num_prefilled -= kept

    monkeypatch.setattr(runner.Runner, "_begin", lie)
    let_tokens_cost(3e-4)
    worker = await local_worker()
    found = await measure(worker, plan(sessions=8, turns=4, history=14))
    assert [check.passed for check in found.checks if check.exact] == [True] * 3
    assert found.checks[3].passed is False, found.checks[3].detail


async def test_a_worker_that_hangs_costs_a_turn_its_time_and_counts_as_an_error(local_worker, monkeypatch):
    worker = await local_worker()
    held = batch.Batch.step
    monkeypatch.setattr(batch.Batch, "step", lambda self, *a, **k: time.sleep(0.4) or held(self, *a, **k))
    found = await measure(worker, plan(sessions=1, turns=2, history=0, turn_timeout_s=0.3))
    assert found.levels[0].errors == {"timeout": 2}
    assert "was not answered within" in found.messages["timeout"]
    assert found.checks[0].passed is False


async def test_a_long_prompt_that_does_not_fit_is_one_line(local_worker):
    worker = await local_worker(max_context=700)
    with pytest.raises(BenchError, match=r"the long prompt was refused: .*; lower --long-prompt"):
        await measure(worker, plan(sessions=1, turns=1, long_prompt=5000))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--concurrency", "0"), "above 0, joined by commas"),
        (("--concurrency", "1,x"), "must be whole numbers above 0"),
        (("--rate", "inf"), "must be numbers above 0"),
        (("--arrivals", "recorded", "--rate", "1"), "recorded arrivals have a --pace"),
        (("--arrivals", "recorded", "--corpus", "built-in", "--nats", NOBODY), "no NATS server"),
    ],
)
def test_options_that_make_no_load_are_told(options: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(main, ["bench", "load", *options])
    assert done.exit_code != 0
    assert says in done.stderr


@pytest.mark.process
def test_an_unreachable_worker_is_one_line(tmp_path: Path) -> None:
    check_one_line(
        turnkeep("load", "--smoke", "--nats", NOBODY, "--out", tmp_path), "no NATS server at", NOBODY
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_the_smoke_form_ends_well(tmp_path: Path, tiny_model: Path) -> None:
    process = turnkeep("load", "--smoke", "--out", tmp_path, model=tiny_model)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    found = report.read(next(tmp_path.glob("load-*.json")), LoadReport)
    assert found.complete
    assert [level.name for level in found.levels] == ["1 at a time", "4 at a time", "2 a second"]
    assert found.stall is not None
    assert f"report: {tmp_path}" in out
    page = next(tmp_path.glob("load-*.html")).read_text()
    assert page.count("<svg") >= 7
    assert "Throughput against concurrency" in page


@pytest.mark.process
def test_a_run_that_is_interrupted_keeps_its_report_and_leaves_no_process(
    tmp_path: Path, tiny_model: Path
) -> None:
    options = ("--corpus", "built-in", "--concurrency", 4, "--turns", 10_000, "--checkpoint", 0.3)
    process = turnkeep(
        "load", *options, "--max-tokens", 2, "--history", 0, "--out", tmp_path, model=tiny_model
    )
    check_interrupted(process, wait_for(tmp_path, process, "whole turn, 4 at a time"), signal.SIGINT)


@pytest.mark.process
def test_a_worker_that_dies_ends_the_run_with_a_partial_report(tmp_path: Path, tiny_model: Path) -> None:
    """Although every turn would be waited for much longer."""
    options = ("--corpus", "built-in", "--concurrency", 4, "--turns", 10_000, "--checkpoint", 0.3)
    process = turnkeep(
        "load", *options, "--max-tokens", 2, "--history", 0, "--out", tmp_path, model=tiny_model
    )
    check_death(process, wait_for(tmp_path, process, "whole turn, 4 at a time"))
