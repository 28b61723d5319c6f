"""The services that all sessions of a worker share; `app` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping
    from typing import Any

    from turnkeep_client.subjects import SessionKey
    from worker.cluster.erasures import Erasures
    from worker.engine.port import EnginePort
    from worker.observe.counters import Telemetry
    from worker.observe.otlp import Traces
    from worker.process.rotation import Rotation
    from worker.wire.journal import Journal
    from worker.wire.outbox import Outbox
    from worker.wire.retention import Retention

    from .attachments import Attachments
    from .attempts import Attempts, SharedLock
    from .fold import Fold
    from .formats import Formats
    from .limits import Limits
    from .shares import Shares

#: Bytes of a result and its headers besides the tokens of input and answer and their text. This includes
#: text held back for a stop string: 256 characters of up to 6 bytes each as JSON.
_RESULT_BYTES: Final = 4096
_MOST_INPUT: Final = 8192


@dataclass(frozen=True, slots=True)
class Services:
    """The objects and settings that every session uses."""

    journal: Journal
    outbox: Outbox
    engine: EnginePort
    fold: Fold
    formats: Formats
    limits: Limits
    telemetry: Telemetry
    attachments: Attachments
    attempts: Attempts
    retention: Retention
    device_lock: SharedLock
    #: How many sessions of a tenant work at once.
    shares: Shares
    #: How many logs are read at once, for whichever tenant.
    reading: Rotation
    #: Acknowledges the deliveries of a session that has answered all its requests.
    ack: Callable[[SessionKey], Coroutine[Any, Any, None]]
    #: Says whether another running worker has a session now.
    is_elsewhere: Callable[[SessionKey], Awaitable[bool]]
    #: Returns a session's deliveries.
    give_back: Callable[[SessionKey], Awaitable[None]]
    #: Has other workers drop a session's KV; returns for each data directory whether none is left.
    erase_elsewhere: Callable[[SessionKey], Awaitable[Mapping[str, bool]]]
    #: Notes of what was erased, and the name of this worker's data directory in them.
    erasures: Erasures
    directory: str
    #: The sampling options that the model's authors recommend.
    own_sampling: Mapping[str, float]
    #: For how long the token stream keeps chunks.
    token_ttl_s: float
    max_result_bytes: int
    model: str
    worker: str
    #: A header of every result, which names the worker, its version, device and precision.
    build: str
    traces: Traces | None = None

    @property
    def answer_bytes(self) -> int:
        """The bytes that an answer and its input may take, so that the log takes its result."""
        return max(self.max_result_bytes - _RESULT_BYTES, self.max_result_bytes // 4)

    @property
    def most_input(self) -> int:
        """Most characters of an input's encoded tokens in a result; longer inputs are stored before it."""
        return min(_MOST_INPUT, self.max_result_bytes // 16)
