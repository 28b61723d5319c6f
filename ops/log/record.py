"""Pairs the requests of a log with their results, and selects those that can be replayed. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from msgspec import structs

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import derived_seed
from turnkeep_client.messages import (
    STOPPED,
    Append,
    Close,
    Failed,
    Generate,
    Generated,
    Open,
    UnknownResult,
    decode_request,
    decode_result,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime

    from turnkeep_client.log import Entry
    from turnkeep_client.messages import Request, Result

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its result; `asked` and `answered` are their entries in the log."""

    request: Request
    result: Result
    asked: Entry
    answered: Entry

    @property
    def took_s(self) -> float:
        """Seconds from the request to its result, by the log's timestamps."""
        return (self.answered.stored - self.asked.stored).total_seconds()


@dataclass(frozen=True, slots=True)
class Record:
    """Recorded sessions by name, with the exchanges to replay. `left_out` counts all others by reason."""

    sessions: dict[str, list[Exchange]]
    left_out: dict[str, int]

    @property
    def num_requests(self) -> int:
        """The number of requests of all sessions."""
        return sum(map(len, self.sessions.values()))

    @property
    def begin(self) -> datetime:
        """The time at which the first request was stored."""
        return min(exchanges[0].asked.stored for exchanges in self.sessions.values())


def pair_up(entries: Sequence[Entry]) -> Iterator[Exchange]:
    """Yield each answered request of a log with its result."""
    results: dict[int | None, tuple[Result, Entry]] = {}
    for entry in entries:
        if entry.kind == "out" and (result := decoded(decode_result, entry.body)) is not None:
            results.setdefault(result.seq, (result, entry))
    for entry in entries:
        if entry.kind == "in" and entry.seq in results:
            request = decoded(decode_request, entry.body)
            if request is not None:
                result, answered = results[entry.seq]
                yield Exchange(request, result, entry, answered)


def within(
    entries: Sequence[Entry], sessions: Sequence[str], since: datetime | None, until: datetime | None
) -> list[Entry]:
    """Return the entries of `sessions` (empty: of all sessions) that were stored before `until`.

    Leaves out each session whose first entry was stored before `since`.
    """
    begun: dict[str, datetime] = {}
    for entry in entries:
        begun.setdefault(entry.key.session, entry.stored)
    return [
        entry
        for entry in entries
        if (not sessions or entry.key.session in sessions)
        and (since is None or begun[entry.key.session] >= since)
        and (until is None or entry.stored < until)
    ]


def fold(entries: Sequence[Entry]) -> Record:
    """Return the sessions of a log that can be replayed, without forks, and without requests of no effect."""
    sessions: defaultdict[str, list[Exchange]] = defaultdict(list)
    joined, forks = list(pair_up(entries)), set[str]()
    left_out = Counter({"not valid, or not answered": sum(one.kind == "in" for one in entries) - len(joined)})
    for one in joined:
        if isinstance(one.request, Open) and not isinstance(one.result, Failed):
            (forks.add if one.request.from_ else forks.discard)(one.asked.key.session)
        if one.asked.key.session in forks:
            left_out["of a fork"] += 1
        elif one.result.repeat_of is not None:
            left_out["repeated"] += 1
        elif isinstance(one.result, UnknownResult):
            left_out["of a newer version"] += 1
        elif isinstance(one.result, Failed):
            left_out["refused"] += 1
        elif _is_withdrawn(one.result):
            left_out["cancelled before the first token"] += 1
        elif isinstance(one.request, Close) and one.asked.key.session not in sessions:
            left_out["of a forgotten session"] += 1
        else:
            sessions[one.asked.key.session].append(replace(one, request=_playable(one)))
    for exchanges in sessions.values():
        if isinstance(exchanges[-1].request, Close):  # a replay ends all of its sessions itself
            exchanges.pop()
    return Record(
        {name: some for name, some in sessions.items() if some},
        {reason: times for reason, times in left_out.items() if times},
    )


def _is_withdrawn(result: Result) -> bool:
    return isinstance(result, Generated) and not result.tokens and result.finish_reason == "cancelled"


def _playable(one: Exchange) -> Request:
    """Return the request to replay: it has the answer's seed and length, but no deadline or position."""
    request, result = one.request, one.result
    changes: dict[str, object] = {"expect_position": None}
    if isinstance(request, Append | Generate):
        changes["deadline_s"] = None
    if isinstance(request, Close):
        changes["forget"] = False  # later exchanges are compared, too
        changes["cancel"] = False  # an answer that it has ended is replayed with its length
    if isinstance(request, Generate) and isinstance(result, Generated):
        changes["seed"] = request.seed if (seed := seed_of(one)) is None else seed
        if result.finish_reason in STOPPED:
            changes["max_tokens"] = len(result.tokens)
            changes["min_tokens"] = min(request.min_tokens, len(result.tokens))
    return structs.replace(request, **changes)


def seed_of(one: Exchange) -> int | None:
    """Return the seed that the worker derived for a generate; None if it has one, or was not sampled."""
    request, entry = one.request, one.asked
    if (
        isinstance(request, Generate)
        and request.seed is None
        and (request.temperature or request.own_sampling)
    ):
        return derived_seed(entry.key, entry.seq) if entry.seed is None else entry.seed
    return None


def decoded(decode: Callable[[bytes], T], body: bytes) -> T | None:
    """Decode a body; None if it is not valid."""
    try:
        return decode(body)
    except InvalidMessageError:
        return None
