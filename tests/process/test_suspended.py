"""A machine stays awake while requests are at work; one that sleeps stops worker and server together."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import psutil
import pytest

from tests.parts import WorkerProcess
from worker.process import wakefulness

#: Longer than a worker's record lives without it, and than requests stay with a silent worker.
SLEEP_S = 13.0


@pytest.mark.process
async def test_an_answer_goes_on_after_a_sleep_longer_than_a_worker_may_be_silent(
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


async def test_macos_is_kept_awake_only_while_requests_are_at_work(
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


async def test_without_the_program_the_worker_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with anyio.move_on_after(0.1) as scope:
        await wakefulness.keep_awake(lambda: True)
    assert scope.cancelled_caught
