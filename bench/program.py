"""A measuring program of another room, run as a process: benches may not import what it measures."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from typing import TYPE_CHECKING

from .faults import BenchError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

#: The longest line that a program may print.
_LINE_BYTES = 1 << 20


async def lines(module: str, *arguments: object) -> AsyncGenerator[bytes]:
    """Run `python -m module` and yield the lines that it prints; end it whatever happens.

    Raises `BenchError` with the last line of its errors where it fails.
    """
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *map(str, arguments)),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=_LINE_BYTES,
            start_new_session=True,  # a Ctrl-C at the terminal is for the bench alone, which then ends it
        )
        try:
            if process.stdout is None:
                raise AssertionError("it was started with a pipe")
            async for line in process.stdout:
                yield line
            if await process.wait():
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                how = f": {said[-1]}" if said else f" with exit code {process.returncode}"
                raise BenchError(f"the measuring process ended{how}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
