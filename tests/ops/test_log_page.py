"""The commands in docs/log.md run as they are written, in their order."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.command_runs import command, where
from tests.ops.test_dead import venomous
from turnkeep_client.errors import RequestFailedError
from worker.sessions.session import Session

pytestmark = pytest.mark.packaging

PAGE = (Path(__file__).parents[2] / "docs" / "log.md").read_text()


async def test_the_commands_of_the_log_page_run_as_written(
    local_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Session, "_attempt", venomous)
    worker = await local_worker(max_attempts=1)
    for name in ("garden", "kitchen", "diary", "diary"):
        await worker.client.session(name).generate(text="What is red?", max_tokens=8)
    for dead in ("turn-7", "turn-9"):
        with pytest.raises(RequestFailedError):
            await worker.client.session("garden").append(text="VENOM", request_id=dead)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    commands = [
        line.partition("#")[0].strip()
        for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(commands) >= 15
    for line in commands:
        _, *arguments = shlex.split(line.replace("--into-prefix turnkeep", ""))
        here = ("--data-dir", worker.settings.data_dir) if arguments[0] == "export" else ()
        done = await command(*arguments, *here, *where(worker))
        assert done.returncode == 0, (line, done.stdout, done.stderr)
