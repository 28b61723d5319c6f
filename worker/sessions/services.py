"""The services that all sessions of a worker share; `app` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any

    from turnkeep_client.subjects import SessionKey
    from worker.engine.port import EnginePort
    from worker.observe.counters import Telemetry
    from worker.observe.otlp import Traces
    from worker.process.rotation import Rotation
    from worker.wire.journal import Journal
    from worker.wire.outbox import Outbox
    from worker.wire.retention import Retention

    from .attachments import Attachments
    from .attempts import Attempts, SharedLock
    from .execution import Execution
    from .fold import Fold
    from .shares import Shares


@dataclass(frozen=True, slots=True)
class Services:
    """The objects that every session uses.

    `ack` acknowledges the deliveries of a session that has answered all its requests. `is_elsewhere` says
    whether another running worker has a session now, and `give_back` returns its deliveries. `shares` limits
    how many sessions of a tenant work at once, `reading` how many logs are read at once, for whichever
    tenant. `build` is the header of every result that names the worker, its version, device and precision.
    """

    journal: Journal
    outbox: Outbox
    engine: EnginePort
    execution: Execution
    fold: Fold
    telemetry: Telemetry
    attachments: Attachments
    ack: Callable[[SessionKey], Coroutine[Any, Any, None]]
    is_elsewhere: Callable[[SessionKey], Awaitable[bool]]
    give_back: Callable[[SessionKey], Awaitable[None]]
    reading: Rotation
    shares: Shares
    attempts: Attempts
    retention: Retention
    device_lock: SharedLock
    model: str
    worker: str
    build: str
    traces: Traces | None = None
