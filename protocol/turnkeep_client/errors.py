"""Error codes of the protocol, which of them are worth a retry, and the exceptions of the client side.

Knows nothing of how an error comes about in a worker.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

ErrorCode = Literal[
    "invalid_request",
    "id_conflict",
    "position_conflict",
    "unknown_session",
    "context_exceeded",
    "memory_exceeded",
    "overloaded",
    "expired",
    "history_diverged",
    "internal",
]

ERROR_CODES: Final[tuple[ErrorCode, ...]] = get_args(ErrorCode)

#: The same request under a new id can succeed later without being changed.
RETRYABLE: Final[frozenset[ErrorCode]] = frozenset({"overloaded", "expired", "internal"})


class TurnkeepError(Exception):
    """Root of everything that the protocol and its client raise."""


class InvalidMessageError(TurnkeepError):
    """A body or a name breaks the protocol; the message says what was wrong and what would be right.

    `request_id` is the valid id that such a body named, if it did.
    """

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class RequestFailedError(TurnkeepError):
    """The worker answered a request with `failed`."""

    def __init__(self, code: ErrorCode, message: str, *, retryable: bool) -> None:
        super().__init__(f"{code}: {message}")
        self.code: ErrorCode = code
        self.message = message
        self.retryable = retryable


class NoWorkerError(TurnkeepError):
    """Nothing answers: no NATS server at the address, or no worker behind it."""


class NotPermittedError(TurnkeepError):
    """The NATS server does not let this user publish there."""


class ResultTimeoutError(TurnkeepError, TimeoutError):
    """The caller's time is over. The request stays in the log and will be answered."""


class ResultRemovedError(TurnkeepError):
    """The request left the log before its result was heard: its session was forgotten, or closed long ago."""


class StreamBrokenError(TurnkeepError):
    """Chunks of one answer contradict each other or the recorded result."""
