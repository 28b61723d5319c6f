"""Keeps figures and history of the workers of a subject prefix, from their messages. Event loop only."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ops.fleet import Fleet
from ops.history import FigureHistory

if TYPE_CHECKING:
    from turnkeep_client.client import Client

#: Rates and percentiles cover this time.
_WINDOW_S: Final = 60.0
_LINES: Final = 200
_STYLES: Final = re.compile(r"\x1b\[[0-9;]*m")


class Log:
    """Keeps the last lines of a worker's log."""

    def __init__(self) -> None:
        self._lines = deque[str](maxlen=_LINES)
        self._rest = b""

    def add(self, said: bytes) -> None:
        """Add output of the worker, of which the last line may be incomplete."""
        *lines, self._rest = (self._rest + said).split(b"\n")
        self._lines.extend(_STYLES.sub("", line.decode(errors="replace")) for line in lines)

    def shown(self) -> list[str]:
        """Return the complete lines, the oldest first."""
        return [*self._lines]


class LiveFigures:
    """Collects the figures and the history of all workers for the page, from their metrics messages."""

    def __init__(self, client: Client, keep_s: float) -> None:
        self._client = client
        self._fleet = Fleet(keep_s, window_s=_WINDOW_S)
        self._history = FigureHistory(keep_s)
        self._is_new = asyncio.Event()

    async def listen(self) -> None:
        """Receive the workers' metrics messages until the client is closed."""
        async for metrics in self._client.metrics():
            if self._fleet.hear(metrics):
                self._is_new.set()  # so that the page shows a new worker at once

    async def keep(self) -> NoReturn:
        """Add a point to the history every `FigureHistory.step_s` seconds, and when a new worker appears."""
        while True:
            self._is_new.clear()
            self._history.take(self._fleet.sightings(), time.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._history.step_s):
                    await self._is_new.wait()

    def shown(self, worker: str | None) -> dict[str, Any]:
        """Return the workers' figures, the history of `worker` (else of one that is up), and `connected`."""
        return {"connected": self._client.connected, **self._history.shown(worker)}
