"""Two reports side by side: what is told from them, and which are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from click.testing import CliRunner
from made_reports import ENVIRONMENT, make_report
from made_turns import make_turns

from bench.old import report
from worker.commands.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from bench.old.session.summary import SessionReport


def compare(folder: Path, first: SessionReport, second: SessionReport) -> tuple[int, str, str]:
    for name, one in (("a.json", first), ("b.json", second)):
        report.write(folder / name, report.encode(one))
    done = CliRunner().invoke(main, ["bench", "compare", str(folder / "a.json"), str(folder / "b.json")])
    return done.exit_code, done.stdout, done.stderr


def slower(factor: float) -> SessionReport:
    turns = make_turns(40, seed=2)
    return make_report([msgspec.structs.replace(turn, latency_s=turn.latency_s * factor) for turn in turns])


def test_a_slower_run_is_called_worse_and_its_like_is_not(tmp_path: Path) -> None:
    code, out, _ = compare(tmp_path, make_report(make_turns(40)), slower(1.2))
    lines = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    assert code == 0
    assert "1.2" in lines["whole turn"]
    assert "B is worse" in lines["whole turn"]
    assert "no difference" in lines["first chunk"]
    assert "warning" not in out
    _, out, _ = compare(tmp_path, slower(1.2), make_report(make_turns(40)))
    assert "B is better" in out


def test_runs_on_two_machines_come_with_a_warning(tmp_path: Path) -> None:
    elsewhere = msgspec.structs.replace(ENVIRONMENT, platform="another", cpus=96)
    code, out, _ = compare(tmp_path, make_report(), make_report(environment=elsewhere))
    assert code == 0
    assert "not comparable: they differ in platform, cpus" in out


def test_a_partial_report_is_compared_with_a_warning(tmp_path: Path) -> None:
    _, out, _ = compare(tmp_path, make_report(), make_report(complete=False, ending="interrupted"))
    assert "B is not complete (interrupted)" in out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": "turnkeep.bench.load/2"}, "different benches"),
        ({"schema": "turnkeep.bench.session/99"}, "is of schema"),
        ({"settings": {"turns": 12, "max_tokens": 8}}, "corpus is built-in and None; max_tokens is 64 and 8"),
    ],
)
def test_reports_that_measure_something_else_are_refused_in_one_line(tmp_path: Path, changes, says) -> None:
    code, out, err = compare(tmp_path, make_report(), make_report(**changes))
    assert (code, out) == (1, "")
    assert err.startswith("turnkeep: ")
    assert err.count("\n") == 1
    assert says in err


def test_a_run_without_answers_compares_to_nothing(tmp_path: Path) -> None:
    empty = make_report([], settings=make_report().settings)
    code, out, _ = compare(tmp_path, make_report(), empty)
    assert code == 0
    assert "cannot tell" in out
