"""Reads what running turns request of the event loop: KV on SSD, and images. Event loop only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from worker.device.turn import ImageRequest, KvRead, KvRequest

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from worker.device.device import Device
    from worker.device.turn import ImageViews
    from worker.observe.telemetry import Telemetry

    from .kv_lookup import TurnSnapshots
    from .run import Run


class NeedsReader:
    """Answers the requests in `Run.needs`."""

    def __init__(self, device: Device, telemetry: Telemetry) -> None:
        self._device = device
        self._telemetry = telemetry
        self._looking = asyncio.Lock()

    async def serve(self, run: Run, snapshots: TurnSnapshots | None, reads: TaskGroup) -> None:
        """Start a task in `reads` for each request of a run's turn, until cancelled.

        Must be a task: with sniffio installed, anyio cannot start a task from a callback of the loop.
        """
        while True:
            match await run.needs.get():
                case ImageRequest() as needs:
                    reads.start_soon(self._look, needs)
                case KvRequest() as needs if snapshots is not None:
                    reads.start_soon(self._read, needs, snapshots)

    async def _look(self, needs: ImageRequest) -> None:
        """Show a turn an image that it needs, or why it cannot be shown."""
        try:
            views: ImageViews = await self._views(needs)
        except Exception as error:  # noqa: BLE001  # the turn fails with it
            views = error
        self._device.show(needs.turn, needs.fingerprint, views)

    async def _views(self, needs: ImageRequest) -> ImageViews:
        """Read an image and process it; one at a time, since its pixels take much memory."""
        read, vision_model = needs.turn.request.read_image, self._device.served.vision_model
        if read is None or isinstance(vision_model, str):
            raise ValueError("the request cannot read its images")
        data = await read(needs.fingerprint)
        async with self._looking:
            return await asyncio.to_thread(vision_model.processor.views, data)

    async def _read(self, needs: KvRequest, snapshots: TurnSnapshots) -> None:
        kv = KvRead()
        try:
            kv = await snapshots.read(needs)
        finally:
            self._device.give(needs.turn, kv)  # even after an error: a prompt waits
        self._telemetry.totals.recalled_tokens += sum(span.num_tokens for span in kv.spans)
