"""A command waits for its worker while that is still starting."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import pytest

from tests.commands.command_runs import environment, turnkeep
from tests.parts import WorkerProcess, free_port

pytestmark = pytest.mark.process


@pytest.mark.parametrize("has_lock", [True, False])
def test_ask_waits_for_a_worker_that_is_still_starting(
    tmp_path: Path, tiny_model: Path, *, has_lock: bool
) -> None:
    data, port = tmp_path / "data", free_port()
    where = ["--data-dir", str(data), "--nats-port", str(port)]
    program = [sys.executable, "-m", "commands"]
    serve = [*program, "serve", *where, "--model", str(tiny_model)]
    with contextlib.ExitStack() as stack:
        if has_lock:
            starting = stack.enter_context(Popen(["sleep", "60"]))
            data.mkdir()
            (data / "worker.lock").write_text(f'{{"pid": {starting.pid}}}')
        else:
            starting = stack.enter_context(Popen(serve, env=environment(), stderr=DEVNULL))
            starting.send_signal(signal.SIGSTOP)
        stack.callback(starting.terminate)
        asked = [*program, "ask", *where, "--max-tokens", "2", "Hello?"]
        ask = Popen(asked, env=environment(), stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, text=True)
        stack.enter_context(ask)
        assert ask.stderr is not None
        assert ask.stderr.readline() == f"waiting for the worker that is starting (pid {starting.pid}) ...\n"
        if has_lock:
            served = stack.enter_context(Popen(serve, env=environment(), stderr=DEVNULL))
            stack.callback(served.terminate)
        starting.send_signal(signal.SIGCONT)
        rest = ask.stderr.read()
        assert ask.wait() == 0, rest


def test_a_command_does_not_wait_for_a_worker_that_has_ended_or_started_long_ago(tmp_path: Path) -> None:
    with Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    (tmp_path / "worker.lock").write_text(f'{{"pid": {ended.pid}, "worker": "w"}}')
    where = ("--data-dir", tmp_path, "--nats-port", free_port())
    assert "start a worker with" in turnkeep("info", *where).stderr
    (tmp_path / "worker.lock").write_text(f'{{"pid": {os.getpid()}, "worker": "w"}}')
    os.utime(tmp_path / "worker.lock", (0, 0))
    assert "start a worker with" in turnkeep("info", *where).stderr, "it has been there for long"


def test_a_second_serve_on_a_data_directory_says_which_process_uses_it(
    worker_process: Callable[..., WorkerProcess],
) -> None:
    worker = worker_process()
    worker.start()
    where = ("--data-dir", worker.data_dir, "--nats-port", free_port())
    while not worker.data_dir.joinpath("worker.lock").exists():
        time.sleep(0.01)
    assert f"(pid {worker.pid}); stop it" in turnkeep("serve", *where).stderr
