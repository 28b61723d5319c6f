"""The page about the log: its commands run as they are written, in their order."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.commands.command_runs import turnkeep, where

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = (Path(__file__).parents[2] / "docs" / "log.md").read_text()


async def test_the_commands_run_as_they_are_written(local_worker: Callable[..., Any], tmp_path: Path) -> None:
    worker = await local_worker()
    await worker.client.session("garden").generate(text="What is red?", max_tokens=8)
    commands = [
        line.partition("#")[0].strip()
        for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(commands) >= 7
    for command in commands:
        _, *arguments = shlex.split(command.replace("--into-prefix turnkeep", ""))
        done = await asyncio.to_thread(turnkeep, *arguments, *where(worker))
        assert done.returncode == 0, (command, done.stdout, done.stderr)
