"""A measuring program, run as a process that speaks in lines: a bench imports neither worker nor MLX."""

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

#: The longest line of a program's output.
_LINE_BYTES: Final = 64 << 20


class Program:
    """A running program, which reads and prints lines."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        if process.stdin is None or process.stdout is None:
            raise AssertionError("the process has no pipes")
        self.pid = process.pid
        self._process, self._errors = process, errors
        self._input, self._output = process.stdin, process.stdout

    async def send(self, line: bytes) -> None:
        """Write a line to the program's standard input."""
        with contextlib.suppress(ConnectionError):  # the program has died, which `receive` reports
            self._input.write(line + b"\n")
            await self._input.drain()

    async def receive(self, timeout_s: float | None = None) -> bytes:
        """Return the next line of output; empty once the program has ended without error.

        Raises `BenchError` after `timeout_s`, or with the program's last line of errors if it has failed.
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
    """Run `python -m module`, with libraries to preload; always kill the process at the end."""
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *map(str, arguments)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=os.environ | ({"LD_PRELOAD": preload} if preload else {}),
            limit=_LINE_BYTES,
            start_new_session=True,  # a Ctrl-C must reach the bench alone, which ends the program
        )
        try:
            yield Program(process, errors)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def lines(module: str, *arguments: object) -> AsyncGenerator[bytes]:
    """Run `python -m module` and yield its lines of output. Raises `BenchError` if it fails."""
    async with running(module, *arguments) as program:
        while line := await program.receive():
            yield line
