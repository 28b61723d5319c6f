"""The processes of workers: one waits for an order with all imports done, and takes the next one.

`supervisor` gives the orders, and reads the reports.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import anyio
from anyio import BrokenResourceError, IncompleteRead
from anyio.streams.buffered import BufferedByteReceiveStream

from .models.blas import computes_on_linux_cpu
from .process.children import start
from .reports import decode_report, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import Process

    from .process.settings import Settings
    from .reports import Order, Report

#: The command of a worker's process; the size of its spare memory follows.
_WORKER: Final = (sys.executable, "-P", "-m", "worker.main")
#: Freed memory that a worker keeps for reuse, and prepares at its start; on a Linux CPU only.
_SPARE_BYTES: Final = 2**28
_MAX_REPORT_BYTES: Final = 2**24


class Standby:
    """The process that waits for an order, if there is one. Event loop only."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._starting = anyio.Lock()

    async def hire(self) -> Process:
        """Return the process that waits for an order, and start one if there is none; it keeps waiting."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                spare_bytes = _SPARE_BYTES if computes_on_linux_cpu() else 0
                self._process = await start([*_WORKER, str(spare_bytes)], stdout=subprocess.PIPE)
            return self._process

    async def take(self) -> Process:
        """Return the process that waits for an order; the caller gives it one, and ends it."""
        while (process := await self.hire()) is not self._process:  # another model has taken it
            pass
        self._process = None
        return process

    async def dismiss(self) -> None:
        """End the process that waits for an order, if it has not ended by itself."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.aclose()


async def send_order(process: Process, order: Order | Settings) -> None:
    """Send an order, or settings that have changed; do nothing if the process has ended."""
    with contextlib.suppress(BrokenResourceError):
        await process.stdin.send(encode(order))  # type: ignore[union-attr]  # a pipe


async def reports(process: Process) -> AsyncIterator[Report]:
    """Yield the reports of a worker's process until it has ended."""
    lines = BufferedByteReceiveStream(process.stdout)  # type: ignore[arg-type]  # a pipe
    with contextlib.suppress(anyio.EndOfStream, IncompleteRead, BrokenResourceError):
        while True:
            yield decode_report(await lines.receive_until(b"\n", _MAX_REPORT_BYTES))
