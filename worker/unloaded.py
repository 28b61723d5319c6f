"""Stands in for a worker whose model was unloaded: locks its data directory and runs its NATS server.

No worker runs meanwhile: requests on `in` wait in the log, and core NATS requests fail at once, without a
responder. Never imports MLX.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import structlog
from anyio import Event

from worker.wire.broker import EmbeddedServer

from .observe.health import HealthServer
from .process.concurrency import background, shielded
from .process.datadir import DataDir

if TYPE_CHECKING:
    from .process.settings import Settings

log = structlog.get_logger()


class Unloaded:
    """Stands in for one worker: `run` runs the worker's NATS server until `stop` is called."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stop = Event()
        self.ready = Event()

    def stop(self) -> None:
        """Make `run` end. Event loop only."""
        self._stop.set()

    async def run(self) -> None:
        """Run the NATS server until `stop`. Raises `TurnkeepError` for errors that a user can fix."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            if settings.health is not None:
                health = HealthServer(settings.health, {"/livez": list, "/readyz": self._unready})
                await health.open()
                await stack.enter_async_context(background(health.serve))
            directory = stack.enter_context(
                DataDir.open(settings.data_dir, settings.worker, settings.nats_place, has_model=False)
            )
            if settings.nats is None:
                server = EmbeddedServer(directory, settings)
                server.check()
                stack.push_async_callback(shielded, server.stop)
                await server.start()
                await stack.enter_async_context(background(server.supervise))
            log.info("no model is loaded; requests wait in the log until the console serves one")
            self.ready.set()
            await self._stop.wait()

    def _unready(self) -> list[str]:
        return ["no model is loaded"]
