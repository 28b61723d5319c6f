"""Fetches a worker's metrics, and keeps them for a second."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

from turnkeep_client.errors import NoServerError, NoWorkerError, RequestFailedError, TurnkeepError
from turnkeep_client.messages import UNLOADED

from .turn import NotStoredError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics

#: How long a worker's metrics are used before they are fetched again.
_SEEN_S: Final = 1.0
#: The pause between two attempts to reach a worker.
_BETWEEN_S: Final = 0.1


class LatestMetrics:
    """The latest metrics of the worker behind one client. Event loop only."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._metrics: Metrics | None = None
        self._seen_s = float("-inf")

    async def worker(self, *, patience_s: float = 0.0, now: bool = False) -> Metrics:
        """Return the worker's metrics, at most a second old; with `now`, fetch new ones.

        Without `now`, wait up to `patience_s` for a worker that has answered before, such as one that
        restarts. Raises `NoWorkerError`, and `RequestFailedError` if the worker refuses to answer.
        """
        if now:
            self._seen_s = float("-inf")
            return await self._while_connected(self.worker())
        until_s = time.monotonic() + (0.0 if self._metrics is None else patience_s)
        while self._metrics is None or time.monotonic() - self._seen_s > _SEEN_S:
            try:
                self._metrics = await self._client.worker_metrics()
            except (NoWorkerError, RequestFailedError) as error:
                may_try = isinstance(error, NoWorkerError) or error.retryable
                if time.monotonic() >= until_s or not may_try:
                    raise
                await asyncio.sleep(_BETWEEN_S)
            else:
                self._seen_s = time.monotonic()
        return self._metrics

    async def storing(self, *, patience_s: float) -> Metrics:
        """Return the worker's metrics; wait up to `patience_s` while requests or answers are not stored.

        Raises as `worker`, and `NotStoredError`.
        """
        until_s = time.monotonic() + patience_s
        while True:
            found = await self.worker(patience_s=patience_s)
            if (error := await self.not_stored()) is None:
                return found
            if time.monotonic() >= until_s:
                raise error
            await asyncio.sleep(_BETWEEN_S)

    async def not_stored(self) -> NotStoredError | None:
        """Return the error if requests or answers are not stored; None also if no worker answers."""
        with contextlib.suppress(TurnkeepError):
            if not (worker := await self.worker()).recorded:
                return NotStoredError(worker.refusal)
        return None if self._client.stores else NotStoredError()

    async def _while_connected(self, asking: Coroutine[Any, Any, Metrics]) -> Metrics:
        """Wait for a worker's metrics. Raises `NoWorkerError`, also once NATS is disconnected."""
        task = asyncio.create_task(asking)
        try:
            while self._client.connected and not task.done():
                await asyncio.wait([task], timeout=_BETWEEN_S)
            if task.done():
                return task.result()
            raise NoServerError("the connection to the NATS server is lost")
        finally:
            task.cancel()

    @property
    def max_message_bytes(self) -> int:
        """The size of the largest message that the worker takes, from its latest metrics; 0 if unknown."""
        return self._metrics.max_message_bytes if self._metrics else 0

    async def loadable(self) -> None:
        """Try again to load a model that could not be loaded; raise `RequestFailedError` if it is not soon.

        A turn would wait in the log, and its client would not get the reason.
        """
        worker = await self.worker()
        if worker.device != UNLOADED or not worker.refusal:
            return
        try:
            await self._client.session("any").info(limit=0)
        except NoWorkerError:
            raise RequestFailedError("internal", worker.refusal, retryable=True) from None
        except RequestFailedError as error:
            if error.code != "unknown_session":
                raise

    async def is_loaded(self) -> bool:
        """Whether the worker has its model loaded; also True if that is unknown, as no worker answers."""
        try:
            return (await self.worker()).device != UNLOADED
        except TurnkeepError:
            return True
