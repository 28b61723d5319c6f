"""The program as a user runs it: as a process, its output in pipes or on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.conftest import LocalWorker


def environment() -> dict[str, str]:
    """The tests' own, without settings of a worker and without what a terminal around them says of itself."""
    hidden = ("TURNKEEP_", "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR")
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)}


def turnkeep(*arguments: object, text: str | bytes = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with `text` on its standard input and its output in pipes."""
    done = subprocess.run(
        [sys.executable, "-m", "worker", *map(str, arguments)],
        input=text.encode() if isinstance(text, str) else text,
        capture_output=True,
        timeout=100,
        check=False,
        env=environment() | more,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def where(worker: LocalWorker) -> tuple[Any, ...]:
    """The options with which a command finds a worker of these tests."""
    return ("--nats", worker.settings.nats, "--prefix", worker.settings.prefix)
