"""Reads a session's log: its requests, each with its result, in the order of the results.

The only reader that knows how the log stores requests and results. `history`, the operators' tools and the
gateway's recovery are filters over what it returns. Needs no worker.
"""

from __future__ import annotations

import asyncio
from datetime import datetime  # noqa: TC003  # msgspec reads the annotations
from functools import cached_property, partial
from math import inf
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Struct

from .checkpoints import Link, read_value
from .errors import InvalidMessageError
from .log import BEGAN_HEADER, PARTS_HEADER, Entry, derived_seed
from .messages import (
    Closed,
    Failed,
    Generate,
    Generated,
    decode_asked,
    decode_linked,
    decode_request,
    decode_result,
)
from .subjects import SessionKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from .log import Stored
    from .messages import Asked, Request, Result
    from .stream import LogStream

_T = TypeVar("_T")

#: How many sequences of the stream the first part of a log has that is read from its end.
TAIL: Final = 256
#: How many sessions are read at a time, for a list of sessions.
_AT_ONCE: Final = 32


class LoggedRequest(NamedTuple):
    """A request in the log, at the sequence `entry.seq`; `request` is None if it is not valid."""

    entry: Entry
    request: Request | None


class LoggedResult(NamedTuple):
    """A result in the log, at the sequence `entry.seq`; `result` is None if it is not valid."""

    entry: Entry
    result: Result | None


class Exchange(NamedTuple):
    """A valid request and its first result, with their entries in the log."""

    request: Request
    result: Result
    asked: Entry
    answered: Entry

    @property
    def took_s(self) -> float:
        """Seconds from the request to its result, by the log's timestamps."""
        return (self.answered.first_stored - self.asked.stored).total_seconds()

    @property
    def changes_session(self) -> bool:
        """Whether the request changed the session."""
        return changes_session(self.result)

    @property
    def seed(self) -> int | None:
        """The seed that the worker derived for a generate; None for others.

        That is also None if the generate has a seed of its own, or needed none, with a temperature of 0.
        """
        request, asked = self.request, self.asked
        if (
            isinstance(request, Generate)
            and request.seed is None
            and (request.temperature or request.own_sampling)
        ):
            return derived_seed(asked.key, asked.seq) if asked.seed is None else asked.seed
        return None


class SessionLog(Struct, frozen=True, dict=True):
    """The log of one session, or its part from the sequence `start` on.

    Answered requests are read from the log's queue (`in`) or, once they have left it, from their results; of
    a long invalid request only the beginning is left then. A result is missing if the log has lost it.
    Entries from before a close that forgets the session are left out, as they are being removed.
    """

    key: SessionKey
    #: The requests of `answers`, and the requests without a result, in order.
    asked: tuple[LoggedRequest, ...]
    #: The results, in order.
    answers: tuple[LoggedResult, ...]
    start: int = 1

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Each valid request with its first result, in the order of the results."""
        requests = {entry.seq: (entry, request) for entry, request in self.asked if request is not None}
        found: dict[int, Exchange] = {}
        for answered, result in self.answers:
            seq = None if result is None else result.seq
            if result is not None and seq in requests and seq not in found:
                asked, request = requests[seq]
                found[seq] = Exchange(request, result, asked, answered)
        return tuple(found.values())

    @cached_property
    def waiting(self) -> tuple[LoggedRequest, ...]:
        """The requests without a result, in order."""
        answered = {one.result.seq for one in self.answers if one.result}
        return tuple(one for one in self.asked if one.entry.seq not in answered)

    @property
    def is_copy(self) -> bool:
        """Whether the session was imported from another log."""
        return any(BEGAN_HEADER in one.entry.headers for one in self.asked)


def changes_session(result: Result) -> bool:
    """Whether a request with this result changed the session.

    It did not if it failed, was cancelled before its first token, or is a repeat.
    """
    if isinstance(result, Generated) and not result.tokens and result.finish_reason == "cancelled":
        return False
    return result.repeat_of is None and not is_failure(result)


def last_change(log: SessionLog) -> LoggedResult | None:
    """Return the last result that changed the session; None if this part of the log has none."""
    return next((one for one in reversed(log.answers) if one.result and changes_session(one.result)), None)


def is_failure(result: Result) -> bool:
    """Whether a request failed, or was refused, according to its result."""
    return isinstance(result, Failed) or getattr(result, "type", "") == "failed"


def paired(key: SessionKey, entries: Iterable[Entry]) -> SessionLog:
    """Return the log of a session, made from entries: its requests in order, and its results in order."""
    entries = [*entries]
    answers = [LoggedResult(one, decoded(decode_result, one.body)) for one in entries if one.kind == "out"]
    return _joined(key, [one for one in entries if one.kind == "in"], answers, 1)


def _joined(
    key: SessionKey, queue: Iterable[Entry], answers: Sequence[LoggedResult], start: int
) -> SessionLog:
    """Make a log from results, and from requests that are in the queue or are too long for a result."""
    requests = {one.seq: one for one in queue}
    requests |= {one.seq: one for one in map(_request_in, answers) if one is not None}
    asked = [LoggedRequest(one, decoded(decode_request, one.body)) for _, one in sorted(requests.items())]
    for closed in reversed(answers):
        if isinstance(closed.result, Closed) and closed.result.forgotten is not None:
            asked = [one for one in asked if one.entry.seq >= (closed.result.seq or 0)]
            answers = [one for one in answers if _asked_at(one) >= _asked_at(closed)]
            break
    return SessionLog(key, tuple(asked), tuple(answers), start)


def _asked_at(answered: LoggedResult) -> int:
    """Return the sequence of a result's request; if the result names none, its own."""
    return (answered.result and answered.result.seq) or answered.entry.seq


def _request_in(answered: LoggedResult) -> Entry | None:
    """Return the request that a result has, as it was stored; None if there is none, or a link."""
    return _stored(answered, decode_asked(answered.entry.body))


def _stored(answered: LoggedResult, asked: Asked | None) -> Entry | None:
    result = answered.result
    if asked is None or asked.request is UNSET or result is None or result.seq is None:
        return None
    body = bytes(asked.request)
    if body.startswith(b'"'):  # an invalid request, or its beginning
        body = msgspec.json.decode(body, type=str).encode()
    return Entry(result.seq, answered.entry.key, "in", asked.stored, body, asked.headers)


async def _long_requests(stream: LogStream, answers: Iterable[LoggedResult]) -> list[Entry]:
    """Read the requests that are too long for these results, and are stored in other messages."""
    found = []
    for answered in answers:
        asked = decode_asked(answered.entry.body)
        if asked is not None and asked.link:
            linked = decode_linked(await _long(stream, answered.entry.key, asked.link))
            found.append(_stored(answered, linked))
    return [one for one in found if one is not None]


async def _read(
    stream: LogStream, key: SessionKey, results: Iterable[Entry], queue: Iterable[Entry], start: int
) -> SessionLog:
    answers = [LoggedResult(one, decoded(decode_result, one.body)) for one in results]
    return _joined(key, [*queue, *await _long_requests(stream, answers)], answers, start)


async def read(stream: LogStream, key: SessionKey, start: int = 1, end: float = inf) -> SessionLog:
    """Read a session's results stored from the sequence `start` to before `end`, and their requests.

    Also reads the requests stored in that part of the log that have no result there. Needs
    `$JS.API.DIRECT.GET.<log>`. Raises `NoWorkerError`.
    """
    # The queue is read first: a request that leaves it meanwhile has a result, which is read then.
    queue = [one async for one in _entries(stream, key, "in", start, end)]
    results = [one async for one in _entries(stream, key, "out", start, end)]
    return await _read(stream, key, results, queue, start)


async def queued(stream: LogStream, key: SessionKey) -> tuple[LoggedRequest, ...]:
    """Read the requests of a session that have no result, in order. Raises `NoWorkerError`."""
    queue = [one async for one in _entries(stream, key, "in", 1, inf)]
    if not queue:
        return ()
    results = [one async for one in _entries(stream, key, "out", queue[0].seq, inf)]
    answers = [LoggedResult(one, decoded(decode_result, one.body)) for one in results]
    return _joined(key, queue, answers, queue[0].seq).waiting


async def tails(stream: LogStream, key: SessionKey, end: int | None = None) -> AsyncIterator[SessionLog]:
    """Yield the end of a session's log, then ever longer ends of it, finally the whole log.

    All end before the sequence `end`; with None, after the last request and result. So a caller that stops
    early reads the last turns of a long session as fast as those of a short one. Raises `NoWorkerError`.
    """
    if end is None:
        seqs = [one.seq async for _, one in stream.last([key], "in")]
        end = 1 + max(seqs + [one.seq async for _, one in stream.last([key], "out")], default=0)
    start, num = end, TAIL
    while start > 1:
        start, num = max(1, end - num), 4 * num
        yield await read(stream, key, start, end)


async def first(stream: LogStream, key: SessionKey, num: int, start: int = 1) -> SessionLog:
    """Read a session's first `num` requests and results from the sequence `start` on.

    Needs `$JS.API.DIRECT.GET.<log>`. Raises `NoWorkerError`.
    """
    queue = [*filter(None, map(stream.entry, await stream.first(key, "in", num, start)))]  # as in `read`
    results = [*filter(None, map(stream.entry, await stream.first(key, "out", num, start)))]
    return await _read(stream, key, results, queue, start)


async def entries(stream: LogStream, tenant: str) -> AsyncIterator[Entry]:
    """Yield all requests and results of a tenant; a request twice if queue and result both have it.

    Needs `$JS.API.DIRECT.GET.<log>`. Raises `NoWorkerError`.
    """
    async for _, one in stream.every(SessionKey(tenant, "*")):
        if (found := stream.entry(one)) is None:
            continue
        yield found
        if found.kind == "out":
            for asked in (await _read(stream, found.key, [found], (), 1)).asked:
                yield asked.entry


async def find_request(stream: LogStream, key: SessionKey, seq: int) -> LoggedRequest | None:
    """Read the request that was stored at the sequence `seq`; None if the log does not have it."""
    stored = await stream.get(key, "in", seq)
    if stored and (found := stream.entry(stored)):
        return LoggedRequest(found, decoded(decode_request, found.body))
    async for answered in _entries(stream, key, "out", seq, inf):  # it may have left the queue
        result = decoded(decode_result, answered.body)
        if result is not None and result.seq == seq:
            log = await _read(stream, key, [answered], (), seq)
            return next(iter(log.asked), None)
    return None


class End(NamedTuple):
    """The end of a session's log."""

    #: The last result; None if there is none.
    answered: LoggedResult | None
    #: The requests without a result, in order.
    waiting: tuple[LoggedRequest, ...]
    #: The last result that changed the session, so has its state; None if there is none.
    changed: LoggedResult | None

    @property
    def last(self) -> Entry:
        """The last entry, in the order of the log; a session has at least one."""
        found = [one.entry for one in self.waiting[-1:]] + ([self.answered.entry] if self.answered else [])
        return max(found, key=lambda one: one.seq)

    @property
    def position(self) -> int | None:
        """The number of the session's tokens; None if no result states it."""
        state = self.changed or self.answered
        return state.result.position if state and state.result else None


async def ends(stream: LogStream, counts: Mapping[SessionKey, Mapping[str, int]]) -> dict[SessionKey, End]:
    """Read the ends of the logs of sessions; `counts` are as from `LogStream.subjects`.

    Leaves out sessions that have neither a result nor a request without one. Needs
    `$JS.API.DIRECT.GET.<log>`. Raises `NoWorkerError`.
    """
    queues = [key for key, kinds in counts.items() if "in" in kinds]
    asked = {key: one async for key, one in stream.last(queues, "in")}  # first, as in `read`
    return await _ends(stream, asked, {key: one async for key, one in stream.last(counts, "out")})


async def ends_of_all(stream: LogStream, tenant: str) -> dict[SessionKey, End]:
    """Read the ends of the logs of all sessions of a tenant, as `ends` does.

    With more than 1,024 sessions this also needs `$JS.API.STREAM.INFO.<log>`.
    """
    asked = await stream.latest(tenant, "in")
    return await _ends(stream, asked, await stream.latest(tenant, "out"))


async def _ends(
    stream: LogStream, asked: Mapping[SessionKey, Stored], results: Mapping[SessionKey, Stored]
) -> dict[SessionKey, End]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def end(key: SessionKey, result: Stored | None) -> End:
        entry = stream.entry(result) if result else None
        answered = LoggedResult(entry, decoded(decode_result, entry.body)) if entry else None
        last = answered.result if answered else None
        changed = answered if last is not None and changes_session(last) else None
        if last is not None and changed and (key not in asked or last.seq == asked[key].seq):
            return End(answered, (), changed)  # it was answered in its turn, so no earlier request waits
        async with places:
            waiting = await queued(stream, key) if key in asked else ()
            if answered is not None and changed is None:
                async for log in tails(stream, key):
                    if (changed := last_change(log)) is not None:
                        break
        if result is None and not waiting:  # it was answered after the results were read
            async for _, one in stream.last([key], "out"):
                return await end(key, one)
        return End(answered, waiting, changed)

    keys = [*{**results, **asked}]
    read = await asyncio.gather(*(end(key, results.get(key)) for key in keys))
    found = dict(zip(keys, read, strict=True))
    return {key: one for key, one in found.items() if one.answered or one.waiting}


async def read_part(stream: LogStream, answered: Entry) -> bytes | None:
    """Read the data that the header `PARTS_HEADER` of a result names; None if it is gone or changed."""
    return await _long(stream, answered.key, answered.headers[PARTS_HEADER])


async def _long(stream: LogStream, key: SessionKey, link: str) -> bytes | None:
    return await read_value(Link.parse(link), partial(stream.get, key, "checkpoint"))


async def _entries(
    stream: LogStream, key: SessionKey, kind: Literal["in", "out"], start: int, end: float
) -> AsyncIterator[Entry]:
    async for _, one in stream.every(key, kind, start, end):
        if (found := stream.entry(one)) is not None:
            yield found


def decoded(decode: Callable[[bytes], _T], body: bytes) -> _T | None:
    """Decode a body; None if it is not valid."""
    try:
        return decode(body)
    except InvalidMessageError:
        return None


class Listed(Struct, frozen=True, kw_only=True):
    """A session in the log. `position` is the number of its tokens, None before the first result.

    `last` is the time of its last request or result; `is_waiting` says whether a request has no result.
    """

    name: str
    position: int | None
    last: datetime
    is_waiting: bool
    is_closed: bool


def listed(by_key: Mapping[SessionKey, End]) -> list[Listed]:
    """Return the sessions with these ends of their logs as a list, most recently used first."""
    found = [
        Listed(
            name=key.session,
            position=end.position,
            last=end.last.stored,
            is_waiting=bool(end.waiting),
            is_closed=end.changed is not None and isinstance(end.changed.result, Closed),
        )
        for key, end in by_key.items()
    ]
    return sorted(found, key=lambda one: one.last, reverse=True)
