"""Every bench as a command: how it ends well, how it is ended, and what is left of it then."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from bench_runs import PATIENCE_S, check_one_line, turnkeep
from saboteurs import Suite, suites

from bench import report
from bench.checks import Verdict

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.process
each_bench = pytest.mark.parametrize("suite", suites(), ids=lambda suite: suite.bench.name)
#: What ends a run is the same code in all of them: one with a process beside it, one with several.
two_benches = pytest.mark.parametrize(
    "suite",
    [
        pytest.param(suite, marks=() if suite.bench.name in {"session", "peers"} else pytest.mark.soak)
        for suite in suites()
    ],
    ids=lambda suite: suite.bench.name,
)


@pytest.fixture
def model(suite: Suite, request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(suite.model)
    return folder


@each_bench
def test_a_smoke_run_ends_well_with_a_model_of_the_hub_too(
    suite: Suite, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is its cache here, which is all that there is of it without a network."""
    cached = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(model, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    process = turnkeep(suite.bench.name, "--smoke", "--model", "org/tiny", "--out", tmp_path)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err
    found = report.read(next(tmp_path.glob("*.json")))
    assert found.complete
    assert Verdict.FAILS not in {check.outcome for check in found.checks if check.exact}
    findings = found.findings(suite.bench)
    # A tiny model's answer may be one chunk, which has no gaps to draw.
    drawn = [one for one in suite.bench.plots if any(findings.of(measure) for measure in one.measures)]
    assert next(tmp_path.glob("*.html")).read_text().count("<svg") == len(drawn) >= len(suite.bench.plots) - 2


@two_benches
def test_an_interrupt_keeps_what_was_measured_and_leaves_no_process(
    suite: Suite, tmp_path: Path, model: Path
) -> None:
    process, path = start(suite, tmp_path, model)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "partial report: " in out
    found = report.read(path)
    assert (found.complete, found.ending) == (False, "interrupted")
    assert psutil.wait_procs(family, timeout=10)[1] == []


@two_benches
def test_a_worker_that_dies_is_one_line_in_the_report_too(suite: Suite, tmp_path: Path, model: Path) -> None:
    process, path = start(suite, tmp_path, model)
    while process.poll() is None:  # again: the first may have been one that the bench was about to end
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            for worker in psutil.Process(process.pid).children():
                worker.kill()
        time.sleep(0.05)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "ended with exit code -9" in err.splitlines()[-1]
    assert report.read(path).ending.startswith("fault: ")


def test_a_session_that_does_not_fit_the_model_is_one_line(tmp_path: Path, tiny_model: Path) -> None:
    options = ("--tokens", 5000, "--corpus", "built-in", "--model", tiny_model, "--out", tmp_path)
    check_one_line(turnkeep("restart", *options), "the context is 2048")
    assert list(tmp_path.iterdir()) == []


def start(suite: Suite, folder: Path, model: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a run that lasts, and wait until some turns are in its report."""
    options = (*suite.long, "--checkpoint", 0.1, "--model", model, "--out", folder)
    process = turnkeep(suite.bench.name, *options)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        for path in folder.glob("*.json"):
            found = report.read(path)
            if len(found.turns) + len(found.samples) >= 3:
                return process, path
        time.sleep(0.1)
    raise AssertionError("no checkpoint had three turns or samples")
