"""A command waits for its worker while that is still starting."""

from __future__ import annotations

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
    served = Popen([*program, "serve", *where, "--model", str(tiny_model)], env=environment(), stderr=DEVNULL)
    with served as worker:
        try:
            lock = data / "worker.lock"
            while has_lock and not (lock.exists() and lock.stat().st_size):
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


def test_a_command_does_not_wait_for_a_worker_that_has_ended_or_started_long_ago(tmp_path: Path) -> None:
    with Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    (tmp_path / "worker.lock").write_text(f'{{"pid": {ended.pid}, "worker": "w"}}')
    where = ("--data-dir", tmp_path, "--nats-port", free_port())
    assert "start a worker with" in turnkeep("info", *where).stderr
    (tmp_path / "worker.lock").write_text(f'{{"pid": {os.getpid()}, "worker": "w"}}')
    os.utime(tmp_path / "worker.lock", (0, 0))
    assert "start a worker with" in turnkeep("info", *where).stderr, "it has been there for long"


def test_serve_reports_a_mistyped_model_even_if_the_data_directory_is_in_use(
    worker_process: Callable[..., WorkerProcess],
) -> None:
    worker = worker_process()
    worker.start()
    where = ("--data-dir", worker.data_dir, "--nats-port", free_port())
    while not worker.data_dir.joinpath("worker.lock").exists():
        time.sleep(0.01)
    assert turnkeep("serve", *where, "--model", "nosuch").stderr.startswith(
        "turnkeep: there is no model nosuch; give a model folder"
    )
    assert "is in use by worker" in turnkeep("serve", *where, "--model", worker.data_dir).stderr
