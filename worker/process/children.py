"""Runs `turnkeep` commands in child processes, which end with their parent."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from anyio.abc import Process

#: The first words of this program's command line.
PROGRAM: Final = (sys.executable, "-P", "-m", "commands")


@asynccontextmanager
async def child(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    patience_s: float,
    stdout: int | None = None,
) -> AsyncIterator[Process]:
    """Run this program as a child process. After the block terminate it, and kill it after `patience_s`.

    The child has its own process session, since Ctrl-C is for this process only. Its standard input is a
    pipe, which closes if this process dies in any way; the child must end then.
    """
    async with await anyio.open_process(
        [*PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=None,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError), anyio.CancelScope(shield=True):
                process.terminate()
                with anyio.move_on_after(patience_s):
                    await process.wait()
                process.kill()
