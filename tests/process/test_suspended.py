"""Machines that stay awake while requests are at work, and that sleep; a user's systemd runs a worker."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import psutil
import pytest
from parts import free_port

from ops import units
from tests.parts import WorkerProcess
from turnkeep_client.client import Client, connect
from turnkeep_client.errors import NoServerError
from worker.process import wakefulness

#: Longer than a worker's record lives without it, and than requests stay with a silent worker.
SLEEP_S = 13.0


@pytest.mark.process
async def test_an_answer_completes_after_the_machine_slept_longer_than_the_worker_timeout(
    worker_process: Callable[..., WorkerProcess],
) -> None:
    worker = worker_process()
    worker.start()
    request = {"text": "abc", "max_tokens": 1500, "timeout_s": 100}
    async with await worker.client(timeout_s=60) as client:
        whole = await client.session("awake").generate(**request)
        pids = [worker.pid, worker.worker_pid, worker.server_pid]
        tokens: list[int] = []
        async with client.session("asleep").generate(**request) as answer:
            async for chunk in answer:
                tokens += chunk.tokens
                if chunk.i == 3:
                    for pid in pids:
                        os.kill(pid, signal.SIGSTOP)
                    await asyncio.sleep(SLEEP_S)
                    for pid in reversed(pids):
                        os.kill(pid, signal.SIGCONT)
            result = answer.result
        assert result.finish_reason == whole.finish_reason
        assert [*result.tokens] == [*whole.tokens]
        assert tokens == [*whole.tokens]
        assert "attempt" not in {entry.kind for entry in await client.log("asleep")}


async def test_a_worker_keeps_macos_awake_only_while_requests_are_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "caffeinate"
    script.write_text('#!/bin/sh\necho "$*" >> "$0.log"\nexec sleep 1000\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(wakefulness, "_LOOK_S", 0.01)
    busy = False

    def is_awake() -> bool:
        return any("sleep" in one.name() or "caffeinate" in one.name() for one in psutil.Process().children())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wakefulness.keep_awake, lambda: busy)
        for busy in (False, True, False, True):
            await anyio.sleep(0.2)
            assert is_awake() == busy
        tasks.cancel_scope.cancel()
    assert not is_awake()
    assert (tmp_path / "caffeinate.log").read_text() == 2 * f"-i -w {os.getpid()}\n"


async def test_a_worker_keeps_running_without_the_macos_program_that_prevents_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with anyio.move_on_after(0.1) as scope:
        await wakefulness.keep_awake(lambda: True)
    assert scope.cancelled_caught


NAME = f"turnkeep-test-{os.getpid()}"
ROOT = Path(__file__).parents[2]
REQUEST: Final[dict[str, Any]] = {"tokens": (1, 2, 3), "max_tokens": 300}


def systemctl(*words: str, check: bool = True) -> str:
    done = subprocess.run(["systemctl", "--user", *words], check=check, capture_output=True, text=True)
    return done.stdout


def is_there() -> bool:
    if sys.platform != "linux" or shutil.which("systemctl") is None or "XDG_RUNTIME_DIR" not in os.environ:
        return False
    return bool(systemctl("show-environment", check=False))


def wait_for(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


async def reach(url: str) -> Client:
    """Connect a client as soon as the server listens."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await connect(url, timeout_s=60)
            except NoServerError:
                await asyncio.sleep(0.1)


@pytest.fixture
def url(tmp_path: Path, endless_model: Path) -> Iterator[str]:
    """Run a worker with a temporary systemd unit of its own name; yield the URL of its NATS server."""
    config, port, token = tmp_path / "turnkeep.toml", free_port(), tmp_path / "data" / "nats-token"
    config.write_text(f"data_dir = 'data'\nnats_port = {port}\nmodel = '{endless_model}'\n")
    text = units.unit([sys.executable, "-P", "-m", "commands", "serve", "--config", str(config)])
    found = f"[Service]\nEnvironment=PYTHONPATH={ROOT}:{ROOT / 'protocol'}"
    path = Path(os.environ["XDG_RUNTIME_DIR"]) / "systemd" / "user" / f"{NAME}.service"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("[Service]", found))
    systemctl("daemon-reload")
    systemctl("start", NAME)
    try:
        wait_for(token.exists)
        yield f"nats://{token.read_text().strip()}@127.0.0.1:{port}"
    finally:
        systemctl("stop", NAME)
        path.unlink()
        systemctl("daemon-reload")


def pid() -> int:
    return int(systemctl("show", NAME, "--property=MainPID", "--value"))


@pytest.mark.packaging
@pytest.mark.process
@pytest.mark.skipif(not is_there(), reason="this user has no systemd")
def test_a_worker_under_systemd_has_a_system_call_filter_and_resumes_an_answer_after_a_kill(
    url: str, tmp_path: Path
) -> None:
    first = pid()
    assert "Seccomp:\t2" in Path(f"/proc/{first}/status").read_text()

    async def ask() -> int:
        async with await reach(url) as client, client.session("s1").generate(**REQUEST) as answer:
            async for chunk in answer:
                if chunk.i == 3:
                    os.kill(first, signal.SIGKILL)
            return len(answer.result.tokens)

    assert asyncio.run(ask()) == REQUEST["max_tokens"]
    assert pid() not in {0, first}
    wait_for(lambda: list(tmp_path.glob("data/snapshots/snapshots/*.safetensors")))
