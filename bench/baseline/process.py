"""Starts the baseline program and talks to it; ends it whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from bench.faults import BenchError

from .messages import Refused, decode_reply, encode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path
    from typing import IO

    from .messages import Command, Row

START_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 5.0
_MAX_LINE_BYTES: Final = 64 * 2**20


class BaselineError(BenchError):
    """The baseline program died, hangs or refused; one line."""


class Baseline:
    """A running baseline program. One command at a time."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self.pid = process.pid
        self._process = process
        self._errors = errors

    async def ask(self, command: Command, timeout_s: float) -> tuple[Row, ...]:
        """Send a command and return what it answers. Raises `BaselineError`."""
        if self._process.stdin is None:
            raise AssertionError("it was started with a pipe")
        with contextlib.suppress(ConnectionError):  # it has died: the reply that is missing says so
            self._process.stdin.write(encode(command))
            await self._process.stdin.drain()
        return await self.hear(timeout_s)

    async def hear(self, timeout_s: float) -> tuple[Row, ...]:
        """Wait for a reply. Raises `BaselineError`."""
        if self._process.stdout is None:
            raise AssertionError("it was started with a pipe")
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
                if not line.endswith(b"\n"):
                    raise BaselineError(await self._death())
        except TimeoutError:
            raise BaselineError(f"the baseline process did not answer within {timeout_s:g} s") from None
        try:
            reply = decode_reply(line)
        except msgspec.DecodeError as error:
            raise BaselineError(f"the baseline process says what nobody understands: {error}") from None
        if isinstance(reply, Refused):
            raise BaselineError(f"the baseline process refused: {reply.why}")
        return reply.rows

    async def stop(self) -> None:
        """End it: the end of its input should do; what is left is killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """`kill -9`, without waiting."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _death(self) -> str:
        code = await self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        said = f": {lines[-1]}" if lines else ""
        return f"the baseline process ended with exit code {code}{said}"


@asynccontextmanager
async def running(model: Path, *, preload: str | None, prefill_step: int = 2048) -> AsyncGenerator[Baseline]:
    """Run the baseline program with a model folder, with the library `preload` in place of MLX's own.

    Raises `BaselineError` where it does not come up. Afterwards it is ended.
    """
    environment = dict(os.environ) | ({} if preload is None else {"LD_PRELOAD": preload})
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.baseline.engine", str(model), str(prefill_step)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environment,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # a Ctrl-C at the terminal is for the bench alone, which then ends it
        )
        baseline = Baseline(process, errors)
        try:
            await baseline.hear(START_TIMEOUT_S)
            yield baseline
        except BaseException:
            baseline.kill()
            raise
        finally:
            with contextlib.suppress(TimeoutError):
                await baseline.stop()
