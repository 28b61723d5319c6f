"""`bench replay` with real workers: what is the same is seen as the same, and what differs as such."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
from bench_runs import PATIENCE_S, turnkeep
from click.testing import CliRunner

from bench.corpus import built_in
from bench.faults import BenchError
from bench.old import report
from bench.old.replay import recording
from bench.old.replay.measure import Log, ReplayBench
from bench.old.replay.player import How, Player
from bench.old.replay.record import Record, Step, fold
from bench.old.replay.summary import ReplayReport, checks, summarise
from bench.old.replay.turns import first_difference
from bench.old.run import Run, Where
from turnkeep_client.client import connect
from turnkeep_client.log import Entry, derived_seed
from turnkeep_client.messages import Generate, encode
from turnkeep_client.subjects import SessionKey
from worker.batch import batch
from worker.commands.cli import main

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from turnkeep_client.client import Client

KEY = SessionKey("default", "s")
NOBODY = "nats://127.0.0.1:1"


def how(pace: float = 0.0, *, force: bool = False) -> How:
    return How(pace, force, 30.0)


@pytest.fixture
def other_model(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with other weights and the same tokenizer."""
    import mlx.core as mx

    folder = tmp_path / "other"
    shutil.copytree(tiny_model, folder)
    weights = mx.load(str(folder / "model.safetensors"))
    mx.random.seed(8)
    changed = {name: mx.random.normal(array.shape) * 0.3 for name, array in weights.items()}
    mx.eval(changed)
    mx.save_safetensors(str(folder / "model.safetensors"), changed, metadata={"format": "mlx"})
    return folder


async def make_record(client: Client, sessions: int = 4, turns: int = 3) -> Record:
    await recording.record(
        client,
        built_in(),
        sessions=sessions,
        turns=turns,
        max_tokens=6,
        turn_timeout_s=30,
        on_turn=lambda what: None,
    )
    return fold(await client.log())


async def play(client: Client, record: Record, wanted: How) -> Player:
    player = Player(client, wanted, f"{time.monotonic_ns()}", lambda what: None)
    await player.play(record)
    return player


async def test_the_same_model_gives_the_same_tokens_sampled_ones_too(local_worker):
    """At the recorded pace and without one; every second session samples and names no seed."""
    worker = await local_worker()
    record = await make_record(worker.client)
    assert (len(record.sessions), record.num_steps, record.left_out) == (4, 16, {})
    async with await connect(worker.settings.nats, prefix=worker.settings.prefix, tenant="other") as client:
        for pace in (0.0, 1.0):
            player = await play(client, record, how(pace))
            summary = summarise(player.played)
            assert (summary.comparable, summary.equal, summary.errors) == (12, 12, {})
            assert (summary.sampled_comparable, summary.sampled_equal) == (6, 6)
            assert all(check.passed for check in checks(summary, same_model=True))
            assert {row.measure: row.pairs for row in summary.beside}["turnaround in the log"] == 16
            assert player.models == set(record.models)


async def test_a_seed_that_is_not_derived_draws_other_tokens(local_worker):
    """So the test above would fail if the seed were not the recorded one."""

    def reseeded(step: Step) -> Step:
        if not isinstance(step.request, Generate):
            return step
        return replace(step, request=msgspec.structs.replace(step.request, seed=1))

    worker = await local_worker()
    record = await make_record(worker.client)
    sessions = tuple(replace(one, steps=tuple(map(reseeded, one.steps))) for one in record.sessions)
    summary = summarise((await play(worker.client, replace(record, sessions=sessions), how())).played)
    assert summary.sampled_equal < summary.sampled_comparable
    assert summary.equal - summary.sampled_equal == 6  # greedy ones draw nothing


async def test_another_model_differs_at_its_first_token_and_force_compares_every_turn(
    local_worker, other_model: Path, tmp_path: Path
):
    worker = await local_worker()
    record = await make_record(worker.client, sessions=2)
    await worker.stop()
    other = await local_worker(
        model=str(other_model), prefix=f"o{time.monotonic_ns()}", data_dir=tmp_path / "other-data"
    )
    summary = summarise((await play(other.client, record, how())).played)
    assert summary.errors == {}
    assert (summary.answers, summary.comparable, summary.equal) == (6, 2, 0)
    assert summary.standings == {"comparable": 2, "after a difference": 4}
    assert 0 in summary.first_differences
    assert checks(summary, same_model=False)[1].passed is None
    assert checks(summary, same_model=True)[1].passed is False

    forced = await play(other.client, record, how(force=True))
    summary = summarise(forced.played)
    assert summary.errors == {}
    assert summary.forced == 6
    # The random model's answers are no UTF-8: as text they come back as other tokens, which is noticed.
    assert set(summary.standings) <= {"comparable", "other context"}
    assert summary.comparable >= 2


async def test_a_forced_session_of_tokens_has_the_recorded_context_at_every_turn(
    local_worker, other_model: Path, tmp_path: Path
):
    worker = await local_worker()
    session = worker.client.session("raw")
    for number in range(4):
        await session.generate(tokens=[10 + number, 20, 30], max_tokens=3)
    record = fold(await worker.client.log("raw"))
    await worker.stop()
    other = await local_worker(
        model=str(other_model), prefix=f"o{time.monotonic_ns()}", data_dir=tmp_path / "other-data"
    )
    summary = summarise((await play(other.client, record, how(force=True))).played)
    assert (summary.answers, summary.comparable, summary.errors) == (4, 4, {})
    assert summary.equal < 4


async def test_a_worker_that_was_slowed_down_is_seen_as_slower(local_worker, monkeypatch):
    worker = await local_worker()
    record = await make_record(worker.client)
    step = batch.Batch.step
    monkeypatch.setattr(batch.Batch, "step", lambda self, *a, **k: time.sleep(0.05) or step(self, *a, **k))
    found = {row.measure: row for row in summarise((await play(worker.client, record, how())).played).beside}
    assert found["time per token"].low > 1
    assert found["whole generate"].low > 1


async def test_the_pace_is_kept_and_scaled(local_worker):
    worker = await local_worker()
    session = worker.client.session("paced")
    for _ in range(3):
        await session.append(text="a")
        await asyncio.sleep(0.4)
    record = fold(await worker.client.log("paced"))
    starts = {}
    for pace in (1.0, 4.0, 0.0):
        played = (await play(worker.client, record, how(pace))).played
        starts[pace] = played[-1].sent_s - played[0].sent_s
    assert starts[1.0] >= 0.7
    assert starts[0.0] <= starts[4.0] < 0.6


async def test_rewinds_and_cancelled_answers_are_played_again(local_worker):
    worker = await local_worker()
    session = worker.client.session("s")
    first = await session.generate(tokens=[7, 8, 9], max_tokens=4)
    running = session.generate(tokens=[5], max_tokens=1500, request_id="long")
    async for _ in running:
        await running.cancel()
        break
    cancelled = await running
    assert cancelled.finish_reason == "cancelled"
    await session.rewind(first.position)
    await session.generate(tokens=[6], max_tokens=4)
    await session.close()
    record = fold(await worker.client.log("s"))
    assert [step.request.id for step in record.sessions[0].steps][1] == "long"
    summary = summarise((await play(worker.client, record, how())).played)
    assert (summary.requests, summary.comparable, summary.equal, summary.errors) == (5, 3, 3, {})


async def test_a_request_that_is_refused_is_counted(local_worker):
    worker = await local_worker()
    record = await make_record(worker.client, sessions=1)
    await worker.stop()
    small = await local_worker(max_context=60, prefix=f"o{time.monotonic_ns()}")
    player = await play(small.client, record, how())
    summary = summarise(player.played)
    assert set(summary.errors) == {"context_exceeded"}
    assert "the context is 60" in player.messages["context_exceeded"]
    assert checks(summary, same_model=True)[0].passed is False


def entry(seq: int, kind: Any, body: dict[str, Any], at_s: float, session: str = "s") -> Entry:
    stored = datetime(2026, 11, 20, tzinfo=UTC) + timedelta(seconds=at_s)
    return Entry(seq, SessionKey("default", session), kind, stored, encode(body), "m", "d")


def test_what_changed_nothing_is_left_out_and_the_rest_keeps_its_times() -> None:
    def appended(seq: int, **more: Any) -> dict[str, Any]:
        return {
            "type": "appended",
            "id": "x",
            "seq": seq,
            "position": 1,
            "tokens": 1,
            "cached_tokens": 0,
            "prefilled_tokens": 1,
            "kv_live_bytes": 1,
            "seconds": 0.1,
            **more,
        }

    append = {"type": "append", "id": "a", "text": "x"}
    refused = {"type": "failed", "id": "x", "seq": 7, "code": "expired", "message": "", "retryable": True}
    record = fold(
        [
            entry(1, "in", append, 10),
            entry(2, "in", {**append, "id": "b", "expect_position": 3}, 11),
            entry(3, "out", appended(1), 12),
            entry(4, "out", appended(2), 13),
            entry(5, "in", append, 14),
            entry(6, "out", appended(5, repeat_of=1), 15),
            entry(7, "in", {**append, "id": "c"}, 16),
            entry(8, "out", refused, 17),
            entry(9, "in", {**append, "id": "d"}, 18),
            entry(10, "in", {"type": "no"}, 19),
            entry(11, "in", {**append, "id": "e"}, 12.5, "t"),
            entry(12, "out", appended(11), 14),
            entry(13, "out", appended(11), 14, "t"),
        ]
    )
    assert record.left_out == {"repeated": 1, "refused": 1, "not answered": 1, "no valid request": 1}
    first, second = record.sessions
    assert [(s.asked_s, s.answered_s, s.waits) for s in first.steps] == [(0, 2, False), (1, 3, False)]
    assert first.steps[1].request.expect_position is None
    assert [(s.asked_s, s.answered_s) for s in second.steps] == [(2.5, 4)]
    assert record.num_at_once == 2
    assert record.models == ("m",)


def test_a_first_difference_is_where_one_answer_leaves_the_other() -> None:
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 9, 3)) == 1
    assert first_difference((1, 2, 3), (1, 2)) == 2
    assert first_difference((), (5,)) == 0


def test_a_derived_seed_depends_on_the_session_and_the_place() -> None:
    seeds = {derived_seed(KEY, 1), derived_seed(KEY, 2), derived_seed(SessionKey("default", "t"), 1)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**56 for seed in seeds)


def one_line(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["bench", "replay", *arguments])
    assert done.exit_code in (1, 2)
    return done.stderr


def test_bad_input_is_one_line() -> None:
    assert one_line("--nats", NOBODY).startswith("turnkeep: the record cannot be read: no NATS server at")
    assert "--session names what" in one_line("--session", "s")
    assert "not for --target-nats" in one_line("--target-nats", NOBODY, "--serve", "--max-batch 2")
    assert "say nothing" in one_line("--nats", NOBODY, "--corpus", "built-in")


async def test_an_empty_log_is_one_line(local_worker):
    worker = await local_worker()
    assert worker.settings.nats
    log = Log(worker.settings.nats, worker.settings.prefix, "nobody", ())
    with pytest.raises(BenchError, match="nothing to replay: the log holds no answered request of the"):
        await Run().conduct(ReplayBench(log, how(), Where(), ()))


@pytest.mark.process
def test_a_smoke_run_records_and_replays_by_itself(tmp_path: Path, tiny_model: Path) -> None:
    process = turnkeep(
        "replay", "--smoke", "--serve", "--max-batch 2", "--out", tmp_path, "--model", tiny_model
    )
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    found = report.read(next(tmp_path.glob("replay-*.json")), ReplayReport)
    assert found.complete
    assert (found.recorded_sessions, found.recorded_requests) == (3, 9)
    assert found.summary.comparable == found.summary.equal == 6
    assert found.serve == "--max-batch 2"
    assert found.recorded_models == found.replayed_models == ("tiny",)
    assert "6 of 6 comparable answers are equal" in out
    assert next(tmp_path.glob("replay-*.html")).read_text().count("<svg") == 6


@pytest.mark.process
def test_ctrl_c_keeps_the_report_and_leaves_no_process(tmp_path: Path, tiny_model: Path) -> None:
    options = ("--corpus", "built-in", "--record-sessions", 2, "--record-turns", 3, "--pace", 0.02)
    process = turnkeep("replay", *options, "--checkpoint", 0.2, "--out", tmp_path, "--model", tiny_model)
    path = wait_for_report(tmp_path, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "partial report: " in out
    found = report.read(path, ReplayReport)
    assert (found.complete, found.ending) == (False, "interrupted")
    assert 1 <= len(found.played) < found.recorded_requests == 8
    assert psutil.wait_procs(family, timeout=10)[1] == []


def wait_for_report(folder: Path, process: subprocess.Popen[str]) -> Path:
    """Wait until the replay has begun to be answered: the record is read by then."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        for path in folder.glob("replay-*.json"):
            if report.read(path, ReplayReport).recorded_requests:
                return path
        time.sleep(0.1)
    raise AssertionError("no checkpoint had a record")
