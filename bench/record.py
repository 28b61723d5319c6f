"""What a log tells of its sessions: what to play again, when, and how an answer stands to it. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import derived_seed
from turnkeep_client.messages import (
    Append,
    Close,
    Failed,
    Generate,
    Generated,
    Rewind,
    decode_request,
    decode_result,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from turnkeep_client.log import Entry
    from turnkeep_client.messages import Request, Result

T = TypeVar("T")

#: How an answer stands to the record's.
COMPARABLE, AFTER, OTHER = "comparable", "after a difference", "other context"


@dataclass(frozen=True, slots=True)
class Step:
    """One request, ready to be sent again, and its recorded result. Times count from the record's start.

    `waits`: it came after the answer to the one before it, so that its sender may have read that.
    """

    request: Request
    result: Result
    asked_s: float
    answered_s: float
    waits: bool
    history: str | None


@dataclass(frozen=True, slots=True)
class Record:
    """Sessions by name. `left_out` counts the requests that are not played again, by the reason."""

    sessions: dict[str, tuple[Step, ...]]
    left_out: dict[str, int]
    models: tuple[str, ...]

    @property
    def steps(self) -> list[Step]:
        """All requests to be played."""
        return [step for steps in self.sessions.values() for step in steps]

    @property
    def num_at_once(self) -> int:
        """The most requests that were under way at one time."""
        # An end before a start at the same time: those two did not overlap.
        events = [(step.asked_s, 1) for step in self.steps] + [(step.answered_s, -1) for step in self.steps]
        return max(1, *accumulate(change for _, change in sorted(events)))

    @property
    def digest(self) -> str:
        """Name what was asked, in every session: replays of other requests are not comparable."""
        asked = (b"\n".join(_asked(step.request) for step in steps) for steps in self.sessions.values())
        return blake2b(b"\n\n".join(sorted(asked)), digest_size=8).hexdigest()


def fold(entries: Sequence[Entry]) -> Record:
    """Join the requests of a log with their results, session by session.

    What changed nothing is left out: refused and repeated requests, those without a result, and generates
    that were cancelled before their first token.
    """
    left_out: Counter[str] = Counter()
    by_session: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_session[entry.key.session].append(entry)
    found = {name: pairs for name, some in by_session.items() if (pairs := _pairs(some, left_out))}
    start = min((pairs[0][0].stored for pairs in found.values()), default=None)
    models = {answered.model for pairs in found.values() for _, answered, _, _ in pairs}

    def at_s(entry: Entry) -> float:
        return (entry.stored - start).total_seconds() if start is not None else 0.0

    sessions = {
        name: tuple(
            Step(request, result, at_s(asked), at_s(answered), waits, answered.history)
            for (asked, answered, request, result), waits in zip(pairs, _waits(pairs), strict=True)
        )
        for name, pairs in sorted(found.items(), key=lambda one: one[1][0][0].stored)
    }
    return Record(sessions, dict(left_out), tuple(sorted(filter(None, models))))


class Following:
    """Follows one session: whether its replay still has the context of the record.

    A turn that differs leaves another history behind: from there on answers may differ for that reason alone,
    until the session is rewound to a position before it.
    """

    def __init__(self) -> None:
        self._position = 0
        #: Where the first difference that is still in the session lies.
        self._apart_from: int | None = None

    def take(self, step: Step, result: Result | None, history: str | None) -> tuple[str | None, int | None]:
        """Return the standing of an answer and the index of its first difference; None of what is none."""
        before, recorded = self._position, step.result
        self._position = recorded.position or 0
        if isinstance(step.request, Rewind | Close):
            self._position = self._position if isinstance(step.request, Rewind) else 0
            if self._apart_from is not None and self._position <= self._apart_from:
                self._apart_from = None
        if result is None:
            self._apart_from = before if self._apart_from is None else self._apart_from
        if not isinstance(result, Generated) or not isinstance(recorded, Generated):
            return None, None
        if self._apart_from is not None:
            return AFTER, None
        standing, index = COMPARABLE, first_difference(recorded.tokens, result.tokens)
        longer = result.usage.prompt_tokens != recorded.usage.prompt_tokens
        # The same number of tokens, and other ones: the prompt was tokenised otherwise.
        if longer or (index is None and history and step.history and history != step.history):
            standing, index = OTHER, None
        if standing == OTHER or index is not None:
            self._apart_from = before
        return standing, index


def first_difference(recorded: tuple[int, ...], replayed: tuple[int, ...]) -> int | None:
    """Return the index of the first token that differs, None where there is none."""
    if recorded == replayed:
        return None
    pairs = enumerate(zip(recorded, replayed, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(recorded), len(replayed)))


_Pair = tuple["Entry", "Entry", "Request", "Result"]


def _pairs(entries: Sequence[Entry], left_out: Counter[str]) -> list[_Pair]:
    results: dict[int, tuple[Result, Entry]] = {}
    for entry in entries:
        result = _decoded(decode_result, entry.body) if entry.kind == "out" else None
        if result is not None and result.seq:
            results.setdefault(result.seq, (result, entry))
    found: list[_Pair] = []
    for entry in entries:
        if entry.kind == "in":
            request = _decoded(decode_request, entry.body)
            result, answered = results.get(entry.seq, (None, None))
            if request is None:
                left_out["no valid request"] += 1
            elif result is None or answered is None:
                left_out["not answered"] += 1
            elif result.repeat_of is not None:
                left_out["repeated"] += 1
            elif isinstance(result, Failed):
                left_out["refused"] += 1
            elif isinstance(result, Generated) and not result.tokens:
                left_out["cancelled before the first token"] += 1
            else:
                found.append((entry, answered, _playable(request, result, entry), result))
    return found


def _playable(request: Request, result: Result, entry: Entry) -> Request:
    """Make the request say what its place in the log said for it, and drop its guard."""
    changes: dict[str, object] = {"expect_position": None}
    if isinstance(request, Append | Generate):
        changes["deadline_s"] = None
    if isinstance(request, Generate) and isinstance(result, Generated):
        if request.seed is None and request.temperature > 0:
            changes["seed"] = derived_seed(entry.key, entry.seq)
        if result.finish_reason in ("cancelled", "expired"):  # it ended where somebody happened to stop it
            changes["max_tokens"] = len(result.tokens)
    return replace(request, **changes)


def _waits(pairs: Sequence[_Pair]) -> list[bool]:
    return [False, *(later[0].seq > earlier[1].seq for earlier, later in pairwise(pairs))]


def _asked(request: Request) -> bytes:
    """Return what a request wants, without what was drawn for it."""
    drawn: dict[str, object] = {"id": "x"}
    if isinstance(request, Generate):
        drawn["seed"] = None
    return encode(replace(request, **drawn))


def _decoded(decode: Callable[[bytes], T], body: bytes) -> T | None:
    try:
        return decode(body)
    except InvalidMessageError:
        return None
