"""The core of all benches: plans, reports on the disk, pages, comparisons."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import lies_restart
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure
from msgspec.structs import replace

from bench import compare, plan, plots, report, session, stats
from bench.checks import Check, Verdict, judged
from bench.cli import bench, command
from bench.faults import BenchError, ReportError
from bench.figures import interval, number
from bench.local import LocalWorker
from bench.page import render
from bench.plan import Option, Where
from bench.report import Report, ReportFile
from bench.restart import BENCH, COLD, FIRST, KILL, RESTART, SPILLED, WARM
from bench.run import Run, conduct
from bench.spec import Findings, Plot, Turn
from bench.stats import Estimate

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS = plan.settings(lies_restart.PLAN)


def make_report(turns: list[Turn] | None = None, **changes: object) -> Report:
    fields = {
        "schema": report.schema_of("restart"),
        "started_at": "2026-11-20T08:00:00+00:00",
        "elapsed_s": 360.0,
        "complete": True,
        "ending": "done",
        "target": "a worker of its own",
        "environment": replace(report.describe(), load_average=(0.1, 0.1, 0.1), commit=None),
        "load_after": (0.2, 0.1, 0.1),
        "worker": None,
        "source": None,
        "plan": SETTINGS,
        "turns": tuple(lies_restart.honest(1)[0] if turns is None else turns),
    }
    return Report(**(fields | changes))


def files(folder: Path, pattern: str = "*") -> list[Path]:
    return list(folder.glob(pattern))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Something is measured."""

    sizes: Annotated[tuple[int, ...], Option("Sizes.", smoke=(1,))] = (4, 8)
    rounds: Annotated[int, Option("Rounds.", smoke=1)] = 5
    pace: Annotated[float | None, Option("How fast.")] = None
    cold: Annotated[bool, Option("From the disk.")] = False


def plan_of(*arguments: str) -> Plan:
    made = []

    def take(smoke: bool, **given: object) -> None:
        context = click.get_current_context()
        named = {one for one in given if context.get_parameter_source(one).name == "COMMANDLINE"}
        made.append(plan.make(Plan, given, named=named, smoke=smoke))

    options = [*plan.options(Plan), click.Option(["--smoke"], is_flag=True)]
    click.Command("x", callback=take, params=options).main([*arguments], standalone_mode=False)
    return made[0]


def test_a_plan_is_its_options_and_what_the_command_line_names_is_no_smoke() -> None:
    assert plan_of() == Plan()
    assert plan_of("--sizes", "16,2,2", "--cold", "--pace", "1.5") == Plan(sizes=(2, 16), cold=True, pace=1.5)
    assert plan_of("--smoke") == Plan(sizes=(1,), rounds=1)
    assert plan_of("--smoke", "--rounds", "5") == Plan(sizes=(1,), rounds=5)
    assert plan.make(Plan, {"pace": 2.0}, named={"pace"}, smoke=True) == Plan(sizes=(1,), rounds=1, pace=2.0)
    assert plan.settings(Plan()) == {"sizes": (4, 8), "rounds": 5, "pace": None, "cold": False}
    for wrong in (("--rounds", "0"), ("--sizes", "1,many"), ("--pace", "-1")):
        with pytest.raises(click.UsageError):
            plan_of(*wrong)


def test_the_folder_of_a_model_of_the_hub_is_where_the_hub_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--name" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs" / "main").write_text("abc")
    assert LocalWorker(tmp_path, "--model", "org/name").model_folder == folder
    with pytest.raises(BenchError, match="the folder of the model org/other is not known"):
        _ = LocalWorker(tmp_path, "--model", "org/other").model_folder


def test_help_shows_a_plan_with_its_defaults() -> None:
    shown = CliRunner().invoke(command(BENCH), ["--help"], terminal_width=100).output
    for part in (
        "--tokens N,...",
        "256,1024,2048,4096,6000",
        "--rounds",
        "--turn-timeout SECONDS",
        "--smoke",
    ):
        assert part in shown


def test_a_report_reads_back_as_it_was_written(tmp_path: Path) -> None:
    written = make_report()
    report.write(tmp_path / "a.json", report.encode(written))
    found = report.read(tmp_path / "a.json")
    assert found == written
    assert found.findings(BENCH).plan == lies_restart.PLAN
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_what_fails_before_a_report_is_whole_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    report.write(path, b"old")

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(report.os, "fsync", refuse)
    with pytest.raises(ReportError, match=r"cannot be written to .*a.json: Input/output error"):
        report.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(mounted: Callable[[str], Path]) -> None:
    disk = mounted("size=64k")
    report_file = ReportFile(disk, "restart", 0)
    small, large = make_report(make_report().turns[:5]), make_report([*make_report().turns] * 20)
    report_file.save(small)
    with pytest.raises(ReportError, match="No space left on device"):
        report_file.save(large)
    assert report.read(report_file.path).turns == small.turns
    assert list(disk.iterdir()) == [report_file.path]


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot be written to .*: Not a directory"):
        ReportFile(tmp_path / "file" / "reports", "restart", 600).save(make_report([]))


async def test_a_checkpoint_waits_while_a_turn_is_in_flight_and_a_full_disk_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(BENCH, lies_restart.PLAN, Where(out=tmp_path, checkpoint=1e-9))
    with run.timing():
        run.progress(0, None, "in flight")
    assert files(tmp_path) == []
    run.progress(0, None, "between")
    assert len(files(tmp_path)) == 1

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "fsync", refuse)
    run.progress(0, None, "later")
    assert "checkpoint left out" in capsys.readouterr().err


async def test_an_interrupt_that_a_library_swallows_ends_the_run_at_the_next_step(tmp_path: Path) -> None:
    """In Python 3.11 `wait_for` returns a result that is there, whether or not it was cancelled meanwhile."""

    async def measure(run: Run[lies_restart.Plan]) -> None:
        run.keep(*lies_restart.honest(1)[0])
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        run.progress(1, 1, "going on")

    work = conduct(dataclasses.replace(BENCH, measure=measure), lies_restart.PLAN, Where(out=tmp_path))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work)
    assert [report.read(path).ending for path in files(tmp_path, "*.json")] == ["interrupted"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is of schema None"),
        (b"\xff\xfe", "is of schema None"),
        (b'{"schema": "turnkeep.bench.restart/1"}', "is of schema turnkeep.bench.restart/1"),
        (b'{"schema": "turnkeep.bench.restart/3"}', "is a broken report"),
    ],
)
def test_what_is_no_report_of_this_version_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ReportError, match=says):
        report.read(tmp_path / "a.json")


def test_the_round_pairs_what_is_set_against_what() -> None:
    """Rounds whose machine differs tenfold have the same ratio: as if unpaired, nothing could be told."""
    turns = [
        Turn(case=case, x=256, block=block, total_s=1, first_s=mood * size, position=1)
        for block, mood in enumerate((1.0, 10.0, 3.0, 0.5, 2.0))
        for case, size in ((WARM, 0.1), (RESTART, 0.109 + 0.0005 * block))
    ]
    ratio = stats.mean(make_report(turns).findings(BENCH).compared(BENCH.against[0], RESTART, 256), log=True)
    assert ratio.value == pytest.approx(1.1, abs=0.001)
    assert ratio.high - ratio.low < 0.03


def test_a_page_stands_alone_and_says_first_what_a_reader_must_know() -> None:
    evil = "<img onerror=x>"
    check = Check(name=evil, outcome=Verdict.FAILS, detail=evil, exact=True)
    busy = replace(report.describe(), cpus=2, load_average=(1.7, 1.0, 1.0))
    found = make_report(complete=False, ending=evil, checks=(check,), environment=busy)
    html = render(BENCH, found, warn=print)
    assert html.count("<svg") == 4
    for outside in ("<img", "<script", " src=", "<link", "url(http"):
        assert outside not in html
    for part in ("not complete", "a load of 1.7 on 2 CPUs", "fails", "1,024 tokens, kill -9"):
        assert part in html
    assert html.index("Beware") < html.index("Checks: 1 fails") < html.index("<table")
    assert "#010101" not in html  # no stand-in colour is left
    assert "prefers-color-scheme: dark" in html


@pytest.mark.parametrize("values", [(3.8, 3.93), (-0.2, -0.05), (-1.0, 1.0)])
def test_no_mark_is_cut_by_the_frame_of_a_plot_and_every_plot_has_a_zero(values: tuple[float, ...]) -> None:
    axes = Figure().add_subplot()
    axes.plot([1, 2], values, "o")
    plots._vertical(axes, Plot("points", "", ()))
    bottom, top = axes.get_ylim()
    assert bottom <= 0 <= top
    assert top - max(*values, 0) >= 0.02 * (top - bottom)


def test_a_page_of_nothing_has_no_plots_and_breaks_on_nothing() -> None:
    assert "<svg" not in render(BENCH, make_report([]), warn=print)
    nowhere = [replace(turn, x=None) for turn in lies_restart.honest(1)[0]]
    assert plots.draw(Plot("by x", "", (FIRST,)), make_report(nowhere).findings(BENCH)) is None


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        (number(2.3202, "s"), "2.32 s"),
        (number(0.1484, "s"), "148 ms"),
        (number(7300.0, "s"), "2.03 h"),
        (number(75.0, "s"), "75 s"),
        (number(46_080, "bytes"), "45 KiB"),
        (number(0.985, "share"), "98.5 %"),
        (number(17.0, "tokens"), "17 tokens"),
        (number(1480.7, "tokens/s"), "1,480 tokens/s"),
        (number(None, "s"), "-"),
        (interval(Estimate(1.0932, 1.0456, 1.1433, 9)), "1.09 (1.05 to 1.14)"),
        (interval(Estimate(1083.2, 869.4, 1350.2, 9), "tokens/s"), "1,080 (870 to 1,350) tokens/s"),
        (interval(Estimate(0.2203, 0.1985, 0.2427, 9), "s"), "220 (198 to 243) ms"),
        (interval(Estimate(0.012, -0.041, 0.0653, 9), "s", signed=True), "+12 (-41 to +65) ms"),
        (interval(Estimate(0.012, -0.0001, 0.0241, 9), "s", signed=True), "+12 (0 to +24) ms"),
        (interval(Estimate(5.432, None, None, 4), "s"), "5.43 s"),
        (interval(Estimate(17.0, 17.0, 17.0, 9), "tokens"), "17 tokens"),
        (interval(Estimate(0.89, 0.6, 1.17, 9), "share"), "89 (60 to 100) %"),
        (interval(Estimate(1.21, 0.53, 2.75, 9), "share"), "121 (53 to 275) %"),
    ],
)
def test_numbers_have_the_digits_that_count(shown: str, says: str) -> None:
    assert shown == says


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (0.1, 0.4, Verdict.HOLDS),
        (0.4, 0.6, Verdict.CANNOT_TELL),
        (0.6, 0.9, Verdict.FAILS),
        (None, None, Verdict.CANNOT_TELL),
    ],
)
def test_a_bound_within_the_interval_cannot_be_told(
    low: float | None, high: float | None, outcome: Verdict
) -> None:
    assert judged("", {"": Estimate(0.5, low, high, 9)}, at_most=0.5).outcome is outcome


def written(folder: Path, starts: list[str], slower: float = 1.0) -> list[Path]:
    """Reports whose second, fourth, ... is `slower`, begun at these minutes."""
    paths = []
    for i, minute in enumerate(starts):
        factor = slower if i % 2 else 1.0
        turns = [replace(turn, first_s=turn.first_s * factor) for turn in lies_restart.honest(i)[0]]
        found = make_report(turns, started_at=f"2026-11-20T08:{minute}:00+00:00")
        paths.append(folder / f"{i}.json")
        report.write(paths[-1], report.encode(found))
    return paths


def said(*paths: Path) -> tuple[int, str]:
    done = CliRunner().invoke(bench, ["compare", *map(str, paths)], terminal_width=200)
    return done.exit_code, done.output


def test_two_runs_are_shown_and_never_judged(tmp_path: Path) -> None:
    """By its inner scatter the second is surely slower; so are two runs of one worker, one or the other."""
    code, text = said(*written(tmp_path, ["01", "02"], slower=3.0))
    assert code == 0
    assert "first token, 256 tokens, restart" in text
    assert "nothing is judged" in text
    assert "B is" not in text


def test_five_pairs_that_took_turns_are_judged_and_others_are_not(tmp_path: Path) -> None:
    minutes = [f"{i:02}" for i in range(10)]
    code, text = said(*written(tmp_path, minutes, slower=1.5))
    assert code == 0
    assert text.count("B is worse") == 10  # two lengths of five cases
    one_after_the_other = [minutes[i // 2 + 5 * (i % 2)] for i in range(10)]
    _, text = said(*written(tmp_path, one_after_the_other, slower=1.5))
    assert "B is" not in text
    assert "the runs did not take turns" in text


def test_reports_that_cannot_be_compared_are_refused_in_one_line(tmp_path: Path) -> None:
    one, two = written(tmp_path, ["01", "02"])
    content = json.loads(two.read_text())
    for changes, says in (
        ({"plan": content["plan"] | {"rounds": 9}}, "rounds is 5 and 9"),
        ({"schema": "turnkeep.bench.load/3"}, "different benches"),
    ):
        two.write_text(json.dumps(content | changes))
        code, text = said(one, two)
        assert code == 1
        assert text.startswith("turnkeep: ")
        assert says in text
        assert text.count("\n") == 1
    assert said(one)[0] == 1


@pytest.mark.parametrize(("other", "code"), [("a", 0), ("b", 1)])
def test_perplexities_of_different_models_are_refused(tmp_path: Path, other: str, code: int) -> None:
    for name, digest in (("one", "a"), ("two", other)):
        found = make_report([], schema=report.schema_of("quality"), plan={}, facts={"model": digest})
        report.write(tmp_path / name, report.encode(found))
    assert said(tmp_path / "one", tmp_path / "two")[0] == code


def test_runs_take_turns_where_no_other_lies_between_the_two_of_a_pair() -> None:
    def runs(*starts: str) -> list[tuple[Report, Report]]:
        made = [make_report([], started_at=start) for start in starts]
        return list(zip(made[::2], made[1::2], strict=True))

    assert compare.interleaved(runs("1", "2", "4", "3", "5", "6"))
    assert not compare.interleaved(runs("1", "3", "2", "4"))


def test_cases_come_in_the_order_of_the_bench() -> None:
    assert make_report().findings(BENCH).cases(FIRST) == [WARM, SPILLED, RESTART, KILL, COLD]


@pytest.mark.process
async def test_the_bench_that_is_written_in_the_guide_works(tmp_path: Path, tiny_model: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "adding-a-bench.md").read_text()
    code = guide.partition("```python\n")[2].partition("```")[0]
    assert code.count("\n") <= 80
    module = types.ModuleType("last_turn")
    sys.modules["last_turn"] = module  # where a dataclass looks up its annotations
    exec(code, module.__dict__)
    short = plan.make(module.Plan, {}, named=set(), smoke=True)
    found = await conduct(module.BENCH, short, Where(model=str(tiny_model), out=tmp_path))
    assert [turn.x for turn in sorted(found.turns, key=lambda turn: turn.x)] == [16, 64]
    assert {check.outcome for check in found.checks if check.exact} == {Verdict.HOLDS}
    assert render(module.BENCH, found, warn=print).count("<svg") == 2


def test_kv_that_grows_beyond_a_session_s_window_is_told_from_kv_that_stays() -> None:
    def broken(kept: float, *held: int) -> int:
        turns = [
            Turn(total_s=1, position=50 * i, kv_live_bytes=128 * n, facts={"kept": kept, "held": 0})
            for i, n in enumerate(held, 1)
        ]
        found = Findings(session.BENCH, session.Plan(), turns)
        return [check.name for check in session.checks(found) if check.failed].count(
            "KV is not empty and follows its formula at every turn"
        )

    assert broken(120, 49, 99, 120, 120, 120) == 0
    assert broken(120, 49, 99, 120, 120, 249) == 1
    assert broken(1000, 49, 99, 149) == 0
