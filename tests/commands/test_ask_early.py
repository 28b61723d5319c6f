"""A command that is run while its worker still starts waits for it."""

from __future__ import annotations

import os
import signal
import sys
import time
from subprocess import DEVNULL, PIPE, Popen
from typing import TYPE_CHECKING

import pytest

from tests.commands.command_runs import environment, turnkeep
from tests.parts import free_port

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.process


def test_a_question_waits_for_the_worker_that_starts(tmp_path: Path, tiny_model: Path) -> None:
    data, port = tmp_path / "data", free_port()
    where = ["--data-dir", str(data), "--nats-port", str(port)]
    program = [sys.executable, "-m", "worker"]
    served = Popen([*program, "serve", *where, "--model", str(tiny_model)], env=environment(), stderr=DEVNULL)
    with served as worker:
        try:
            while not (data / "worker.lock").exists() or not (data / "worker.lock").stat().st_size:
                time.sleep(0.01)
            worker.send_signal(signal.SIGSTOP)
            asked = [*program, "ask", *where, "--max-tokens", "2", "Hello?"]
            with Popen(
                asked, env=environment(), stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, text=True
            ) as ask:
                assert ask.stderr is not None
                said = ask.stderr.readline()
                worker.send_signal(signal.SIGCONT)
                rest = ask.stderr.read()
            assert said == f"waiting for the worker that is starting (pid {worker.pid}) ...\n"
            assert ask.returncode == 0, rest
        finally:
            worker.send_signal(signal.SIGCONT)
            worker.terminate()


def test_a_process_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    with Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    (tmp_path / "worker.lock").write_text(f'{{"pid": {ended.pid}, "worker": "w"}}')
    where = ("--data-dir", tmp_path, "--nats-port", free_port())
    assert "start a worker with" in turnkeep("info", *where).stderr
    (tmp_path / "worker.lock").write_text(f'{{"pid": {os.getpid()}, "worker": "w"}}')
    os.utime(tmp_path / "worker.lock", (0, 0))
    assert "start a worker with" in turnkeep("info", *where).stderr, "it has been there for long"
