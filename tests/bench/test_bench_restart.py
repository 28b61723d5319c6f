"""`bench restart` as a command: how it ends well, and how it is ended."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from bench_runs import PATIENCE_S, check_one_line, turnkeep

from bench import report
from bench.checks import Outcome
from bench.restart import CASES, RESTARTED, RESTORED

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.process
LONG = ("--tokens", 256, "--rounds", 20, "--corpus", "built-in", "--checkpoint", 0.1)


def test_a_smoke_run_ends_well(tmp_path: Path, tiny_model: Path) -> None:
    process = turnkeep("restart", "--smoke", "--from-disk", "--model", tiny_model, "--out", tmp_path)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err
    found = report.read(next(tmp_path.glob("restart-*.json")))
    assert found.complete
    assert sorted(turn.case for turn in found.turns) == sorted(CASES)
    assert all(turn.fact("restored_bytes") > 0 for turn in found.turns if turn.case in RESTORED)
    assert {check.outcome for check in found.checks if check.exact} == {Outcome.HOLDS}
    assert next(tmp_path.glob("restart-*.html")).read_text().count("<svg") == 4
    assert "kill -9" in out


def test_a_session_that_does_not_fit_the_model_is_one_line(tmp_path: Path, tiny_model: Path) -> None:
    options = ("--tokens", 5000, "--corpus", "built-in", "--model", tiny_model, "--out", tmp_path)
    check_one_line(turnkeep("restart", *options), "the context is 2048")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_the_worker_is_down_leaves_no_process(tmp_path: Path, tiny_model: Path) -> None:
    process = turnkeep("restart", *LONG, "--model", tiny_model, "--out", tmp_path)
    path = wait_for_a_restart(tmp_path, process)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "partial report: " in out
    found = report.read(path)
    assert (found.complete, found.ending) == (False, "interrupted")
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_a_worker_that_dies_by_itself_is_one_line_in_the_report_too(tmp_path: Path, tiny_model: Path) -> None:
    process = turnkeep("restart", *LONG, "--model", tiny_model, "--out", tmp_path)
    path = wait_for_a_restart(tmp_path, process)
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:  # one that is told to end has no exit code
        for worker in psutil.Process(process.pid).children():
            worker.kill()
        time.sleep(0.05)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "ended with exit code -9" in err.splitlines()[-1]
    assert report.read(path).ending.startswith("fault: ")


def wait_for_a_restart(folder: Path, process: subprocess.Popen[str]) -> Path:
    """Wait until a turn was measured and a worker has been started anew, or is about to be."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        for path in folder.glob("restart-*.json"):
            if any(turn.case in RESTARTED for turn in report.read(path).turns):
                return path
        time.sleep(0.1)
    raise AssertionError("no checkpoint had a restart")
