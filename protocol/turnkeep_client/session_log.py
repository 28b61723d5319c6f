"""Reads a session's log: its requests, each with its result, in the order of the results.

The only reader that knows how the log stores requests and results. `history`, the operators' tools and the
gateway's recovery are filters over what it returns. Needs no worker.
"""

from __future__ import annotations

from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar

from msgspec import Struct

from .checkpoints import Link, backwards
from .errors import InvalidMessageError
from .log import BEGAN_HEADER, PARTS_HEADER, Entry, derived_seed
from .messages import Failed, Generate, Generated, decode_request, decode_result
from .subjects import SessionKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence

    from .messages import Request, Result
    from .stream import LogStream

_T = TypeVar("_T")

#: How many sequences of the stream the first part of a log has that is read from its end.
TAIL: Final = 256


class LoggedRequest(NamedTuple):
    """A request in the log, at the sequence `entry.seq`; `request` is None if it is not valid."""

    entry: Entry
    request: Request | None


class LoggedResult(NamedTuple):
    """A result in the log, at the sequence `entry.seq`; `result` is None if no worker wrote it."""

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
        return (self.answered.stored - self.asked.stored).total_seconds()

    @property
    def is_change(self) -> bool:
        """Whether the request changed the session."""
        return is_change(self.result)

    @property
    def seed(self) -> int | None:
        """The seed that the worker derived for a generate; None if it has one, or was not sampled."""
        request, asked = self.request, self.asked
        if (
            isinstance(request, Generate)
            and request.seed is None
            and (request.temperature or request.own_sampling)
        ):
            return derived_seed(asked.key, asked.seq) if asked.seed is None else asked.seed
        return None


class SessionLog(Struct, frozen=True, dict=True):
    """The log of one session, or a part of it: its results from the sequence `start` on, in order.

    `asked` has the requests of these results, and the later requests. A request or a result is missing if
    the log has lost it, or if a closed session is being removed.
    """

    key: SessionKey
    asked: tuple[LoggedRequest, ...]
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


def is_change(result: Result) -> bool:
    """Whether a request with this result changed the session; no answer that was cancelled at once did."""
    if isinstance(result, Generated) and not result.tokens and result.finish_reason == "cancelled":
        return False
    return result.repeat_of is None and not is_failure(result)


def last_change(log: SessionLog) -> LoggedResult | None:
    """Return the last result that changed the session; None if this part of the log has none."""
    return next((one for one in reversed(log.answers) if one.result and is_change(one.result)), None)


def is_failure(result: Result) -> bool:
    """Whether a request failed, or was refused, according to its result."""
    return isinstance(result, Failed) or getattr(result, "type", "") == "failed"


def paired(key: SessionKey, entries: Iterable[Entry]) -> SessionLog:
    """Make the log of a session from its entries, of which the requests and the results are in order."""
    entries = [*entries]
    answers = [LoggedResult(one, decoded(decode_result, one.body)) for one in entries if one.kind == "out"]
    return _joined(key, [one for one in entries if one.kind == "in"], answers, 1)


def _joined(
    key: SessionKey, requests: Iterable[Entry], answers: Sequence[LoggedResult], start: int
) -> SessionLog:
    seqs = {one.result.seq for one in answers if one.result}
    asked = (  # an earlier part of the log has the results of the other requests before `start`
        LoggedRequest(one, decoded(decode_request, one.body))
        for one in requests
        if one.seq >= start or one.seq in seqs
    )
    return SessionLog(key, tuple(asked), tuple(answers), start)


async def read(stream: LogStream, key: SessionKey, start: int = 1, end: float = inf) -> SessionLog:
    """Read a session's results stored from the sequence `start` to before `end`, and their requests.

    Also reads the requests stored in that part of the log that have no result there. Needs
    `$JS.API.DIRECT.GET.<log>`. Raises `NoWorkerError`.
    """
    # Results are read first, so that the request of each result is read.
    results = [one async for one in _entries(stream, key, "out", start, end)]
    answers = [LoggedResult(one, decoded(decode_result, one.body)) for one in results]
    first = min((one.result.seq for one in answers if one.result and one.result.seq), default=start)
    requests = [one async for one in _entries(stream, key, "in", max(1, min(first, start)), end)]
    return _joined(key, requests, answers, start)


async def tails(stream: LogStream, key: SessionKey, end: int | None = None) -> AsyncIterator[SessionLog]:
    """Yield longer and longer last parts of a session's log, at last the whole log.

    The parts end before the sequence `end`; with None, after the last request and result. So the last turns
    of a long session cost no more than those of a short one. Raises `NoWorkerError`.
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
    found = [one for kind in ("in", "out") for one in await stream.first(key, kind, num, start)]
    return paired(key, filter(None, map(stream.entry, found)))


async def entries(stream: LogStream, tenant: str) -> AsyncIterator[Entry]:
    """Yield all requests and results of a tenant, in the order in which the log stored them.

    Needs `$JS.API.DIRECT.GET.<log>`. Raises `NoWorkerError`.
    """
    async for _, one in stream.every(SessionKey(tenant, "*")):
        if (found := stream.entry(one)) is not None:
            yield found


async def find_request(stream: LogStream, key: SessionKey, seq: int) -> LoggedRequest | None:
    """Read the request that was stored at a sequence; None if the log does not have it."""
    stored = await stream.get(key, "in", seq)
    found = stored and stream.entry(stored)
    return LoggedRequest(found, decoded(decode_request, found.body)) if found else None


async def last_parts(stream: LogStream, tenant: str) -> dict[SessionKey, SessionLog]:
    """Read of each session of a tenant the last request and the last result.

    Needs `$JS.API.DIRECT.GET.<log>`; with more than 1,024 sessions also `$JS.API.STREAM.INFO.<log>`. Raises
    `NoWorkerError`.
    """
    requests, results = await stream.latest(tenant, "in"), await stream.latest(tenant, "out")
    found = {}
    for key in {**requests, **results}:
        stored = [one for one in (requests.get(key), results.get(key)) if one]
        log = paired(key, filter(None, map(stream.entry, stored)))
        start = log.answers[-1].entry.seq if log.answers else 1
        found[key] = SessionLog(key, log.asked, log.answers, start)
    return found


class End(NamedTuple):
    """The last result and the last request of a session; a request that has a result may be left out."""

    answered: Entry | None
    asked: Entry | None


async def ends(
    stream: LogStream, keys: Collection[SessionKey], waiting: Iterable[SessionKey] | None = None
) -> dict[SessionKey, End]:
    """Read the ends of the logs of sessions, of which only some may have a request without a result.

    `waiting` has the keys of these; None: all may. Leaves out sessions that the log does not have. Needs
    `$JS.API.DIRECT.GET.<log>`. Raises `NoWorkerError`.
    """
    results = {key: stream.entry(one) async for key, one in stream.last(keys, "out")}
    requests = {
        key: stream.entry(one) async for key, one in stream.last(keys if waiting is None else waiting, "in")
    }
    return {key: End(results.get(key), requests.get(key)) for key in {**results, **requests}}


def num_waiting(kinds: Mapping[str, int]) -> int:
    """Return how many requests have no result, given a session's numbers of entries."""
    return max(kinds.get("in", 0) - kinds.get("out", 0), 0)


async def read_part(stream: LogStream, answered: Entry) -> bytes | None:
    """Read the data that did not fit into a result (`PARTS_HEADER`); None if it is gone or changed."""

    async def body(seq: int) -> bytes | None:
        stored = await stream.get(answered.key, "checkpoint", seq)
        return stored.body if stored else None

    messages = [one async for one in backwards(Link.parse(answered.headers[PARTS_HEADER]), body)]
    parts = [one.part for one in messages[::-1] if one is not None]
    return b"".join(parts) if parts and len(parts) == len(messages) else None


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
