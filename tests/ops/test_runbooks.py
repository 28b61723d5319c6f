"""The commands in docs/log.md and docs/runbooks.md run as written; what they say of lost files is true."""

import asyncio
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.command_runs import command, turnkeep, where
from tests.ops.test_sessions import venomous
from tests.parts import WorkerProcess
from turnkeep_client.errors import RequestFailedError
from worker.sessions.dead_letters import RequestAttempts

pytestmark = pytest.mark.packaging


def commands_of(page: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.strip().splitlines()]


COMMANDS = commands_of("runbooks.md")
#: Of the log and of a worker, other than those of files.
LOCAL = {"cache", "serve"}


async def test_the_commands_in_the_documented_runbooks_run_as_written(
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
            empty = ("--data-dir", tmp_path / "empty")  # as the page says; the worker's is in use
            places = (*where(worker), *empty, "--model", worker.settings.model)
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


async def test_the_commands_of_docs_log_md_run_as_written(
    local_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(RequestAttempts, "attempt", venomous)
    worker = await local_worker(max_attempts=1)
    for name in ("garden", "kitchen", "diary", "diary"):
        await worker.client.session(name).generate(text="What is red?", max_tokens=8)
    for dead in ("turn-7", "turn-9"):
        with pytest.raises(RequestFailedError):
            await worker.client.session("garden").append(text="VENOM", request_id=dead)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    commands = commands_of("log.md")
    assert len(commands) >= 15
    for line in commands:
        _, *arguments = shlex.split(line.replace("--into-prefix turnkeep", ""), comments=True)
        here = ("--data-dir", worker.settings.data_dir) if arguments[0] == "export" else ()
        done = await command(*arguments, *here, *where(worker))
        while "remains" in line and done.returncode == 1:  # entries are overwritten one by one
            await asyncio.sleep(0.5)
            done = await command(*arguments, *here, *where(worker))
        assert done.returncode == 0, (line, done.stdout, done.stderr)


@pytest.mark.process
async def test_a_session_keeps_its_position_after_all_files_except_the_nats_stream_are_lost(
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
