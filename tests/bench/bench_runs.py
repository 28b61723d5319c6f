"""Benches as processes, and what tests wait for in their reports."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil

from bench.old import report
from bench.old.report import Report

if TYPE_CHECKING:
    import signal
    from pathlib import Path


#: Benches that tests have started; `end_all` ends those that a failed test left.
_started: list[subprocess.Popen[str]] = []

#: How long a bench may take for what it does in seconds, on a machine that has other work.
PATIENCE_S = 120


def turnkeep(*arguments: object, model: Path | None = None) -> subprocess.Popen[str]:
    """`turnkeep bench` as a process in a session of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TURNKEEP_")}
    if model is not None:
        environment["TURNKEEP_MODEL"] = str(model)
    process = subprocess.Popen(
        [sys.executable, "-m", "worker", "bench", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    _started.append(process)
    return process


def end_all() -> None:
    """End what still runs, with its workers and their NATS servers, so that no other test suffers from it."""
    while _started:
        with _started.pop() as process:
            if process.poll() is None:
                family = psutil.Process(process.pid).children(recursive=True)
                for member in (process, *family):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.kill()


def wait_for(folder: Path, process: subprocess.Popen[str], measure: str) -> Path:
    """Wait until a checkpoint has two values of a measure."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        for path in folder.glob("*.json"):
            series = report.read(path, Report).series
            if measure in series and len(series[measure].values) >= 2:
                return path
        time.sleep(0.1)
    raise AssertionError(f"no checkpoint had two values of {measure}")


def check_interrupted(process: subprocess.Popen[str], path: Path, number: signal.Signals) -> None:
    """End it as a terminal does: it keeps its report and leaves no process."""
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2  # the worker, and its NATS server
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "partial report: " in out
    found = report.read(path, Report)
    assert (found.complete, found.ending) == (False, "interrupted")
    assert psutil.wait_procs(family, timeout=10)[1] == []


def check_death(process: subprocess.Popen[str], path: Path) -> None:
    """Kill its worker: that is one line, in a partial report too, and no process is left."""
    family = psutil.Process(process.pid).children(recursive=True)
    for worker in psutil.Process(process.pid).children():
        worker.kill()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "turnkeep: the bench's worker ended with exit code -9"
    found = report.read(path, Report)
    assert not found.complete
    assert found.ending.startswith("fault: the bench's worker ended")
    assert psutil.wait_procs(family, timeout=10)[1] == []


def check_one_line(process: subprocess.Popen[str], *says: str) -> None:
    """A fault that a user can mend is one line."""
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, err
    assert out == ""
    assert err.startswith("turnkeep: ")
    assert err.count("\n") == 1, err
    for part in says:
        assert part in err
