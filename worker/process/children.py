"""Runs this program's modules in child processes, which end with their parent."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from anyio.abc import Process

#: The first words of this program's command line.
PROGRAM: Final = (sys.executable, "-P", "-m", "commands")


async def start(words: Sequence[str], *, stdout: int | None = None) -> Process:
    """Start a child process of this program.

    The child has its own process session, since Ctrl-C is for this process only. Its standard input is a
    pipe, which closes if this process dies in any way; the child must end then. Raises `OSError`, as at the
    system's limit of processes or threads.
    """
    try:
        return await anyio.open_process(
            words, stdin=subprocess.PIPE, stdout=stdout, stderr=None, start_new_session=True
        )
    except RuntimeError as error:  # asyncio may wait for the child in a thread, which cannot be started
        raise OSError(errno.EAGAIN, str(error)) from error


@asynccontextmanager
async def ending(process: Process, patience_s: float) -> AsyncIterator[Process]:
    """Yield a child process; terminate it after the block, and kill it if it runs `patience_s` longer."""
    async with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError), anyio.CancelScope(shield=True):
                process.terminate()
                with anyio.move_on_after(patience_s):
                    await process.wait()
                process.kill()
