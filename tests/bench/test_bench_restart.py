"""`bench restart`: what it makes of the turns, whom it believes, and how it is ended."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
from bench_runs import PATIENCE_S, turnkeep
from click.testing import CliRunner

from bench.cli import bench
from bench.old import report
from bench.old.ask import ask
from bench.old.page import render
from bench.old.restart.checks import checks
from bench.old.restart.files import Files
from bench.old.restart.measure import Plan, shuffled
from bench.old.restart.page import page_of
from bench.old.restart.summary import RestartReport, series, summarise
from bench.old.restart.turns import COLD, KILL, KINDS, RESTART, SPILLED, WARM, Limit, Measured
from worker.device import runner

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

MIB = 2**20
FIRST_S = {WARM: 0.1, SPILLED: 0.3, RESTART: 0.4, KILL: 0.4, COLD: 4.1}
(
    LIVED,
    SAME_CONTEXT,
    PREFILLED,
    NOTHING_CACHED,
    EXACT_ANSWERS,
    ANSWERS,
    BELIEVED,
) = range(7)


def turn(number: int, length: int, kind: str, **changes: Any) -> Measured:
    """One turn as a worker in good health would give it."""
    noise = 1 + 0.01 * ((number * 7 + len(kind)) % 5)
    context = length + number * 32
    prefilled = context if kind == COLD else 17
    restored = kind in {SPILLED, RESTART, KILL}
    restarted = kind in {RESTART, KILL}
    fields: dict[str, Any] = {
        "round": number,
        "length": length,
        "kind": kind,
        "prompt_tokens": context,
        "own_tokens": 16,
        "cached_tokens": context - prefilled,
        "prefilled_tokens": prefilled,
        "first_s": FIRST_S[kind] * noise * (length / 1024 if kind == COLD else 1),
        "answer": (1, 2, number),
        "restored_bytes": 30 * MIB if restored else 0,
        "resident": {WARM: True, SPILLED: False}.get(kind),
        "felt_s": 3.0 if restarted else None,
        "down_s": 0.5 if restarted else None,
        "start_s": 2.0 if restarted else None,
        "limit": Limit(size_bytes=30 * MIB, seconds=0.05) if restored else None,
    }
    return Measured(**(fields | changes))


def made(changed: str = "", **changes: Any) -> list[Measured]:
    """Turns of three rounds and two lengths, those of one kind changed."""
    return [
        turn(number, length, kind, **(changes if kind == changed else {}))
        for number in (1, 2, 3)
        for length in (256, 1024)
        for kind in KINDS
    ]


def passed(turns: list[Measured]) -> list[bool | None]:
    return [check.passed for check in checks(turns, 128)]


def test_a_worker_in_good_health_passes_and_nothing_is_said_of_no_turns() -> None:
    assert passed(made()) == [True] * 7
    assert passed([]) == [None] * 7


@pytest.mark.parametrize(
    ("changed", "changes", "fails"),
    [
        (WARM, {"resident": False}, {LIVED}),
        (SPILLED, {"resident": True}, {LIVED}),
        (RESTART, {"prompt_tokens": 99}, {SAME_CONTEXT}),
        (WARM, {"prefilled_tokens": 18}, {PREFILLED}),
        (SPILLED, {"prefilled_tokens": 18}, {PREFILLED}),
        (KILL, {"prefilled_tokens": 17 + 128}, set()),
        (KILL, {"prefilled_tokens": 17 + 129}, {PREFILLED}),
        (RESTART, {"prefilled_tokens": 256}, {PREFILLED}),
        (COLD, {"cached_tokens": 32}, {NOTHING_CACHED}),
        (RESTART, {"answer": (1, 2, 9)}, {EXACT_ANSWERS, ANSWERS}),
        (KILL, {"answer": (1, 2, 9), "prefilled_tokens": 40}, {ANSWERS}),
        (COLD, {"answer": (1, 2, 9)}, {ANSWERS}),
    ],
)
def test_whatever_is_not_as_promised_fails_its_check(changed: str, changes: Any, fails: set[int]) -> None:
    assert {i for i, one in enumerate(passed(made(changed, **changes))) if one is False} == fails


def test_a_worker_that_lies_about_what_it_restored_is_caught_by_the_time_it_takes() -> None:
    """It prefills all, and reports 17 tokens: only the clock knows."""
    for kind in (SPILLED, RESTART, KILL):
        assert [i for i, one in enumerate(passed(made(kind, first_s=4.0))) if one is False] == [BELIEVED]
    honest = made(RESTART, first_s=4.0, prefilled_tokens=1000)
    assert passed(honest)[BELIEVED] is True
    assert passed(honest)[PREFILLED] is False
    assert passed(made(COLD, first_s=0.12))[BELIEVED] is None


async def test_a_real_worker_that_lies_about_what_it_restored_is_caught(
    local_worker: Any, monkeypatch: pytest.MonkeyPatch, let_tokens_cost: Callable[[float], None]
) -> None:
    """After its restart it gives away what it has restored, and reports it as cached."""
    begin = runner.Runner._begin

    def lie(self: runner.Runner, one: Any) -> None:
        kept, one.restored, one.num_kept = one.num_restored, None, 0
        begin(self, one)
        one.num_reused = kept
        one.num_prefilled -= kept

    let_tokens_cost(3e-4)
    base, own = tuple(random.Random(1).choices(range(10, 200), k=1900)), tuple(range(50, 66))
    worker = await local_worker()
    turns = []
    for number in (1, 2, 3):
        for kind in (WARM, RESTART, COLD):
            session = worker.client.session(f"{number}-{kind.split()[0]}")
            context = (number, *base) if kind != COLD else (number + 3, *base)
            if kind != COLD:
                await session.append(tokens=context)
            if kind == RESTART:
                await worker.stop()
                monkeypatch.setattr(runner.Runner, "_begin", lie)
                worker = await local_worker()
                session = worker.client.session(session.key.session)
            asked = await ask(
                session, timeout_s=30, tokens=own if kind != COLD else (*context, *own), max_tokens=2
            )
            monkeypatch.setattr(runner.Runner, "_begin", begin)
            usage = asked.result.usage
            turns.append(
                turn(
                    number,
                    len(base),
                    kind,
                    prompt_tokens=usage.prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    prefilled_tokens=usage.prefilled_tokens,
                    first_s=asked.first_chunk_s,
                )
            )
    found = checks(turns, 128)
    assert found[PREFILLED].passed is True
    assert found[BELIEVED].passed is False, found[BELIEVED].detail


def test_the_summary_tells_each_kind_apart() -> None:
    lives = {(life.length, life.kind): life for life in summarise(made()).lives}
    assert [kind for length, kind in lives if length == 256] == list(KINDS)
    spilled = lives[1024, SPILLED]
    assert spilled.restore_rate.median == pytest.approx(30 * MIB / 0.2, rel=0.1)
    assert spilled.limit_rate.median == pytest.approx(30 * MIB / 0.05)
    assert spilled.of_limit == pytest.approx(0.25, rel=0.1)
    assert spilled.added_s.median == pytest.approx(0.2, rel=0.1)
    assert spilled.of_cold.median == pytest.approx(0.3 / 4.1, rel=0.1)
    assert spilled.felt_s is None
    assert lives[1024, RESTART].felt_s.median == 3.0
    assert lives[1024, WARM].restore_rate is None
    assert lives[1024, COLD].of_cold.median == 1
    assert "first token: kill -9, 256 tokens" in series(made())
    faster = summarise(made(SPILLED, first_s=0.05)).lives  # than the warm one: no rate can be told
    assert next(life for life in faster if life.kind == SPILLED).restore_rate is None
    assert next(life for life in faster if life.kind == SPILLED).added_s.high < 0


def test_a_cold_session_is_never_measured_before_the_warm_one() -> None:
    order = random.Random(3)
    found = [shuffled(order) for _ in range(200)]
    assert all(sorted(kinds) == sorted(KINDS) for kinds in found)
    assert all(kinds.index(WARM) < kinds.index(COLD) for kinds in found)
    assert {kinds[0] for kinds in found} == {WARM, SPILLED, RESTART, KILL}


def test_the_longest_session_has_room_for_all_rounds() -> None:
    plan = Plan((256, 512), 3, 16, 8, from_disk=False, timeout_s=1, seed=0)
    assert plan.context_tokens >= 512 + 3 * 2 * (16 + 8)


def test_files_belong_to_who_was_there_as_they_appeared(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "snapshots"
    folder.mkdir(parents=True)
    files = Files(tmp_path)
    for owner in ("a", "b", "a"):
        (folder / f"{owner}{len(list(folder.iterdir()))}.safetensors").write_text("x")
        files.claim(owner)
    (folder / "a0.safetensors").unlink()
    with files.held("a") as held:
        (folder / "a2.safetensors").unlink()
        assert [path.name for path in held] == ["a2.safetensors"]
        assert held[0].read_text() == "x"
    with files.held("b") as held:
        assert [path.name for path in held] == ["b1.safetensors"]
    assert list(tmp_path.glob("held-*")) == []


def test_a_page_is_made_of_a_whole_report_and_of_an_empty_one() -> None:
    from made_reports import make_report

    plain = msgspec.to_builtins(make_report())
    for turns in ([], made()):
        fields = {name: plain[name] for name in RestartReport.__struct_fields__ if name in plain}
        fields |= {"schema": report.schema_of("restart"), "checks": (), "series": {}}
        fields |= {"summary": msgspec.to_builtins(summarise(turns)), "turns": msgspec.to_builtins(turns)}
        page = render(page_of(msgspec.convert(fields, RestartReport)), warn=print)
        assert page is not None
        assert page.count("<svg") == (4 if turns else 0)
    assert "1,024 tokens, kill -9" in page


def test_lengths_that_are_none_are_refused() -> None:
    done = CliRunner().invoke(bench, ["restart", "--tokens", "256,many"])
    assert done.exit_code == 2
    assert "--tokens" in done.stderr


@pytest.mark.process
def test_a_smoke_run_ends_well(tmp_path: Path, tiny_model: Path) -> None:
    process = turnkeep("restart", "--smoke", "--from-disk", "--model", tiny_model, "--out", tmp_path)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err
    found = report.read(next(tmp_path.glob("restart-*.json")), RestartReport)
    assert found.complete
    assert sorted(one.kind for one in found.turns) == sorted(KINDS)
    assert all(one.restored_bytes > 0 for one in found.turns if one.kind in {SPILLED, RESTART, KILL})
    assert all(one.limit.size_bytes > 0 for one in found.turns if one.kind in {SPILLED, RESTART, KILL})
    assert [check.passed for check in found.checks if check.exact] == [True] * 5
    assert next(tmp_path.glob("restart-*.html")).read_text().count("<svg") == 4
    assert "kill -9" in out


@pytest.mark.process
def test_a_session_that_does_not_fit_the_model_is_one_line(tmp_path: Path, tiny_model: Path) -> None:
    process = turnkeep(
        "restart", "--tokens", 5000, "--corpus", "built-in", "--model", tiny_model, "--out", tmp_path
    )
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert err.startswith("turnkeep: ")
    assert err.count("\n") == 1, err
    assert "the context is 2048" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_an_interrupt_while_the_worker_is_down_leaves_no_process(tmp_path: Path, tiny_model: Path) -> None:
    options = ("--tokens", 256, "--rounds", 20, "--corpus", "built-in", "--checkpoint", 0.1)
    process = turnkeep("restart", *options, "--model", tiny_model, "--out", tmp_path)
    path = wait_for_a_restart(tmp_path, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2  # the baseline, and a NATS server at least
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "partial report: " in out
    assert not report.read(path, RestartReport).complete
    assert psutil.wait_procs(family, timeout=10)[1] == []


def wait_for_a_restart(folder: Path, process: subprocess.Popen[str]) -> Path:
    """Wait until a turn was measured and a worker has been started anew, or is about to be."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        for path in folder.glob("restart-*.json"):
            if any(one.kind in {RESTART, KILL} for one in report.read(path, RestartReport).turns):
                return path
        time.sleep(0.1)
    raise AssertionError("no checkpoint had a restart")
