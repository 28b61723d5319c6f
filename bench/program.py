"""A measuring program, run as a process and heard by its lines: a bench imports neither a worker nor MLX."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from contextlib import asynccontextmanager
from typing import IO, TYPE_CHECKING, Final

from .faults import BenchError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

#: The longest line that a program may print.
_LINE_BYTES: Final = 64 << 20


class Program:
    """A running program. One line at a time is told and heard."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        if process.stdin is None or process.stdout is None:
            raise AssertionError("it was started with pipes")
        self.pid = process.pid
        self._process, self._errors = process, errors
        self._input, self._output = process.stdin, process.stdout

    async def send(self, line: bytes) -> None:
        """Write a line to its standard input."""
        with contextlib.suppress(ConnectionError):  # it has died, as `receive` will tell
            self._input.write(line + b"\n")
            await self._input.drain()

    async def receive(self, timeout_s: float | None = None) -> bytes:
        """Return the next line that it prints; none once it has ended well.

        Raises `BenchError`, with the last line of its errors where it has failed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._output.readline()
        except TimeoutError:
            raise BenchError(f"the measuring process did not answer within {timeout_s:g} s") from None
        if not line.endswith(b"\n") and (code := await self._process.wait()):
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise BenchError(": ".join([f"the measuring process ended with exit code {code}", *said]))
        return line


@asynccontextmanager
async def running(module: str, *arguments: object, preload: str | None = None) -> AsyncGenerator[Program]:
    """Run `python -m module`, with libraries to preload, and kill it at the end whatever happens."""
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *map(str, arguments)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=os.environ | ({"LD_PRELOAD": preload} if preload else {}),
            limit=_LINE_BYTES,
            start_new_session=True,  # a Ctrl-C at the terminal is for the bench alone, which then ends it
        )
        try:
            yield Program(process, errors)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def lines(module: str, *arguments: object) -> AsyncGenerator[bytes]:
    """Run `python -m module` and yield the lines that it prints. Raises `BenchError` where it fails."""
    async with running(module, *arguments) as program:
        while line := await program.receive():
            yield line
