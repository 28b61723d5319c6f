"""The commands in docs/runbooks.md run as written, and its statements about lost files are true."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.command_runs import command, turnkeep, where
from tests.parts import WorkerProcess

pytestmark = pytest.mark.packaging

PAGE = (Path(__file__).parents[2] / "docs" / "runbooks.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.strip().splitlines()
]
#: Of the log and of a worker, other than those of files.
LOCAL = {"cache", "serve"}


async def test_the_commands_of_the_runbooks_run_as_written(
    local_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    worker = await local_worker()
    garden = worker.client.session("garden")
    await garden.generate(text="What is red?", max_tokens=8)
    here = ("--data-dir", worker.settings.data_dir)

    async def run(line: str) -> None:
        _, *arguments = shlex.split(line, comments=True)
        places = here if arguments[0] in LOCAL else where(worker)
        if arguments[0] == "serve":
            places = (*where(worker), *here, "--model", worker.settings.model)
        if arguments[0] == "ask":  # it minds signals, so it needs a process of its own
            done = await asyncio.to_thread(turnkeep, *arguments, *places)
        else:
            done = await command(*arguments, *places)
        assert done.returncode == 0, (line, done.stdout, done.stderr)

    stopped = [line for line in COMMANDS if line.endswith("# the worker is stopped")]
    assert (len(stopped), len(COMMANDS) > 15) == (2, True)
    for line in COMMANDS:
        if line in stopped or line.endswith("# in another terminal"):  # a worker runs already
            continue
        if line.startswith("turnkeep cancel"):
            answer = garden.generate(text="eee", max_tokens=1900, request_id="turn-7")
            async for chunk in answer:
                if chunk.i == 0:
                    await run(line)
            assert answer.result.finish_reason == "cancelled"
        else:
            await run(line)
    await worker.stop()
    for line in stopped:
        await run(line)


@pytest.mark.process
async def test_a_session_continues_when_all_files_but_the_nats_stream_are_lost(
    worker_process: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    worker = worker_process()
    worker.start()
    async with await worker.client() as client:
        first = await client.session("garden").append(text="What is red? " * 20)
    assert worker.stop() == 0
    old = worker.data_dir.rename(tmp_path / "old")
    worker.data_dir.mkdir()
    (old / "nats").rename(worker.data_dir / "nats")
    worker.start()
    async with await worker.client() as client:
        again = await client.session("garden").append(text="And blue?")
    assert again.position == first.position + len("And blue?")
    assert (again.cached_tokens, again.prefilled_tokens) == (0, again.position - 1)
