"""Reports on the disk: whole or not at all, early enough, and told in one line where that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from made_reports import make_report
from made_turns import make_turns

from bench import environment
from bench.faults import ReportError
from bench.old import report
from bench.old.figures import byte_unit, duration
from bench.old.page import Page, Plot, Rows, render
from bench.old.report import Check, Recorder, Report
from bench.old.session.page import page_of
from bench.old.session.summary import SessionReport
from bench.old.session.turns import Rewind

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def small_disk(mounted: Callable[[str], Path]) -> Path:
    """A tmpfs of 64 KiB."""
    return mounted("size=64k")


def ignore(message: str) -> None:
    """Warnings are not what this test is about."""


def test_a_report_reads_back_as_it_was_written(tmp_path: Path) -> None:
    written = make_report(
        rewinds=(Rewind(turn=3, position=9, reason="context_exceeded"),), messages={"a": "b"}
    )
    path = tmp_path / "session.json"
    report.write(path, report.encode(written))
    assert report.read(path, SessionReport) == written
    assert report.read(path, Report).series == written.series
    assert [file.name for file in tmp_path.iterdir()] == ["session.json"]


def test_a_report_that_is_replaced_is_never_seen_in_part(tmp_path: Path, monkeypatch) -> None:
    """Whatever fails before the rename leaves the old report, and no draft beside it."""
    path = tmp_path / "session.json"
    report.write(path, b"old")

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(report.os, "fsync", refuse)
    with pytest.raises(ReportError, match=r"cannot be written to .*session.json: Input/output error"):
        report.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["session.json"]


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(small_disk: Path) -> None:
    warned: list[str] = []
    recorder = Recorder(small_disk, "session", every_s=0, warn=warned.append)
    recorder.start(make_report([], complete=False))
    small = make_report(make_turns(20), complete=False)
    recorder.checkpoint(small)
    large = make_report(make_turns(2000))
    recorder.checkpoint(large)
    assert len(warned) == 1
    assert "the disk is full" in warned[0]
    with pytest.raises(ReportError, match="the disk is full"):
        recorder.finish(large, lambda: None)
    assert recorder.path is not None
    assert report.read(recorder.path, SessionReport) == small
    assert list(small_disk.iterdir()) == [recorder.path]


def test_a_folder_that_cannot_be_made_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = Recorder(tmp_path / "file" / "reports", "session", warn=ignore)
    with pytest.raises(ReportError, match=r"cannot be written to .*: Not a directory"):
        recorder.start(make_report([]))


def test_checkpoints_are_due_every_ten_minutes_by_the_clock(tmp_path: Path) -> None:
    now_s = 0.0
    recorder = Recorder(tmp_path, "session", clock=lambda: now_s, warn=ignore)
    now_s = 599.0
    assert not recorder.due
    now_s = 600.0
    assert recorder.due
    recorder.checkpoint(make_report())
    assert not recorder.due
    assert not Recorder(None, "session", every_s=0, warn=ignore).due


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no bench report"),
        (b"[1]", "is no bench report"),
        (b"{}", "is no bench report"),
        (b"\xff\xfe", "is no bench report"),
        (b'{"schema": "turnkeep.bench.session/1"}', "is of schema 'turnkeep.bench.session/1'"),
        (b'{"schema": "turnkeep.bench.session/2"}', "is a broken report"),
    ],
)
def test_what_is_no_report_of_this_version_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ReportError, match=says):
        report.read(tmp_path / "a.json", Report)


def test_the_environment_says_what_ran_where() -> None:
    found = environment.look()
    assert found.cpus > 0
    assert found.memory_bytes > 2**28
    assert {"mlx", "mlx-lm", "nats-py", "turnkeep"} <= found.packages.keys()
    assert found.processor
    if (Path(__file__).parents[2] / ".git").exists():
        assert found.commit is not None
        assert len(found.commit.removesuffix("-dirty")) == 40


def test_a_page_stands_alone_and_says_what_the_report_says() -> None:
    turns = make_turns(50)
    warned: list[str] = []
    html = render(
        page_of(make_report(turns, complete=False, ending="interrupted", messages={"x": "<script>alert(1)"})),
        warn=warned.append,
    )
    assert html is not None
    assert warned == []
    assert html.count("<svg") == 6
    assert "not complete: interrupted" in html
    assert "<script>" not in html
    assert " src=" not in html
    assert "<link" not in html
    for part in ("p95", "Time of each turn", "Bytes written to SSD", "46,080 bytes per token"):
        assert part in html


def test_a_page_of_nothing_has_no_plots_and_breaks_on_nothing() -> None:
    html = render(page_of(make_report([])), warn=ignore)
    assert html is not None
    assert "<svg" not in html


def test_what_comes_from_outside_is_text_on_the_page() -> None:
    evil = "<img onerror=x>"
    page = Page(
        title=evil,
        subtitle=evil,
        notes=[evil],
        checks=[Check(name=evil, passed=None, detail=evil, exact=True)],
        tables=[Rows(evil, (evil,), [(evil,)])],
        plots=[Plot(evil, evil, lambda axes: axes.set_title(evil))],
        details=[Rows(evil, (evil,), [(evil,)])],
    )
    html = render(page, warn=ignore)
    assert html is not None
    assert "<img" not in html


def test_axes_have_units_that_suit_what_they_show() -> None:
    assert duration(40) == (1.0, "s")
    assert duration(900) == (60.0, "min")
    assert duration(14_400) == (3600.0, "h")
    assert byte_unit(0) == (1.0, "B")
    assert byte_unit(3 * 2**20) == (2.0**20, "MiB")
