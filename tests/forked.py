"""Starts the program from a process that has imported it: imports are most of the work of a start.

That process is the fork server of `multiprocessing`, one for each process of the tests. A child has
arguments, environment and output of its own, and ends by a signal as a new process would.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal
    from multiprocessing.context import ForkServerProcess
    from pathlib import Path

#: On macOS a process that has loaded Metal must not fork.
CAN_FORK = sys.platform == "linux"
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.imported"])


class Forked:
    """`python -m worker ARGUMENTS` or `python FILE ARGUMENTS`; what tests use of `subprocess.Popen`."""

    def __init__(self, command: list[str], output: Path, environment: dict[str, str]) -> None:
        self._process: ForkServerProcess = _FORKS.Process(
            target=_run, args=(command, str(output), environment)
        )
        output.touch()
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"process {self.pid} is still there after {timeout_s} s")
        return code


def _run(command: list[str], output: str, environment: dict[str, str]) -> None:
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    program, *sys.argv[1:] = command
    if program == "-m":
        sys.argv = ["turnkeep", *sys.argv[2:]]
        from worker.__main__ import main

        main()
    else:
        runpy.run_path(program, run_name="__main__")
