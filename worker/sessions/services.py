"""The services that all sessions of a worker share; `app` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping
    from typing import Any

    from anyio.abc import TaskGroup

    from turnkeep_client.subjects import SessionKey
    from worker.engine.port import EnginePort
    from worker.observe.otlp import Traces
    from worker.observe.telemetry import Telemetry
    from worker.process.concurrency import Rotation, SharedLock
    from worker.wire.erasures import Erasures
    from worker.wire.journal import Journal
    from worker.wire.outbox import Outbox
    from worker.wire.retention import Retention

    from .fold import Fold
    from .formats import Formats
    from .limits import RequestLimits
    from .shares import Shares


@dataclass(frozen=True, slots=True)
class Services:
    """The objects and settings that every session uses."""

    journal: Journal
    outbox: Outbox
    engine: EnginePort
    fold: Fold
    formats: Formats
    limits: RequestLimits
    telemetry: Telemetry
    retention: Retention
    device_lock: SharedLock
    #: After so many attempts that may have crashed a worker, a request is given up.
    max_attempts: int
    #: Identifies this worker process (`Member.boot`).
    boot: str
    #: Says whether another worker process, of this `boot`, still runs.
    runs: Callable[[str], Awaitable[bool]]
    #: Counts the other running workers that have requests of a session. Their attempts have crashed none,
    #: also if they seemed to have ended, as while a machine is asleep.
    num_busy: Callable[[SessionKey], Awaitable[int]]
    #: How many sessions of a tenant work at once.
    shares: Shares
    #: How many logs are read at once, for whichever tenant.
    reading: Rotation
    #: Acknowledges the deliveries of a session that has answered all its requests.
    ack: Callable[[SessionKey], Coroutine[Any, Any, None]]
    #: Says whether another running worker has a session now.
    is_elsewhere: Callable[[SessionKey], Awaitable[bool]]
    #: Returns a session's deliveries, and wakes the session at the worker that `is_elsewhere` has found.
    hand_over: Callable[[SessionKey], Awaitable[None]]
    #: Has other workers drop a session's KV; returns for each process whether none is left.
    erase_elsewhere: Callable[[SessionKey], Awaitable[Mapping[str, bool]]]
    #: Notes of what was erased.
    erasures: Erasures
    #: The names in these notes of what this worker erases itself: its process, and its remote tier if any.
    erases: tuple[str, ...]
    #: Runs tasks beside those of the sessions, until these have ended.
    asides: TaskGroup
    #: The sampling options that the model's authors recommend.
    own_sampling: Mapping[str, float]
    #: For how long the token stream keeps chunks.
    token_ttl_s: float
    model: str
    worker: str
    #: A header of every result, which names the worker, its version, device and precision.
    build: str
    traces: Traces | None = None
