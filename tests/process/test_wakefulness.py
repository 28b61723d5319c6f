"""While requests are at work, a program keeps macOS awake; a script stands in its place."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import psutil
import pytest

from worker.process import wakefulness


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
