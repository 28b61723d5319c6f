"""Runs processes of this program that end with it."""

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

#: Begins the command line of this program.
PROGRAM: Final = (sys.executable, "-P", "-m", "commands")


@asynccontextmanager
async def child(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    patience_s: float,
    stdout: int | None = None,
) -> AsyncIterator[Process]:
    """Run this program as another process until the block ends; after `patience_s` it is killed.

    It has a session of its own, as Ctrl-C is for this process. Its standard input is a pipe, whose other end
    is closed if this process dies in any way: it must end then.
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
