"""What a log tells of its sessions: which requests to play again, when, and what came of them. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import msgspec

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import derived_seed
from turnkeep_client.messages import Append, Failed, Generate, Generated, decode_request, decode_result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from turnkeep_client.log import Entry
    from turnkeep_client.messages import Request, Result


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
class Recorded:
    """One session of the record."""

    name: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """All of it. `left_out` counts the requests that are not played again, by the reason."""

    sessions: tuple[Recorded, ...]
    left_out: dict[str, int]
    models: tuple[str, ...]

    @property
    def num_at_once(self) -> int:
        """The most requests that were under way at one time."""
        spans = [(step.asked_s, step.answered_s) for session in self.sessions for step in session.steps]
        # An end before a start at the same time: those two did not overlap.
        events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
        running = most = 0
        for _, change in events:
            running += change
            most = max(most, running)
        return max(1, most)

    @property
    def num_steps(self) -> int:
        """Requests to be played."""
        return sum(len(session.steps) for session in self.sessions)


@dataclass(frozen=True, slots=True)
class _Pair:
    request: Request
    result: Result
    asked: Entry
    answered: Entry


def fold(entries: Sequence[Entry]) -> Record:
    """Join the requests of a log with their results, session by session.

    What changed nothing is left out: refused and repeated requests, those without a result, and generates
    that were cancelled before their first token.
    """
    left_out: Counter[str] = Counter()
    by_session: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_session[entry.key.session].append(entry)
    pairs = {name: _pairs(some, left_out) for name, some in by_session.items()}
    pairs = {name: some for name, some in pairs.items() if some}
    if not pairs:
        return Record((), dict(left_out), ())
    start = min(some[0].asked.stored for some in pairs.values())
    sessions = [
        Recorded(name, _steps(some, lambda entry: (entry.stored - start).total_seconds()))
        for name, some in pairs.items()
    ]
    sessions.sort(key=lambda session: session.steps[0].asked_s)
    models = dict.fromkeys(pair.answered.model for some in pairs.values() for pair in some)
    return Record(tuple(sessions), dict(left_out), tuple(model for model in models if model))


def _pairs(entries: Sequence[Entry], left_out: Counter[str]) -> list[_Pair]:
    results: dict[int, tuple[Result, Entry]] = {}
    for entry in entries:
        result = _decoded(decode_result, entry.body) if entry.kind == "out" else None
        if result is not None and result.seq:
            results.setdefault(result.seq, (result, entry))
    found = []
    for entry in entries:
        if entry.kind != "in":
            continue
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
            found.append(_Pair(_playable(request, result, entry), result, entry, answered))
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
    return msgspec.structs.replace(request, **changes)


def _steps(pairs: Sequence[_Pair], at_s: Callable[[Entry], float]) -> tuple[Step, ...]:
    waits = [False, *(later.asked.seq > earlier.answered.seq for earlier, later in pairwise(pairs))]
    return tuple(
        Step(pair.request, pair.result, at_s(pair.asked), at_s(pair.answered), waiting, pair.answered.history)
        for pair, waiting in zip(pairs, waits, strict=True)
    )


_T = TypeVar("_T")


def _decoded(decode: Callable[[bytes], _T], body: bytes) -> _T | None:
    try:
        return decode(body)
    except InvalidMessageError:
        return None
