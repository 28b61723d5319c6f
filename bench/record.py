"""Recorded sessions from a log: what to replay, and how a replayed answer compares. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

from msgspec import structs

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import derived_seed
from turnkeep_client.messages import (
    Append,
    Failed,
    Generate,
    Generated,
    decode_request,
    decode_result,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from turnkeep_client.log import Entry
    from turnkeep_client.messages import Request, Result

T = TypeVar("T")

#: Whether a replayed answer can be compared with the recorded one.
COMPARABLE, AFTER, OTHER = "comparable", "after a difference", "other context"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its result, with their entries in the log."""

    request: Request
    result: Result
    asked: Entry
    answered: Entry

    @property
    def took_s(self) -> float:
        """Seconds from request to result, by the log."""
        return (self.answered.stored - self.asked.stored).total_seconds()


@dataclass(frozen=True, slots=True)
class Record:
    """Sessions by name, with their replayable exchanges. `left_out` counts the others by reason."""

    sessions: dict[str, list[Exchange]]
    left_out: dict[str, int]

    @property
    def exchanges(self) -> list[Exchange]:
        """The exchanges of all sessions."""
        return [exchange for exchanges in self.sessions.values() for exchange in exchanges]

    @property
    def begin(self) -> datetime:
        """When the first request was sent."""
        return min(exchange.asked.stored for exchange in self.exchanges)

    @property
    def digest(self) -> str:
        """The digest of all requests: only replays of the same requests can be compared."""
        asked = (b"\n".join(_asked(one.request) for one in some) for some in self.sessions.values())
        return blake2b(b"\n\n".join(sorted(asked)), digest_size=8).hexdigest()


def pair_up(entries: Sequence[Entry]) -> Iterator[Exchange]:
    """Yield the requests of a log with their results."""
    results: dict[int | None, tuple[Result, Entry]] = {}
    for entry in entries:
        if entry.kind == "out" and (result := _decoded(decode_result, entry.body)) is not None:
            results.setdefault(result.seq, (result, entry))
    for entry in entries:
        if entry.kind == "in" and entry.seq in results:
            request = _decoded(decode_request, entry.body)
            if request is not None:
                result, answered = results[entry.seq]
                yield Exchange(request, result, entry, answered)


def models(exchanges: Iterable[Exchange]) -> tuple[str, ...]:
    """Return the models that have answered."""
    return tuple(sorted({exchange.answered.model for exchange in exchanges if exchange.answered.model}))


def fold(entries: Sequence[Entry]) -> Record:
    """Return the replayable record of a log, without exchanges that changed nothing."""
    sessions: defaultdict[str, list[Exchange]] = defaultdict(list)
    joined = list(pair_up(entries))
    left_out = Counter({"not valid, or not answered": sum(one.kind == "in" for one in entries) - len(joined)})
    for one in joined:
        if one.result.repeat_of is not None:
            left_out["repeated"] += 1
        elif isinstance(one.result, Failed):
            left_out["refused"] += 1
        elif isinstance(one.result, Generated) and not one.result.tokens:
            left_out["cancelled before the first token"] += 1
        else:
            sessions[one.asked.key.session].append(replace(one, request=_playable(one)))
    return Record(dict(sessions), {reason: times for reason, times in left_out.items() if times})


def standings(
    recorded: Sequence[Exchange], replayed: Mapping[str, Exchange]
) -> Iterator[tuple[str | None, int | None]]:
    """Yield, for each request of a session, whether its answer is comparable, and its first difference.

    `replayed` is by request id. Exchanges that are no answers yield None. After an answer that differs or
    failed, later answers have another context and are not comparable.
    """
    apart = False
    for one in recorded:
        other = replayed.get(one.request.id)
        standing = index = None
        if other is None or isinstance(other.result, Failed):
            apart = True
        elif isinstance(one.result, Generated) and isinstance(other.result, Generated):
            index = first_difference(one.result.tokens, other.result.tokens)
            longer = one.result.usage.prompt_tokens != other.result.usage.prompt_tokens
            # Equally many, but other tokens: the prompt was tokenised differently.
            otherwise = index is None and one.answered.history != other.answered.history
            standing = AFTER if apart else OTHER if longer or otherwise else COMPARABLE
            index = index if standing == COMPARABLE else None
            apart = apart or standing == OTHER or index is not None
        yield standing, index


def first_difference(recorded: tuple[int, ...], replayed: tuple[int, ...]) -> int | None:
    """Return the index of the first token that differs; None if all are equal."""
    if recorded == replayed:
        return None
    pairs = enumerate(zip(recorded, replayed, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(recorded), len(replayed)))


def _playable(one: Exchange) -> Request:
    """Return the request with its derived seed and its actual length, without position and deadline."""
    request, result, entry = one.request, one.result, one.asked
    changes: dict[str, object] = {"expect_position": None}
    if isinstance(request, Append | Generate):
        changes["deadline_s"] = None
    if isinstance(request, Generate) and isinstance(result, Generated):
        if request.seed is None and request.temperature > 0:
            changes["seed"] = derived_seed(entry.key, entry.seq)
        if result.finish_reason in ("cancelled", "expired"):  # stopped from outside
            changes["max_tokens"] = len(result.tokens)
    return structs.replace(request, **changes)


def _asked(request: Request) -> bytes:
    """Return a request encoded without its random parts."""
    drawn = {"id": "x"} | ({"seed": None} if isinstance(request, Generate) else {})
    return encode(structs.replace(request, **drawn))


def _decoded(decode: Callable[[bytes], T], body: bytes) -> T | None:
    try:
        return decode(body)
    except InvalidMessageError:
        return None
