"""Benches as processes, how tests start and end them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
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


def check_one_line(process: subprocess.Popen[str], *says: str) -> None:
    """A fault that a user can mend is one line."""
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, err
    assert out == ""
    assert err.startswith("turnkeep: ")
    assert err.count("\n") == 1, err
    for part in says:
        assert part in err
