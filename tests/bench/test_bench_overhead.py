"""`bench overhead`: what it makes of the sides' turns, what it sees, and how it is ended."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
from bench_runs import PATIENCE_S, turnkeep
from click.testing import CliRunner

from bench.baseline.messages import Chat, Tokens
from bench.baseline.process import running
from bench.cli import bench
from bench.old import report
from bench.old.overhead.checks import checks
from bench.old.overhead.cpu import Meter, of_process
from bench.old.overhead.measure import _compared, _Ran
from bench.old.overhead.page import page_of
from bench.old.overhead.sides import InProcess, Said, ThroughWorker
from bench.old.overhead.summary import OverheadReport, compare, series, summarise
from bench.old.overhead.turns import ALONE, BATCHED, WITHOUT_SNAPSHOTS, WORKER, Cpu, Row, Turn, agreeing
from bench.old.page import render
from worker.batch import batch

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


def made(side: str, *, rounds: int = 6, size: int = 2, slow: float = 1.0, **changes: Any) -> list[Turn]:
    """Turns of a side that takes `slow` times as long as others, with some noise of its own."""
    turns = []
    for number in range(1, rounds + 1):
        context = 0
        for turn in (1, 2):
            noise = 1 + 0.01 * ((number * 7 + turn * 3 + len(side)) % 5)
            through = side in {WORKER, WITHOUT_SNAPSHOTS}
            row = Row(
                prompt_tokens=20,
                tokens=11,
                first_s=0.1 * slow * noise,
                last_s=1.1 * slow * noise,
                agreeing=None if side == BATCHED else 11,
                cached_tokens=max(context - 1, 0) if through else None,
                prefilled_tokens=(20 + (1 if context else 0)) if through else None,
                context_tokens=context + 20 if through else None,
            )
            context += 31
            cpu = Cpu(process=1.0, loop=0.05 if through else None, server=0.01, client=0.01, idle=0.001)
            rows = (msgspec.structs.replace(row, **changes),) * size
            seconds = 1.2 * slow * noise
            turns.append(
                Turn(round=number, batch=size, side=side, turn=turn, seconds=seconds, rows=rows, cpu=cpu)
            )
    return turns


def passed(turns: list[Turn], *, same_library: bool | None = True) -> list[bool | None]:
    return [check.passed for check in checks(turns, same_library=same_library)]


def test_a_worker_that_is_as_fast_is_seen_so_and_one_that_is_slower_too() -> None:
    base = made(BATCHED)
    same = compare(2, WORKER, BATCHED, made(WORKER), base)
    assert same.rate.low <= 1 <= same.rate.high
    slow = compare(2, WORKER, BATCHED, made(WORKER, slow=1.25), base)
    assert slow.rate.high < 0.9
    assert slow.rate.median == pytest.approx(0.8, abs=0.03)
    assert slow.added_first_s.low > 0.015
    assert slow.added_per_token_s.median == pytest.approx(0.025, abs=0.005)


def test_only_turns_that_both_sides_have_are_compared() -> None:
    base = made(BATCHED, rounds=2)
    one = compare(2, WORKER, BATCHED, [*made(WORKER, rounds=2), *made(WORKER, rounds=9, slow=50)[4:]], base)
    assert one.rate.high < 1.1
    assert one.rate.low > 0.9
    assert compare(2, WORKER, BATCHED, [], base) is None


def test_each_side_is_summed_up_and_held_against_those_that_it_should_beat() -> None:
    turns = [
        *made(WORKER),
        *made(BATCHED),
        *made(WITHOUT_SNAPSHOTS),
        *made(ALONE, size=1),
        *made(WORKER, size=1),
    ]
    summary = summarise(turns)
    assert [(cost.batch, cost.side) for cost in summary.costs] == [
        (1, ALONE),
        (1, WORKER),
        (2, BATCHED),
        (2, WORKER),
        (2, WITHOUT_SNAPSHOTS),
    ]
    assert [(one.batch, one.side, one.base) for one in summary.compared] == [
        (1, WORKER, ALONE),
        (2, WORKER, BATCHED),
        (2, WORKER, WITHOUT_SNAPSHOTS),
        (2, WITHOUT_SNAPSHOTS, BATCHED),
    ]
    worker = summary.costs[3]
    assert worker.tokens == 6 * 2 * 2 * 11
    assert worker.loop_share.median == pytest.approx(0.05 / 1.2, rel=0.05)
    assert worker.process_cpu_s == pytest.approx(1 / 22)
    assert summary.costs[2].loop_share is None
    assert series(turns)["rate: worker, batch 2"].better == "higher"


def test_a_fair_comparison_passes_and_every_unfair_one_fails_its_check() -> None:
    fair = [*made(WORKER), *made(BATCHED)]
    assert passed(fair) == [True] * 6
    assert passed([], same_library=None) == [None] * 6
    assert passed(fair, same_library=False)[3] is False
    assert passed([*made(BATCHED), *made(WORKER, context_tokens=20)])[0] is False
    assert passed([*made(BATCHED), *made(WORKER, cached_tokens=1)])[1] is False
    assert passed([*made(BATCHED), *made(WORKER, prefilled_tokens=51)])[2] is False
    assert passed([*made(BATCHED), *made(WORKER, agreeing=5)])[5] is False
    busy = [msgspec.structs.replace(t, cpu=msgspec.structs.replace(t.cpu, idle=0.2)) for t in fair]
    assert passed(busy)[4] is False


def test_what_follows_an_answer_that_differs_is_not_held_against_the_other() -> None:
    def ran(*answers: tuple[int, ...]) -> list[_Ran]:
        meter = SimpleNamespace(read=lambda: Cpu(process=1, loop=None, server=0, client=0, idle=0))
        return [_Ran(1.0, [Said(answer, 0.1, 0.5)], meter) for answer in answers]  # type: ignore[arg-type]

    runs = {BATCHED: ran((1, 2, 3), (4, 5), (6,)), WORKER: ran((1, 2, 3), (4, 9), (7,))}
    turns = _compared(1, 1, [[(1,) * 5]] * 3, runs)
    assert [turn.rows[0].agreeing for turn in turns if turn.side == WORKER] == [3, 1, None]
    assert [turn.rows[0].agreeing for turn in turns if turn.side == BATCHED] == [None] * 3
    assert agreeing((1, 2), (1, 2, 3)) == 2


def test_a_page_is_made_of_a_whole_report_and_of_an_empty_one() -> None:
    from made_reports import make_report

    plain = msgspec.to_builtins(make_report())
    for turns in ((), (*made(WORKER), *made(BATCHED), *made(ALONE, size=1), *made(WORKER, size=1))):
        fields = {name: plain[name] for name in OverheadReport.__struct_fields__ if name in plain}
        fields |= {"schema": report.schema_of("overhead"), "checks": (), "series": {}}
        fields |= {"summary": msgspec.to_builtins(summarise(turns)), "turns": msgspec.to_builtins(turns)}
        page = render(page_of(msgspec.convert(fields, OverheadReport)), warn=print)
        assert page is not None
        assert page.count("<svg") == (5 if turns else 0)
    assert "worker against BatchGenerator, batch 2" in page


async def test_a_worker_that_was_slowed_down_is_seen_as_slower(
    local_worker: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real sides, in turns: 50 ms more a step must show in the ratio, not in what is said."""
    started = await local_worker()
    step = batch.Batch.step
    monkeypatch.setattr(batch.Batch, "step", lambda self, *a, **k: time.sleep(0.05) or step(self, *a, **k))
    worker: Any = SimpleNamespace(pid=os.getpid(), url=started.settings.nats, family=())
    async with running(tiny_model, preload=None) as baseline:
        chats = [Chat(f"Number {i}", "Why are there lighthouses?", first=True) for i in range(2)]
        prompts = [(await baseline.ask(chat, Tokens)).tokens for chat in chats]
        through = ThroughWorker(worker, snapshots=True, timeout_s=30, prefix=started.settings.prefix)
        runs: dict[str, list[_Ran]] = {}
        turns: list[Turn] = []
        for number in (1, 2, 3):
            for side in (InProcess(BATCHED, baseline), through):
                runs[side.name] = []
                async with side.sessions(2):
                    for _ in (1, 2):
                        meter = Meter(side.processes, [of_process(baseline.pid)])
                        runs[side.name].append(_Ran(*await side.turn(prompts, 8), meter))
                        await side.settle()
            turns += _compared(number, 2, [prompts, prompts], runs)
    (found,) = summarise(turns).compared
    assert found.rate.high < 1
    assert found.added_per_token_s.low > 0.02
    judged = checks(turns, same_library=None)
    assert [check.passed for check in judged[:3]] == [True] * 3
    assert judged[5].passed is True, judged[5].detail
    assert through.metrics.model == "tiny"


@pytest.mark.parametrize("value", ["", "0", "1,x", "64", "1,,2"])
def test_a_batch_size_that_is_none_is_refused_with_the_range(value: str) -> None:
    done = CliRunner().invoke(bench, ["overhead", "--batch", value])
    assert done.exit_code == 2
    assert "--batch" in done.stderr


@pytest.mark.process
def test_a_smoke_run_ends_well(tmp_path: Path, tiny_model: Path) -> None:
    process = turnkeep("overhead", "--smoke", "--model", tiny_model, "--out", tmp_path)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err
    found = report.read(next(tmp_path.glob("overhead-*.json")), OverheadReport)
    assert found.complete
    assert {(turn.batch, turn.side) for turn in found.turns} == {
        (1, ALONE),
        *((size, side) for size in (1, 2) for side in (BATCHED, WORKER, WITHOUT_SNAPSHOTS)),
    }
    assert found.settings["worker's BLAS"] == found.settings["baseline's BLAS"]
    assert next(tmp_path.glob("overhead-*.html")).read_text().count("<svg") == 5
    assert "BatchGenerator" in out


@pytest.mark.process
@pytest.mark.parametrize("how", ["interrupt", "baseline dies"])
def test_a_run_that_is_cut_short_keeps_its_report_and_leaves_no_process(
    tmp_path: Path, tiny_model: Path, how: str
) -> None:
    options = ("--model", tiny_model, "--corpus", "built-in", "--batch", "1", "--rounds", 10_000)
    process = turnkeep("overhead", *options, "--checkpoint", 0.3, "--out", tmp_path)
    path = wait_for_a_round(tmp_path, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 5  # two workers with their NATS servers, and the baseline
    if how == "interrupt":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    else:
        next(child for child in family if "bench.baseline" in child.cmdline()).kill()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (130 if how == "interrupt" else 1), err
    assert "Traceback" not in err
    assert "partial report: " in out
    if how != "interrupt":
        assert err.splitlines()[-1] == "turnkeep: the baseline process ended with exit code -9"
    found = report.read(path, OverheadReport)
    assert not found.complete
    assert found.turns
    assert psutil.wait_procs(family, timeout=10)[1] == []


def wait_for_a_round(folder: Path, process: subprocess.Popen[str]) -> Path:
    """Wait until a checkpoint has turns of all sides."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        for path in folder.glob("overhead-*.json"):
            if report.read(path, OverheadReport).turns:
                return path
        time.sleep(0.1)
    raise AssertionError("no checkpoint had a round")
