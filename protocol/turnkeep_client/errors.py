"""The protocol's error codes, which of them may be retried, and the client's exceptions.

Knows nothing of the causes of errors in a worker.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, get_args

from msgspec import Struct

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

#: The unchanged request can succeed later under a new id.
RETRYABLE: Final[frozenset[ErrorCode]] = frozenset({"overloaded", "expired", "internal"})


class TokenLimit(Struct, frozen=True):
    """The tokens that a session would have before the answer (`asked`), and those that fit (`allowed`)."""

    asked: int
    allowed: int


class FieldError(ValueError):
    """A field is wrong; raised while decoding. `field` is its path within the struct that it is in."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


#: The `code` of a `StreamError` of a direct get that matches too many subjects.
TOO_MANY: Final = 413


class TurnkeepError(Exception):
    """Base class of all errors that the protocol and its client raise."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's own calls the constructor with `args`, and what a process pool cannot unpickle breaks it.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class InvalidMessageError(TurnkeepError):
    """A body or a name breaks the protocol; the message says what was wrong and what would be right.

    `request_id` is the invalid body's id, or None if that is invalid too. `field` is the path of the field
    that is wrong, such as `messages[0].role`; None if it is none, or several.
    """

    def __init__(self, message: str, *, request_id: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.field = field


class MessageTooLargeError(InvalidMessageError):
    """A request is larger than the NATS server or the log accepts; it was not stored."""


class RequestFailedError(TurnkeepError):
    """The worker answered a request with `failed`. A newer worker may send codes unknown to this client.

    `field` is the path of the field that is wrong, if one is. `limit` has the tokens asked for and those
    allowed, if the context is exceeded. `retryable` says that the same request may succeed later.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retryable: bool,
        field: str | None = None,
        limit: TokenLimit | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retryable = retryable
        self.field = field
        self.limit = limit

    def behind(self, start: int, name: str) -> RequestFailedError:
        """Return this error about a part of the list `name`, with the number that an item has in all of it.

        The part begins at `start`.
        """
        number = re.compile(rf"(?<=\b{name}\[)\d+")
        message, field = (
            number.sub(lambda found: str(start + int(found[0])), one, count=1)
            for one in (self.message, self.field or "")
        )
        return RequestFailedError(
            self.code, message, retryable=self.retryable, field=field or None, limit=self.limit
        )


class NoWorkerError(TurnkeepError):
    """No worker could be reached. Each of the three possible reasons has a subclass."""


class ClientClosedError(NoWorkerError):
    """The client was closed, by its program or by the NATS server."""


class NoServerError(NoWorkerError, ConnectionError):
    """There is no NATS server at the address, or the connection to the server is lost at the moment."""


class FullServerError(NoServerError):
    """The NATS server is there, but has no connection left (its `max_connections`)."""


class NoAnswerError(NoWorkerError):
    """The NATS server can be reached, but a request got no worker's answer; the message says why.

    No worker serves the subject or answered in time; or the prefix's log does not exist, cannot be read, or
    does not store the subject, which another stream has.
    """


class NotPermittedError(TurnkeepError):
    """The NATS server refuses this user, or does not allow it to publish or subscribe."""


class ResultTimeoutError(TurnkeepError, TimeoutError):
    """The caller's timeout passed. The request will be answered if the log has stored it."""


class ResultRemovedError(TurnkeepError):
    """The request left the log, by a close of its session, before its result was received.

    A tenant's mirror of the log also drops its oldest entries when it is full; workers still answer those.
    """


class AnswerNotParsedError(TurnkeepError):
    """An answer is incomplete, or is not JSON of the expected type."""


class StreamBrokenError(TurnkeepError):
    """Chunks of one answer contradict each other or the recorded result."""


class StreamError(TurnkeepError):
    """JetStream refused an operation on the log; the message says why. `code` is JetStream's error code."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class LastSequenceError(StreamError):
    """Another client has written to the log after the expected last sequence, so nothing was stored."""
