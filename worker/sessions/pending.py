"""A request without a result, as it goes through the session's task. Pure."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final

from anyio import Event

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.images import files_of
from turnkeep_client.log import BEGAN_HEADER
from turnkeep_client.messages import Append, Generate, decode_request, encode
from worker.observe.traces import trace_headers
from worker.process.clock import monotonic, time
from worker.wire.consistent_reads import StoredMessage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from turnkeep_client.messages import Asked, Change, Request
    from worker.observe.traces import Phase

#: Bodies that are longer than this are not kept in memory beside the request.
_LONG: Final = 2**17
#: How many bytes of an invalid body its result has.
_INVALID: Final = 2**10


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request without a result."""

    seq: int
    #: None if the body is invalid; then `invalid` says why, and has the body's id, if any.
    request: Request | None
    invalid: InvalidMessageError | None
    #: When the log stored the request.
    stored: datetime
    #: The request as it was sent, but images by their digests, and empty if it is long, cut if it is invalid;
    #: and its headers that Turnkeep's clients have set.
    body: bytes = b""
    own_headers: Mapping[str, str] = field(default_factory=dict)
    received_s: float = field(default_factory=monotonic)
    #: Names the publisher's span.
    parent: Mapping[str, str] = field(default_factory=dict)
    #: Set once the request has a result, or the log is to be read again.
    done: Event = field(default_factory=Event)
    #: A cancelled request is not begun any more; if it runs, it ends soon.
    cancelled: bool = False
    # Written by the session, the last two when it begins the request: the sequence of its last known result,
    # and the NATS server process that it was read from.
    expired: bool = False
    after: int = 0
    server: str = ""
    #: Written by the execution: the request's tokens, once they may have KV.
    change: Change | None = None
    #: Written by the engine: the parts of the turn's time, for its span.
    phases: list[Phase] = field(default_factory=list)

    @property
    def id(self) -> str | None:
        """The request's id; None if the body has no valid id."""
        if self.invalid is not None:
            return self.invalid.request_id
        return self.request.id if self.request else None

    @property
    def began(self) -> datetime:
        """When the log stored the request; of a copied session's first request, when the original log did.

        Chat templates print the date on which a session began, so the copy gets the same tokens. A client
        that sends a false time in the header changes only its own prompt.
        """
        with suppress(ValueError):
            began = datetime.fromisoformat(self.own_headers.get(BEGAN_HEADER, ""))
            return began if began.tzinfo else self.stored
        return self.stored

    @property
    def stopped(self) -> bool:
        """Whether the request was cancelled or has expired, and so has to end as soon as possible."""
        return self.cancelled or self.expired

    @property
    def deadline_s(self) -> float | None:
        """The request's deadline in seconds since 1970; None without a deadline.

        It is counted from the time at which the log stored the request, so that a restart does not extend it.
        """
        request = self.request
        if not isinstance(request, Append | Generate) or request.deadline_s is None:
            return None
        return self.stored.timestamp() + request.deadline_s

    @property
    def size_bytes(self) -> int:
        """The bytes of the request and its headers, if it is not long."""
        return len(self.body) + sum(map(len, self.own_headers.values()))

    def waited_s(self, moment_s: float) -> float:
        """Return the seconds from when the log stored the request to `moment_s` of the monotonic clock."""
        return max(time() - self.stored.timestamp() - (monotonic() - moment_s), 0.0)

    @property
    def priority(self) -> int:
        """The request's priority; higher ones run first."""
        return self.request.priority if isinstance(self.request, Append | Generate) else 0

    @property
    def type(self) -> str:
        """The request's type, such as `generate`; `invalid` if its body could not be decoded."""
        return str(self.request.__struct_config__.tag) if self.request else "invalid"


def pending_at(entry: StoredMessage) -> PendingRequest:
    """Decode a request from the log. An invalid request becomes a `PendingRequest` with an error."""
    try:
        parent, own = trace_headers(entry.headers), _own(entry.headers)
        request = decode_request(entry.body)
        body = entry.body if len(entry.body) <= _LONG else b""  # a long one is read again when it is stored
        if files_of(request):
            body = encode(request)  # its result names the images by their digests
        return PendingRequest(entry.seq, request, None, entry.stored, body, own, parent=parent)
    except InvalidMessageError as error:
        # Its frames have the body, and in a circle the request: they would wait for the garbage collector.
        error.__cause__ = error.__context__ = None
        return PendingRequest(
            entry.seq, None, error.with_traceback(None), entry.stored, entry.body[:_INVALID]
        )


def asked_at(seq: int, asked: Asked, body: bytes) -> PendingRequest:
    """Rebuild the request at `seq` from its result's `asked`; `body` is the request as it was sent."""
    return pending_at(StoredMessage(seq, asked.stored, body, asked.headers))


def _own(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers with Turnkeep's names; NATS allows at most 64 KiB of headers."""
    own = {name: value for name, value in headers.items() if name.startswith("Turnkeep-")}
    return {name: value for name, value in own.items() if f"{name}{value}".isascii()}
